"""Roots of page keys: digests of all inputs of a namespace's KV except its tokens.

They equal vLLM's roots for the same checkpoint, dtype, page and salt, because both call
`engine_common.kv_root`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

from cornplug.engine_common.background_identity import CurrentIdentity
from cornplug.engine_common.kv_root import page_root
from cornplug.kv_page import PageGeometry
from cornplug.sglang_hooks.cache_salt import salt_of
from cornplug.sglang_hooks.compat import logger
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace
from cornplug.sglang_hooks.model import lora_adapters

_MAX_ROOTS: Final = 4096


class NamespaceRoots:
    """Roots of page keys for one engine process.

    Args:
        identify: returns (language model fingerprint, KV spec). It reads weights, so it runs on another
            thread. If it raises CheckpointError, every root raises it.
    """

    def __init__(
        self, secret: bytes, page: PageGeometry, identify: Callable[[], tuple[bytes, dict[str, Any]]]
    ) -> None:
        self._secret, self._page = secret, page
        self._identity = CurrentIdentity(identify, "KV", logger.warning)
        self._known: dict[tuple[int, str | None, bytes | None], bytes] = {}
        self._identity.now()[1].first_wait()

    def of(self, page: PageGeometry) -> NamespaceRoots:
        """Return the roots for another kind of the same model's pages."""
        other = copy.copy(self)
        other._page, other._known = page, {}
        return other

    def wait(self, timeout_s: float) -> bool:
        """Wait until the checkpoint has been read, with or without an error, and return whether it was within
        the timeout."""
        return self._identity.now()[1].wait(timeout_s)

    def root(self, space: CacheNamespace) -> bytes:
        """Return the root of a namespace's page keys (32 bytes).

        Raises CheckpointError if the model or adapter is not identified: "identifying" while the checkpoint
        is read, "weights_updated", "lora", "lora_changed", or the error of reading the checkpoint.
        """
        # Wait as at start. Otherwise every first batch after an update would miss.
        self._identity.now()[1].first_wait()
        epoch, identity = self._identity.get()
        extra_key, adapter = lora_adapters.taken_apart(space.extra_key)
        salt = salt_of(space.cache_salt, extra_key)
        root = self._known.get((epoch, salt, adapter))
        if root is None:
            if len(self._known) >= _MAX_ROOTS:
                self._known.clear()
            root = page_root(self._secret, identity, self._page, adapter=adapter, salt=salt)
            self._known[epoch, salt, adapter] = root
        return root


class RootsOfCall:
    """Roots for a single call. Each root is computed once, because hundreds of pages share a namespace."""

    def __init__(self, roots: NamespaceRoots) -> None:
        self._roots = roots
        self._made: dict[CacheNamespace, bytes] = {}

    def root(self, space: CacheNamespace) -> bytes:
        """See `NamespaceRoots.root`."""
        if space not in self._made:
            self._made[space] = self._roots.root(space)
        return self._made[space]
