"""Bytes that the leases of each client keep in place, limited so that no client keeps the whole store.

An entry counts once for a client, however many leases it has on it: requests share prefixes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

from cornplug.store.daemon.eviction import EvictableEntry

E = TypeVar("E", bound=EvictableEntry)


@dataclass(frozen=True, slots=True)
class LeaseGroup(Generic[E]):
    """Leases of one call: they end together."""

    owner: int
    entries: list[E]
    expires: int


class LeaseLimits(Generic[E]):
    """Counts for one index. An `owner` is one connection."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: dict[int, dict[E, int]] = {}
        self._bytes: Counter[int] = Counter()

    def take(self, owner: int, entry: E) -> bool:
        """Count one more, if this owner may have a lease on this entry. The first one it always may."""
        held = self._held.get(owner)
        if held is None:
            held = self._held[owner] = {}
        count = held.get(entry, 0)
        if not count:
            if held and self._bytes[owner] + entry.room > self._most_bytes:
                return False
            self._bytes[owner] += entry.room
        held[entry] = count + 1
        return True

    def drop(self, owner: int, entry: E) -> None:
        """It has one fewer."""
        held = self._held[owner]
        count = held[entry] - 1
        if count:
            held[entry] = count
            return
        del held[entry]
        self._bytes[owner] -= entry.room
        if not held:
            del self._held[owner], self._bytes[owner]
