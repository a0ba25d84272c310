"""Well-known policies for comparison with the store's: byte-sized caches that ignore apps and locations.

Compared with libCacheSim's of the same names by a test: LRU, FIFO and SIEVE agree in every hit, GDSF to 0.1 %
if the cache has at least a tenth of the bytes. A missing entry is inserted unless it is larger than the
cache.

`offline_optimum` bounds the hits and saved seconds of any policy, also of one that knows the future. For
equal sizes it is Belady's MIN with bypass, which is exact for hits. Otherwise it is the bound PFOO-L (Berger,
Beckmann and Harchol-Balter, 2018): a stay of an entry between two of its uses takes its bytes times the
accesses meanwhile. The most valuable stays share the cache's bytes times the trace's accesses, as if they
could be packed without a gap.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cornplug.replay.trace_readers import TraceAccess, TraceRequest

_NONE: Final = -1
"""Placeholder for no key. Keys are not negative."""


@dataclass(frozen=True, slots=True)
class OfflineOptimum:
    """Upper bounds on the hits and on the saved seconds of any policy."""

    name: str
    hits: float
    saved_s: float


def offline_optimum(accesses: Sequence[TraceAccess], capacity_bytes: int) -> OfflineOptimum:
    """Return the optimum if each access could be served alone. With prefixes, less can be saved."""
    sizes = {access.size_bytes for access in accesses}
    costs = {access.cost_s for access in accesses}
    if len(sizes) == 1 and len(costs) <= 1:
        hits = _belady(accesses, capacity_bytes // max(1, *sizes, 1))
        return OfflineOptimum("optimum (Belady)", hits, hits * (next(iter(costs), 0.0)))
    return OfflineOptimum(
        "optimum (PFOO-L bound)",
        _pfoo(accesses, capacity_bytes, lambda access: 1.0),
        _pfoo(accesses, capacity_bytes, lambda access: access.cost_s),
    )


def _belady(accesses: Sequence[TraceAccess], slots: int) -> int:
    """Return the hits of MIN, which keeps the entries whose next use is nearest and may leave out a new
    entry.
    """
    never = len(accesses)
    following = [never] * len(accesses)
    last: dict[int, int] = {}
    for at in range(len(accesses) - 1, -1, -1):
        key = accesses[at].key
        following[at] = last.get(key, never)
        last[key] = at
    held: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for at, access in enumerate(accesses):
        hits += held.pop(access.key, None) is not None
        if following[at] == never:
            continue
        held[access.key] = following[at]
        heapq.heappush(farthest, (-following[at], access.key))
        while len(held) > slots:
            use, key = heapq.heappop(farthest)
            if held.get(key) == -use:
                del held[key]
    return hits


def _pfoo(
    accesses: Sequence[TraceAccess], capacity_bytes: int, value: Callable[[TraceAccess], float]
) -> float:
    """Return the value of the best stays that fit into the cache's bytes times the number of accesses."""
    last: dict[int, int] = {}
    stays: list[tuple[float, float, float]] = []
    for at, access in enumerate(accesses):
        since = last.get(access.key)
        last[access.key] = at
        if since is None or access.size_bytes > capacity_bytes:
            continue
        room = float(max(1, access.size_bytes) * (at - since))
        stays.append((value(access) / room, room, value(access)))
    stays.sort(reverse=True)
    left, total = float(capacity_bytes) * len(accesses), 0.0
    for density, room, worth in stays:
        if room >= left:
            return total + density * left
        left -= room
        total += worth
    return total


class ReferenceCache:
    """Cache of `capacity_bytes`. Subclasses define the effect of a use, and the victim."""

    newcomers_compete = False
    """Whether a new entry can be the victim of its own insertion."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.sizes: OrderedDict[int, int] = OrderedDict()
        """Bytes by key, in insertion order unless a subclass moves them."""

    def serve(self, request: TraceRequest) -> list[bool]:
        """Return whether each access finds its entry, and insert the missing entries."""
        return [self._access(access) for access in request.accesses]

    def _access(self, access: TraceAccess) -> bool:
        if access.key in self.sizes:
            self.use(access)
            return True
        if access.size_bytes > self.capacity_bytes:
            return False
        if self.newcomers_compete:
            self._add(access)
            self._evict_until(self.capacity_bytes)
        else:
            self._evict_until(self.capacity_bytes - access.size_bytes)
            self._add(access)
        return False

    def _add(self, access: TraceAccess) -> None:
        self.sizes[access.key] = access.size_bytes
        self.used_bytes += access.size_bytes
        self.insert(access)

    def _evict_until(self, most_bytes: int) -> None:
        while self.used_bytes > most_bytes:
            self.used_bytes -= self.sizes.pop(self.victim())

    def use(self, access: TraceAccess) -> None:
        """Record that an entry was found."""

    def insert(self, access: TraceAccess) -> None:
        """Record that an entry is new."""

    def victim(self) -> int:
        """Return the key of the entry to evict. The caller removes it from `sizes`."""
        return next(iter(self.sizes))


class FIFOCache(ReferenceCache):
    """First in, first out."""


class LRUCache(ReferenceCache):
    """Least recently used."""

    def use(self, access: TraceAccess) -> None:
        self.sizes.move_to_end(access.key)


class SieveCache(ReferenceCache):
    """SIEVE (NSDI'24): a hand moves from old to new entries, skips those used since its last visit, and
    resets them."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._newer: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._used: set[int] = set()
        self._newest = self._oldest = self._hand = _NONE

    def use(self, access: TraceAccess) -> None:
        self._used.add(access.key)

    def insert(self, access: TraceAccess) -> None:
        self._older[access.key], self._newer[access.key] = self._newest, _NONE
        if self._newest == _NONE:
            self._oldest = access.key
        else:
            self._newer[self._newest] = access.key
        self._newest = access.key

    def victim(self) -> int:
        key = self._oldest if self._hand == _NONE else self._hand
        while key in self._used:
            self._used.discard(key)
            key = self._newer[key]
            if key == _NONE:
                key = self._oldest
        self._hand = self._newer[key]
        self._unlink(key)
        return key

    def _unlink(self, key: int) -> None:
        newer, older = self._newer.pop(key), self._older.pop(key)
        if older == _NONE:
            self._oldest = newer
        else:
            self._newer[older] = newer
        if newer == _NONE:
            self._newest = older
        else:
            self._older[newer] = older


class GDSFCache(ReferenceCache):
    """Greedy-Dual-Size-Frequency: uses per byte plus the value of the last victim.

    Like libCacheSim's, it inserts before it evicts (GDSF.cpp, `GDSF_get`).
    """

    newcomers_compete = True

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._inflation, self._clock = 0.0, 0
        self._uses: dict[int, int] = {}
        self._worth: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, int]] = []

    def use(self, access: TraceAccess) -> None:
        self._uses[access.key] += 1
        self._push(access)

    def insert(self, access: TraceAccess) -> None:
        self._uses[access.key] = 1
        self._push(access)

    def victim(self) -> int:
        while True:
            worth, at, key = heapq.heappop(self._heap)
            if self._worth.get(key) == (worth, at):
                break
        self._inflation = worth
        del self._worth[key], self._uses[key]
        return key

    def value(self, access: TraceAccess, uses: int) -> float:
        """Return the value of `uses` uses, as in libCacheSim."""
        return uses * 1e6 / max(1, access.size_bytes)

    def _push(self, access: TraceAccess) -> None:
        self._clock += 1
        worth = self._inflation + self.value(access, self._uses[access.key])
        self._worth[access.key] = worth, self._clock
        heapq.heappush(self._heap, (worth, self._clock, access.key))


class GDSFSecondsCache(GDSFCache):
    """GDSF with uses weighted by seconds of recomputation."""

    def value(self, access: TraceAccess, uses: int) -> float:
        return uses * access.cost_s * 1e9 / max(1, access.size_bytes)


REFERENCES: Final[Mapping[str, type[ReferenceCache]]] = {
    "LRU": LRUCache,
    "FIFO": FIFOCache,
    "SIEVE": SieveCache,
    "GDSF": GDSFCache,
    "GDSF, seconds": GDSFSecondsCache,
}
