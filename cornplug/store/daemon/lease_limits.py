"""Bytes that the leases of each client keep in place, limited so that no client keeps the whole store.

An entry counts once for a client, however many leases it has on it: requests share prefixes.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

from cornplug.store.daemon.eviction import EvictableEntry

E = TypeVar("E", bound=EvictableEntry)


class LeaseLimits(Generic[E]):
    """Counts for one index. An `owner` is one connection."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: dict[int, Counter[E]] = {}
        self._bytes: Counter[int] = Counter()

    def may(self, owner: int, entry: E) -> bool:
        """Whether this owner may have a lease on this entry. The first one it always may."""
        held = self._held.get(owner)
        return not held or entry in held or self._bytes[owner] + entry.room <= self._most_bytes

    def add(self, owner: int, entry: E) -> None:
        """It has one more."""
        held = self._held.setdefault(owner, Counter())
        held[entry] += 1
        if held[entry] == 1:
            self._bytes[owner] += entry.room

    def drop(self, owner: int, entry: E) -> None:
        """It has one fewer."""
        held = self._held[owner]
        held[entry] -= 1
        if held[entry]:
            return
        del held[entry]
        self._bytes[owner] -= entry.room
        if not held:
            del self._held[owner], self._bytes[owner]
