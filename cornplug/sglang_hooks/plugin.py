"""Entry point `sglang.srt.plugins`, which SGLang calls in every process of every server. It selects the hooks
that a server needs, registers them with SGLang, and verifies that SGLang has applied them.

In a server that does not enable cornplug, this only adds cornplug's flags. In a server that enables cornplug,
a process stops with an error if a hook cannot work. If the installed SGLang is outside the tested range,
servers run as stock SGLang regardless of the flags.

SGLang catches a plugin's exceptions, and only logs hooks that it could not apply. Only the hooks that a
server needs are installed, because a hook that is not installed cannot break the server. Hooks are grouped
into parts. The main process selects the parts from SGLang's resolved settings, and passes the parts' names to
its child processes (`activation.publish_parts`).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Final

from cornplug.encoder_service.formats.tensors import dtype_name
from cornplug.errors import ConfigError
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.activation import ENABLE
from cornplug.sglang_hooks.compat import SUPPORTED_VERSIONS, Hook

_PACKAGE: Final = "cornplug.sglang_hooks"

# Modules whose `HOOKS` a part uses, by part. "module:NAME" is another tuple of hooks in a module.
_MODULES: Final = {
    # Used only in the main process, while SGLang resolves its settings.
    "resolution": ("kv.hicache_config",),
    "weights": ("model.weight_updates", "weight_epochs:DISK_HOOKS", "weight_epochs:TRAINER_HOOKS"),
    "loaded": ("weight_epochs:LOADED_HOOKS",),
    "kv": ("kv_pages.page_hash_index", "kv.late_exclusions", "kv.storage_hooks"),
    "idle_backups": ("kv.storage_hooks:IDLE_HOOKS",),
    "lora": ("kv_pages.namespace_roots",),
    "images": ("media.placeholder_tokens", "media.mm_identifiers", "media.encoder_bypass"),
    "cpu_images": ("media.preprocessing",),
    "llava": ("media.media_digests:LLAVA_HOOKS",),
    "encoder": ("media.epd", "media.epd_fallback"),
}
_RESOLUTION: Final = frozenset({"resolution"})
ALL: Final = frozenset(_MODULES)
_registered: dict[str, Hook] = {}


def register() -> None:
    """Register the hooks for cornplug's flags. In child processes of a sharing server, also register the
    hooks that the server needs."""
    from cornplug.sglang_hooks import flags

    if SUPPORTED_VERSIONS.explain_mismatch():
        register_hooks(flags.STOCK_HOOKS)
        return
    register_hooks((*flags.HOOKS, *_RESOLUTION_HOOKS))
    parts = activation.selected_parts() if activation.is_on() else None
    if parts is not None:
        register_parts(parts)


def _wrap_resolve_once(original: Callable[[Any], None], server_args: Any) -> None:
    """Select and install the hooks that the server needs, around SGLang's resolution of its settings.

    Resolution is the last step before SGLang freezes the settings and starts processes, both for command
    lines and for `Engine(...)`.
    """
    if not activation.is_on() or getattr(server_args, "_resolution_finished", False):
        original(server_args)
        return
    from cornplug.engine_common import engine_state
    from cornplug.sglang_hooks.kv import hicache_config

    engine_state.record_engine_start(fresh=True)
    install(_RESOLUTION)
    hicache_config.check_flags(server_args, activation.config())
    original(server_args)
    parts = select_parts(server_args)
    activation.publish_parts(parts)
    activation.hook_front_ends(server_args, parts)
    install(parts)


def select_parts(server_args: Any) -> frozenset[str]:
    """Return the parts that a server with these resolved settings needs."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    from cornplug.sglang_hooks.kv import hicache_config
    from cornplug.sglang_hooks.media import preprocessing

    settled = resolved_view(server_args)
    found = {"weights"}
    # SGLang does not resolve a model for these paths.
    if str(settled.model_path).lower() in ("none", "dummy"):
        return frozenset(found)
    if settled.enable_hierarchical_cache and hicache_config.is_cornplug_storage(settled):
        found.add("kv")
        if settled.hicache_write_policy == hicache_config.SECOND_REQUEST_POLICY:
            found.add("idle_backups")
        # Adapters may be loaded at run time only if LoRA was enabled at start.
        found |= {"lora"} if settled.enable_lora or settled.lora_paths else set()
    model = model_config_of(server_args)
    # Keys are computed from the checkpoint's files. Therefore the loaded weights are compared with these
    # files.
    found |= {"loaded"} if "kv" in found or model.is_multimodal else set()
    if model.is_multimodal:
        found.add("images")
        # LLaVA's processor decodes images in separate processes.
        family = str(model.hf_config.model_type)
        dtype, device = dtype_name(model.dtype), str(settled.device)
        if preprocessing.preprocesses_on_cpu(activation.config(), device=device, family=family, dtype=dtype):
            found.add("cpu_images")
        found |= {"llava"} if "llava" in family else set()
        encoder = settled.language_only or settled.encoder_urls or settled.enable_adaptive_dispatch_to_encoder
        found |= {"encoder"} if encoder else set()
    return frozenset(found)


def install(parts: Iterable[str]) -> None:
    """Install the hooks of these parts now, in the main process, which has already loaded its plugins.

    Raises ConfigError if the installed SGLang lacks a hook's target, if the target has other parameters, or
    if another plugin has replaced the target.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    register_parts(parts)
    HookRegistry.apply_hooks()
    verify_hooks()


def register_parts(parts: Iterable[str]) -> None:
    """Register the hooks of these parts with SGLang, and a hook that verifies that they are installed."""
    register_hooks((*hooks_of(parts), _VERIFY_HOOK))


def register_hooks(added: tuple[Hook, ...]) -> None:
    """Register these hooks with SGLang, which applies them after all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource("cornplug", "cornplug")
    for hook in added:
        name = f"{hook.target} ({hook.function.__module__}.{hook.function.__qualname__})"
        if name not in _registered:
            HookRegistry.register(hook.target, hook.function, HookType(hook.kind), source=source)
            _registered[name] = hook


def hooks_of(parts: Iterable[str]) -> tuple[Hook, ...]:
    """Return the hooks of these parts."""
    found: list[Hook] = []
    for place in (place for part in sorted(parts) for place in _MODULES[part]):
        module, _, name = place.partition(":")
        found += getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name or "HOOKS")
    return tuple(found)


def verify_hooks(*_args: Any, **_kwargs: Any) -> None:
    """Raise ConfigError unless every hook of this process is installed and fits its target's parameters."""
    missing = sorted(name for name, hook in _registered.items() if not is_applied(hook))
    if missing:
        raise ConfigError(
            ENABLE,
            f"cornplug cannot hook these functions of SGLang {SUPPORTED_VERSIONS.installed_version()}: "
            f"{', '.join(missing)}",
            "See SGLang's log for the reason. Remove the flag, or the plugin that replaces the same "
            "function (SGLANG_PLUGINS).",
        )
    unlike = sorted(
        f"{name}: {why}" for name, hook in _registered.items() if (why := signature_problem(hook))
    )
    if unlike:
        raise ConfigError(
            ENABLE,
            f"SGLang {SUPPORTED_VERSIONS.installed_version()} has functions with other parameters: "
            f"{'; '.join(unlike)}",
            "Install a release of cornplug that supports it, or remove the flag.",
        )


def is_applied(hook: Hook) -> bool:
    """Return whether SGLang's function at `hook.target` now runs `hook.function`."""
    try:
        found: Any = pkgutil.resolve_name(hook.target)
    except (AttributeError, ImportError):
        return False
    if isinstance(found, MethodType):
        found = found.__func__
    while found is not None:
        cells = getattr(found, "__closure__", None) or ()
        if found is hook.function or any(cell.cell_contents is hook.function for cell in cells):
            return True
        found = getattr(found, "__wrapped__", None)
    return False


def signature_problem(hook: Hook) -> str:
    """Return the reason why a hook cannot accept the calls of its target, or "" if it can.

    The check passes every parameter of the target, by position and by name. Therefore an added or renamed
    parameter is detected at startup and not by the first request.
    """
    if hook.kind == "replace":
        return ""
    first = () if hook.kind == "before" else (None,)
    found = pkgutil.resolve_name(hook.target)
    # A hook on a class method receives `cls` as its first argument.
    found = found.__func__ if isinstance(found, MethodType) else found
    target = inspect.signature(found).parameters.values()
    plain = [p for p in target if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name: None for p in target if p.kind is p.KEYWORD_ONLY}
    ours = inspect.signature(hook.function)
    if unknown := sorted(set(hook.reads) - {p.name for p in target}):
        return f"no parameter {', '.join(unknown)}"
    # `self`, `cls` and positional-only parameters are always passed by position.
    fixed = sum(p.kind is p.POSITIONAL_ONLY or p.name in ("self", "cls") for p in plain)
    try:
        ours.bind(*first, *(None for _ in plain), **named)
        by_name = {p.name: None for p in plain[fixed:]}
        ours.bind(*first, *(None for _ in plain[:fixed]), **by_name, **named)
    except TypeError as e:
        return str(e)
    return ""


_RESOLUTION_HOOKS: Final = (
    Hook("sglang.srt.server_args.ServerArgs.resolve_once", "around", _wrap_resolve_once),
)


# Each process calls `publish` as its first step after it has loaded its plugins.
_VERIFY_HOOK: Final = Hook("sglang.srt.runtime_context.publish", "before", verify_hooks)
