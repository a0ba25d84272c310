"""What the KV of a namespace is computed from, besides its tokens: the root of its page keys.

Equal to vLLM's for the same checkpoint, dtype, page and salt: both call `engine_side.page_roots`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from cornplug.engine_side.adapters import Adapters
from cornplug.engine_side.page_roots import page_root
from cornplug.errors import CheckpointError
from cornplug.kv_page import PageGeometry
from cornplug.sglang_hooks import active
from cornplug.sglang_hooks.compat import Hook, logger
from cornplug.sglang_hooks.kv_book import Space
from cornplug.sglang_hooks.salts import salt_of

_FIRST_READ_S: Final = 2.0
_MAX_ROOTS: Final = 4096

_adapters: Final = Adapters()
_adapter_paths: dict[str, str | None] = {}
"""LoRA id -> folder, of every adapter that this process ever loaded; None: it came as tensors."""
_disputed: set[str] = set()
"""Adapter ids that a request without LoRA has named in its extra_key: SGLang's own cache does
not tell its KV from the adapter's, and so nobody can."""


class Roots:
    """Roots of page keys, of one engine process.

    Args:
        identify: gives (language model fingerprint, KV spec); reads weights, so it runs on a
            thread of its own. May raise CheckpointError: then every root raises it.
    """

    def __init__(
        self, secret: bytes, page: PageGeometry, identify: Callable[[], tuple[bytes, dict[str, Any]]]
    ) -> None:
        self._secret, self._page = secret, page
        self._identify = identify
        self._identity: tuple[bytes, dict[str, Any]] | None = None
        self._failed = CheckpointError("the checkpoint is still being read", reason="identifying")
        self._known: dict[tuple[str | None, str], bytes] = {}
        self._read = threading.Event()
        threading.Thread(target=self._read_identity, name="cornplug-identify-lm", daemon=True).start()
        self._read.wait(_FIRST_READ_S)

    def wait(self, timeout_s: float) -> bool:
        """Whether the checkpoint has been read, well or not, within that time."""
        return self._read.wait(timeout_s)

    def root(self, space: Space) -> bytes:
        """The root of a namespace's page keys (32 bytes).

        Raises CheckpointError where nobody can say what its KV is computed from: "identifying"
        in the first moments, "lora", "lora_changed", or what the checkpoint's reading ended with.
        """
        if self._identity is None:
            raise self._failed
        extra_key, lora = _without_lora(space.extra_key)
        salt = salt_of(space.cache_salt, extra_key)
        root = self._known.get((salt, lora))
        if root is None:
            if len(self._known) >= _MAX_ROOTS:
                self._known.clear()
            root = page_root(
                self._secret, self._identity, self._page, adapter=bytes.fromhex(lora) or None, salt=salt
            )
            self._known[salt, lora] = root
        return root

    def _read_identity(self) -> None:
        self._failed = CheckpointError("the language model could not be identified", reason="identity_error")
        try:
            self._identity = self._identify()
        except CheckpointError as e:
            self._failed = e
            logger.warning("cornplug: KV of this engine is not shared: %s", e)
        finally:
            self._read.set()


class RootsOfCall:
    """Roots, each made once: of the pages of one call, which are hundreds of one namespace."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._made: dict[Space, bytes] = {}

    def root(self, space: Space) -> bytes:
        """As `Roots.root`."""
        if space not in self._made:
            self._made[space] = self._roots.root(space)
        return self._made[space]


def _without_lora(extra_key: str | None) -> tuple[str | None, str]:
    """(the user's own extra_key, hex digest of the adapter's bytes or "").

    SGLang appends the adapter's id to the user's extra_key. Raises CheckpointError("lora")
    where that cannot be taken apart.
    """
    if extra_key is None or not _adapter_paths:
        return extra_key, ""
    # A copy: the scheduler's thread may load another adapter meanwhile.
    found = [name for name in list(_adapter_paths) if name in extra_key]
    if not found:
        return extra_key, ""
    if len(found) > 1 or not extra_key.endswith(found[0]) or found[0] in _disputed:
        raise CheckpointError("a namespace that names an adapter in an unknown way", reason="lora")
    path = _adapter_paths[found[0]]
    if path is None:
        raise CheckpointError("an adapter that came as tensors has no files", reason="lora")
    # SGLang makes "" of no extra_key when it appends.
    return extra_key.removesuffix(found[0]) or None, _adapters.digest(path).hex()


def _adapter_loads(manager: Any, lora_ref: Any) -> None:
    """Before an adapter is loaded from its folder: its bytes as they are now are its identity."""
    if not active.is_on():
        return
    _adapter_paths[lora_ref.lora_id] = lora_ref.lora_path
    try:
        _adapters.digest(lora_ref.lora_path)
    except CheckpointError as e:
        logger.warning("cornplug: KV under LoRA %s is not shared: %s", lora_ref.lora_name, e)


def _adapter_comes_as_tensors(manager: Any, lora_ref: Any, *args: Any, **kwargs: Any) -> None:
    if active.is_on():
        _adapter_paths[lora_ref.lora_id] = None


def _request_made(result: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    if _adapter_paths and request.lora_id is None and request.extra_key is not None:
        _disputed.update(name for name in _adapter_paths if name in request.extra_key)


_MANAGER: Final = "sglang.srt.lora.lora_manager.LoRAManager"

HOOKS: tuple[Hook, ...] = (
    Hook(f"{_MANAGER}._load_lora_adapter", "before", _adapter_loads),
    Hook(f"{_MANAGER}._load_lora_adapter_from_tensors", "before", _adapter_comes_as_tensors),
    Hook("sglang.srt.managers.schedule_batch.Req.__init__", "after", _request_made),
)
