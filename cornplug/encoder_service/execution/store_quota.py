"""How much of the store each account's requests may fill: beyond that its own oldest entries go.

The store evicts what was used longest ago, whoever it is of; so without this one caller's flood of new
media would take everybody's entries out. An account is a tenant, or a class of callers without one.
Engines on the unix socket have none: they are the deployment itself.
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
"""Remembered of one account; what is older is the store's to evict."""


class StoreQuota:
    """Thread-safe. Calls raise StoreError as the store's do."""

    def __init__(
        self, store: Store, fraction: float, *, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`part` of the store's capacity is each account's ceiling."""
        self._store = store
        self._fraction = fraction
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = threading.Lock()
        self._published: dict[str, OrderedDict[bytes, int]] = {}
        self._used_bytes: dict[str, int] = {}
        self._capacity = 0.0, 0
        """Until when it is believed, and how many bytes it is."""

    def evict_for(self, account: str, size_bytes: int) -> bool:
        """Drop so many of the account's oldest entries that this one fits. False where it never will."""
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
        """An entry of the account's is in the store now."""
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
