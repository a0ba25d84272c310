"""LoRA adapters that this engine has loaded, by the id that SGLang gives each.

SGLang creates that id at each load, and appends it to the `extra_key` of a request's namespace. The root of
page keys contains the adapter's digest instead, and the names of weights that this server skips: it applies
only modules that `--lora-target-modules` (or the adapters at start) name.
"""

from __future__ import annotations

import json
from typing import Any, Final

from cornplug.engine_common.lora_digests import LaterAdapters
from cornplug.errors import CheckpointError
from cornplug.identity import digest
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook, logger

_files: Final = LaterAdapters()
_paths: dict[str, str | None] = {}
"""LoRA id -> folder, of every adapter that this process has loaded. None if it was loaded from tensors."""
_managers: dict[str, Any] = {}
"""LoRA id -> SGLang's LoRAManager that has loaded it."""
_left_out: dict[str, bytes] = {}
"""LoRA id -> digest of the names of weights that this server does not apply, b"" if there are none."""
_disputed: set[str] = set()
"""Adapter ids that a request without LoRA had in its extra_key. SGLang's own cache mixes its KV with the
adapter's."""


def taken_apart(extra_key: str | None) -> tuple[str | None, bytes | None]:
    """Return (the user's own extra_key, digest of the adapter's applied weights or None).

    Waits only briefly for the file system. Raises CheckpointError: "lora" if the applied weights are unknown,
    "identifying" if the file system does not respond, "lora_changed" if the files have changed.
    """
    if extra_key is None or not _paths:
        return extra_key, None
    # Copy the keys, because the scheduler's thread may load another adapter at the same time.
    found = [name for name in list(_paths) if name in extra_key]
    if not found:
        return extra_key, None
    name = found[0]
    if len(found) > 1 or not extra_key.endswith(name) or name in _disputed:
        raise CheckpointError("cannot parse the adapter in the request's namespace", reason="lora")
    path = _paths[name]
    if path is None:
        raise CheckpointError("the adapter was loaded from tensors and has no files", reason="lora")
    whole = _files.digest(path, name)
    left_out = _not_applied(name)
    applied = digest("cornplug-adapter-part-v1", whole, left_out) if left_out else whole
    # SGLang treats an absent extra_key as "" when it appends.
    return extra_key.removesuffix(name) or None, applied


def _not_applied(name: str) -> bytes:
    """Digest of the names of an adapter's weights that SGLang leaves out, b"" if it applies all."""
    if name not in _left_out:
        manager = _managers.get(name)
        adapter = manager.loras.get(name) if manager is not None else None
        if manager is None or adapter is None:
            raise CheckpointError(
                "this release of SGLang does not list which parts of an adapter it applies", reason="lora"
            )
        weights = {weight for layer in adapter.layers for weight in layer.weights}
        weights.update(adapter.embedding_layers)
        # Same rule as SGLang's memory pool: a weight is applied if its name contains a target's name.
        skipped = sorted(w for w in weights if not any(target in w for target in manager.target_modules))
        _left_out[name] = (
            digest("cornplug-adapter-skipped-v1", json.dumps(skipped).encode()) if skipped else b""
        )
    return _left_out[name]


def _adapter_loads(manager: Any, lora_ref: Any) -> None:
    """Called before an adapter is loaded from its folder, to digest its current files."""
    if not activation.is_on():
        return
    _managers[lora_ref.lora_id] = manager
    _paths[lora_ref.lora_id] = lora_ref.lora_path
    try:
        _files.read(lora_ref.lora_path, lora_ref.lora_id)
    except CheckpointError as e:
        logger.warning("cornplug: KV under LoRA %s is not shared: %s", lora_ref.lora_name, e)


def _adapter_comes_as_tensors(manager: Any, lora_ref: Any, *args: Any, **kwargs: Any) -> None:
    if activation.is_on():
        _paths[lora_ref.lora_id] = None


def _request_made(result: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    if _paths and request.lora_id is None and request.extra_key is not None:
        _disputed.update(name for name in _paths if name in request.extra_key)


_MANAGER: Final = "sglang.srt.lora.lora_manager.LoRAManager"

HOOKS: tuple[Hook, ...] = (
    Hook(f"{_MANAGER}._load_lora_adapter", "before", _adapter_loads),
    Hook(f"{_MANAGER}._load_lora_adapter_from_tensors", "before", _adapter_comes_as_tensors),
    Hook("sglang.srt.managers.schedule_batch.Req.__init__", "after", _request_made),
)
