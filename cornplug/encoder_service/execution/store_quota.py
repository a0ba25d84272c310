"""Bounds the part of the store that one account fills: beyond it, the account's oldest entries are deleted.

The store evicts the least recently used entries of all accounts, so that without a quota one caller's flood
of new media would evict all others' entries. An account is a tenant, or a class for callers without a tenant.
Engines on the unix socket have no account: they are the deployment itself.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from cornplug.store.base import Store

_CAPACITY_TTL_S: Final = 30.0
_MAX_ENTRIES: Final = 1 << 17
"""Entries remembered of one account; older ones are left to the store's eviction."""


class StoreQuota:
    """Thread-safe. Calls raise the store's StoreError."""

    def __init__(
        self, store: Store, fraction: float, *, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`fraction` of the store's capacity is each account's bound."""
        self._store = store
        self._fraction = fraction
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = threading.Lock()
        self._published: dict[str, OrderedDict[bytes, int]] = {}
        self._used_bytes: dict[str, int] = {}
        self._capacity = 0.0, 0
        """Time until which the store's capacity is cached, and the capacity in bytes."""

    def evict_for(self, account: str, size_bytes: int) -> bool:
        """Delete the account's oldest entries until this one fits. False where it never will."""
        ceiling = self._ceiling_bytes()
        if size_bytes > ceiling:
            return False
        drop: list[bytes] = []
        with self._lock:
            entries = self._published.get(account, OrderedDict())
            while entries and (
                self._used_bytes[account] + size_bytes > ceiling or len(entries) >= _MAX_ENTRIES
            ):
                key, size = entries.popitem(last=False)
                self._used_bytes[account] -= size
                drop.append(key)
        if drop:
            self._store.delete(drop, deadline_s=self._deadline_s)
        return True

    def published(self, account: str, key: bytes, size_bytes: int) -> None:
        """Count an entry that the account has in the store now."""
        with self._lock:
            entries = self._published.setdefault(account, OrderedDict())
            used = self._used_bytes.get(account, 0) - entries.pop(key, 0) + size_bytes
            entries[key] = size_bytes
            self._used_bytes[account] = used

    def _ceiling_bytes(self) -> int:
        until_s, capacity = self._capacity
        now = self._clock()
        if now >= until_s:
            capacity = self._store.stat(deadline_s=self._deadline_s).capacity_bytes
            self._capacity = now + _CAPACITY_TTL_S, capacity
        return int(capacity * self._fraction)
