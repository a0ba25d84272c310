"""Selects the hooks that a server needs. A hook that is not installed cannot break the server.

The main process selects them from SGLang's resolved settings, and passes them to its child processes
(`activation.need`). Each part names modules whose `HOOKS` it uses, or one such tuple of a module.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, Final

from cornplug.encoder_service.wire.tensors import dtype_name
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook

_ROOM: Final = "cornplug.sglang_hooks"

# part -> modules, or one name in a module
_MODULES: Final = {
    # Used only in the main process, while SGLang resolves its settings.
    "resolution": ("kv.hicache_config",),
    "weights": ("model.weight_updates", "disk_updates", "trainer_updates"),
    "loaded": ("model.loaded_weights",),
    "kv": ("kv.page_hash_hooks", "kv.late_exclusions", "kv.prefetch_hooks"),
    "idle_backups": ("kv.idle_hooks",),
    "lora": ("model.lora_adapters",),
    "images": ("mm.placeholder_tokens", "mm.mm_identifiers", "mm.encoder_bypass"),
    "cpu_images": ("mm.cpu_preprocessing",),
    "llava": ("mm.media_digests:LLAVA_HOOKS",),
    "encoder": ("mm.epd", "mm.epd_fallback"),
}
RESOLUTION: Final = frozenset({"resolution"})
ALL: Final = frozenset(_MODULES)


def needed(server_args: Any) -> frozenset[str]:
    """Parts that a server with these resolved settings needs."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    from cornplug.sglang_hooks.kv import hicache_config
    from cornplug.sglang_hooks.mm import cpu_preprocessing

    settled = resolved_view(server_args)
    found = {"weights"}
    # SGLang does not resolve models with these names.
    if str(settled.model_path).lower() in ("none", "dummy"):
        return frozenset(found)
    if settled.enable_hierarchical_cache and hicache_config.is_ours(settled):
        found.add("kv")
        if settled.hicache_write_policy == hicache_config.SECOND_SIGHT:
            found.add("idle_backups")
        # An adapter may be added at run time, but only if LoRA was enabled at start.
        found |= {"lora"} if settled.enable_lora or settled.lora_paths else set()
    model = model_config_of(server_args)
    # Keys are digests of the checkpoint's files, so the weights must have been loaded from them.
    found |= {"loaded"} if "kv" in found or model.is_multimodal else set()
    if model.is_multimodal:
        found.add("images")
        # LLaVA's processor decodes images in separate processes.
        family = str(model.hf_config.model_type)
        dtype, device = dtype_name(model.dtype), str(settled.device)
        if cpu_preprocessing.wanted(activation.config(), device=device, family=family, dtype=dtype):
            found.add("cpu_images")
        found |= {"llava"} if "llava" in family else set()
        encoder = settled.language_only or settled.encoder_urls or settled.enable_adaptive_dispatch_to_encoder
        found |= {"encoder"} if encoder else set()
    return frozenset(found)


def hooks(parts: Iterable[str]) -> tuple[Hook, ...]:
    """Hooks of these parts."""
    found: list[Hook] = []
    for place in (place for part in sorted(parts) for place in _MODULES[part]):
        module, _, name = place.partition(":")
        found += getattr(importlib.import_module(f"{_ROOM}.{module}"), name or "HOOKS")
    return tuple(found)
