"""Roots of page keys. A root is a digest of everything that affects the KV of a namespace, except the tokens.

The roots are equal to vLLM's roots for the same checkpoint, dtype, page geometry and salt, because both
engines call `engine_common.model_identity.page_root`.

SGLang creates an id at each load of a LoRA adapter, and appends the id to the `extra_key` of a request's
namespace. The root contains two other things instead: the adapter's digest, and the names of the adapter's
weights that this server skips. A server applies only modules that `--lora-target-modules` (or the adapters at
start) name.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any, Final

from cornplug.engine_common.lora_digests import BackgroundLoraDigests
from cornplug.engine_common.model_identity import page_root
from cornplug.engine_common.weights_guard import CurrentIdentity
from cornplug.errors import CheckpointError
from cornplug.identity import digest
from cornplug.kv_page import PageGeometry
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook, logger, salt_of
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace

_files: Final = BackgroundLoraDigests()
_paths: dict[str, str | None] = {}
"""Folder from which this process loaded an adapter, or None if it was loaded from tensors, by LoRA id."""
_managers: dict[str, Any] = {}
"""SGLang's LoRAManager that has loaded an adapter, by LoRA id."""
_skipped_weights: dict[str, bytes] = {}
"""Digest of the names of an adapter's weights that this server does not apply, by LoRA id. b"" if it applies
all weights."""
_ambiguous_ids: set[str] = set()
"""LoRA ids that a request without LoRA had in its extra_key. SGLang's own cache does not separate such a
request's KV from the adapter's KV."""
_MANAGER: Final = "sglang.srt.lora.lora_manager.LoRAManager"
_MAX_ROOTS: Final = 4096


def split_extra_key(extra_key: str | None) -> tuple[str | None, bytes | None]:
    """Split SGLang's `extra_key` of a request with a LoRA adapter.

    Returns (the user's own extra_key, digest of the adapter's applied weights). The digest is None without an
    adapter. Waits at most briefly for the file system.

    Raises CheckpointError: "lora" if the applied weights cannot be determined, "identifying" if the file
    system does not respond, "lora_changed" if the files have changed.
    """
    if extra_key is None or not _paths:
        return extra_key, None
    # Copy the keys, because the scheduler's thread may load another adapter at the same time.
    found = [name for name in list(_paths) if name in extra_key]
    if not found:
        return extra_key, None
    name = found[0]
    if len(found) > 1 or not extra_key.endswith(name) or name in _ambiguous_ids:
        raise CheckpointError("cannot parse the adapter in the request's namespace", reason="lora")
    path = _paths[name]
    if path is None:
        raise CheckpointError("the adapter was loaded from tensors and has no files", reason="lora")
    whole = _files.digest(path, name)
    left_out = _skipped_weights_digest(name)
    applied = digest("cornplug-adapter-part-v1", whole, left_out) if left_out else whole
    # When SGLang appends the id, it treats an absent extra_key as "".
    return extra_key.removesuffix(name) or None, applied


def _skipped_weights_digest(name: str) -> bytes:
    """Return the digest of the names of an adapter's weights that SGLang does not apply.

    Returns b"" if SGLang applies all weights.
    """
    if name not in _skipped_weights:
        manager = _managers.get(name)
        adapter = manager.loras.get(name) if manager is not None else None
        if manager is None or adapter is None:
            raise CheckpointError(
                "this release of SGLang does not list which parts of an adapter it applies", reason="lora"
            )
        weights = {weight for layer in adapter.layers for weight in layer.weights}
        weights.update(adapter.embedding_layers)
        # SGLang's memory pool has the same rule: a weight is applied if its name contains a target's name.
        skipped = sorted(w for w in weights if not any(target in w for target in manager.target_modules))
        _skipped_weights[name] = (
            digest("cornplug-adapter-skipped-v1", json.dumps(skipped).encode()) if skipped else b""
        )
    return _skipped_weights[name]


def _before_adapter_load(manager: Any, lora_ref: Any) -> None:
    """Compute the digest of an adapter's current files before SGLang loads the adapter from its folder."""
    if not activation.is_on():
        return
    _managers[lora_ref.lora_id] = manager
    _paths[lora_ref.lora_id] = lora_ref.lora_path
    try:
        _files.read_digest(lora_ref.lora_path, lora_ref.lora_id)
    except CheckpointError as e:
        logger.warning(
            "cornplug: KV of requests with LoRA adapter %s is not shared: %s", lora_ref.lora_name, e
        )


def _before_tensor_load(manager: Any, lora_ref: Any, *args: Any, **kwargs: Any) -> None:
    if activation.is_on():
        _paths[lora_ref.lora_id] = None


def _on_request_created(result: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    if _paths and request.lora_id is None and request.extra_key is not None:
        _ambiguous_ids.update(name for name in _paths if name in request.extra_key)


HOOKS: tuple[Hook, ...] = (
    Hook(f"{_MANAGER}._load_lora_adapter", "before", _before_adapter_load),
    Hook(f"{_MANAGER}._load_lora_adapter_from_tensors", "before", _before_tensor_load),
    Hook("sglang.srt.managers.schedule_batch.Req.__init__", "after", _on_request_created),
)


class NamespaceRoots:
    """Computes the roots of page keys in one engine process.

    Args:
        identify: returns (language model fingerprint, KV spec). Runs on another thread, because it reads
            weights. If it raises CheckpointError, every call of `root` raises the same error.
    """

    def __init__(
        self, secret: bytes, page: PageGeometry, identify: Callable[[], tuple[bytes, dict[str, Any]]]
    ) -> None:
        self._secret, self._page = secret, page
        self._identity = CurrentIdentity(identify, "KV", logger.warning)
        self._known: dict[tuple[int, str | None, bytes | None], bytes] = {}
        self._identity.current()[1].wait_initially()

    def for_page(self, page: PageGeometry) -> NamespaceRoots:
        """Return the roots for another page geometry of the same model."""
        other = copy.copy(self)
        other._page, other._known = page, {}
        return other

    def wait(self, timeout_s: float) -> bool:
        """Wait until the checkpoint has been read, or until reading it has failed.

        Returns False if the timeout expires first.
        """
        return self._identity.current()[1].wait(timeout_s)

    def root(self, space: CacheNamespace) -> bytes:
        """Return the root of a namespace's page keys (32 bytes).

        Raises CheckpointError if the model or adapter is not identified: "identifying" while the checkpoint
        is being read, "weights_updated", "lora", "lora_changed", or the error that ended the reading of the
        checkpoint.
        """
        # Wait as at startup. Otherwise the first batch after a weight update would always miss.
        self._identity.current()[1].wait_initially()
        epoch, identity = self._identity.get()
        extra_key, adapter = split_extra_key(space.extra_key)
        salt = salt_of(space.cache_salt, extra_key)
        root = self._known.get((epoch, salt, adapter))
        if root is None:
            if len(self._known) >= _MAX_ROOTS:
                self._known.clear()
            root = page_root(self._secret, identity, self._page, adapter=adapter, salt=salt)
            self._known[epoch, salt, adapter] = root
        return root


class CallRoots:
    """Cache of roots for a single call, because hundreds of pages share a namespace."""

    def __init__(self, roots: NamespaceRoots) -> None:
        self._roots = roots
        self._made: dict[CacheNamespace, bytes] = {}

    def root(self, space: CacheNamespace) -> bytes:
        """Return the root of a namespace's page keys. Raises the same errors as `NamespaceRoots.root`."""
        if space not in self._made:
            self._made[space] = self._roots.root(space)
        return self._made[space]
