"""Placement of entries in the arena, and memory for new entries: by growth first, then by eviction.

policy       entries to evict   (`eviction_policy.py`)
by_offset    offset -> entry    all memory of entries, including deleted entries with a lease
by_end       end -> entry       the same

A payload is contiguous, so it is not enough to free as many bytes as it has. If victims were chosen by age
alone, most of an arena of small entries could be evicted before two holes happen to be adjacent. Instead the
hole of an old entry grows over its neighbours, the older neighbour first, until the payload fits. These
adjacent entries are a run. A run has about as many bytes as the payload, at any fragmentation, and nothing is
evicted if the search cannot succeed. Of several runs, the run whose bytes have been unused longest is
evicted. A search that takes too long ends without success, and the next search continues with the next
entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from cornplug.settings import NamespaceConfig
from cornplug.store.arena import ArenaAllocator
from cornplug.store.base import PayloadLocation, ReserveRefusal
from cornplug.store.daemon.eviction_policy import EvictionPolicy

_RUN_BYTES: Final = 256 << 10
_MIN_RUNS, _MAX_RUNS = 8, 128
"""Minimum and maximum number of runs to compare. Between these bounds, a search compares one run per 256 KiB
of the payload, which takes a few percent of the time to copy the payload. With a single run, the store has
0.89 to 0.96 of the byte hits of an LRU that ignores placement. With this number of runs it has 0.98
(`tests/store/daemon/test_byte_hits.py`)."""
_GOOD_ENOUGH_RATIO: Final = 1.25
"""If the loss of a run is at most this many times the loss of equally many bytes of the oldest entry's age,
the search does not look for a better run."""
MAX_EXAMINED_ENTRIES: Final = 8192
"""Maximum number of entries that one call of `allocate` examines in search of victims. This takes about 10
ms.
"""
Grow = Callable[[int], int | None]
"""Function that requests a number of bytes at the arena's end. It returns the number of bytes that it added,
which may be more, less or 0. It returns None if the bytes are being allocated, and `EntryPlacement.extend` is
called when they are available."""


class EvictableEntry(Protocol):
    """Fields of a stored entry that eviction uses."""

    @property
    def location(self) -> PayloadLocation: ...
    @property
    def aligned_bytes(self) -> int: ...
    @property
    def readers(self) -> int: ...
    @property
    def last_use(self) -> int:
        """Sequence number of the entry's last use, among the uses of all entries."""


E = TypeVar("E", bound=EvictableEntry)


class VictimCandidates(Protocol[E]):
    """Entries that one payload may evict, by the rules of `eviction_policy.py`."""

    def __iter__(self) -> Iterator[E]:
        """Yield entries from which a run can start, best first."""

    def group_of(self, entry: E) -> object:
        """Return the group of entries within which victims are chosen by age. Runs of different groups are
        not compared."""

    def loss(self, size_bytes: int, entry: E) -> float:
        """Return the value of `size_bytes` bytes that were last used together with `entry`."""

    def try_add(self, entry: E) -> bool:
        """Return whether this run may also evict `entry`. If so, add it to the run."""


@dataclass(slots=True)
class SearchBudget:
    """Number of entries that a search may still examine. It is limited because all clients wait for the
    search."""

    remaining: int
    total: int


@dataclass(frozen=True, slots=True)
class EvictionPlan(Generic[E]):
    """Result of a search for entries to evict."""

    victims: list[E]
    """Entries to evict. If the budget was spent before the hole was large enough, these are the victims so
    far."""
    is_sufficient: bool
    """Whether the eviction creates a hole of the required size."""
    tried_seeds: list[E]
    """Entries from which the search started without success. The next search should start from other
    entries."""


def plan_eviction(
    size_bytes: int,
    candidates: VictimCandidates[E],
    by_offset: Mapping[int, E],
    by_end: Mapping[int, E],
    holes: ArenaAllocator,
    budget: SearchBudget,
) -> EvictionPlan[E]:
    """Return the entries to evict so that a hole of `size_bytes` bytes appears. Changes nothing but
    `examined_entries`."""
    tried: list[E] = []
    members: set[int] = set()
    best: list[E] = []
    least, good, source = math.inf, 0.0, None
    runs = min(max(size_bytes // _RUN_BYTES, _MIN_RUNS), _MAX_RUNS)
    for oldest in candidates:
        if budget.remaining <= 0:
            break
        # Half of the budget is kept for later payloads of the call, instead of comparing more runs.
        if best and (
            not runs or budget.remaining < budget.total // 2 or candidates.group_of(oldest) is not source
        ):
            break
        begun = budget.remaining
        budget.remaining -= 1
        tried.append(oldest)
        if oldest.location.offset in members:
            continue
        runs -= 1
        good = good or _GOOD_ENOUGH_RATIO * candidates.loss(size_bytes, oldest)
        victims, size, bounded = _run_around(oldest, size_bytes, candidates, by_offset, by_end, holes, budget)
        if size >= size_bytes:
            loss = sum(candidates.loss(entry.aligned_bytes, entry) for entry in victims)
            if loss < least:
                best, least, source = victims, loss, candidates.group_of(oldest)
            if loss <= good:
                break
        elif not bounded and not best:
            # A partial eviction is the only progress if this run used more than half of the budget.
            return EvictionPlan(victims if begun > budget.total // 2 else [], False, tried[:-1])
        # A run that starts from another entry of this run would contain about the same entries.
        members.update(entry.location.offset for entry in victims)
    return EvictionPlan(best, True, []) if best else EvictionPlan([], False, tried)


def _run_around(
    oldest: E,
    size_bytes: int,
    candidates: VictimCandidates[E],
    by_offset: Mapping[int, E],
    by_end: Mapping[int, E],
    holes: ArenaAllocator,
    budget: SearchBudget,
) -> tuple[list[E], int, bool]:
    """Return the run of evictable entries around an entry, the size of the resulting hole, and whether the
    run cannot grow further."""
    victims = [oldest]
    start = oldest.location.offset
    end = start + oldest.aligned_bytes
    end += holes.hole_at(end)
    start -= holes.hole_ending_at(start)
    while end - start < size_bytes and budget.remaining > 0:
        budget.remaining -= 1
        after, before = by_offset.get(end), by_end.get(start)
        sides = [one for one in (after, before) if one is not None and not one.readers]
        if len(sides) == 2 and sides[1].last_use < sides[0].last_use:
            sides.reverse()
        taken = next(filter(candidates.try_add, sides), None)
        if taken is None:
            return victims, end - start, True
        victims.append(taken)
        if taken is after:
            end += taken.aligned_bytes
            end += holes.hole_at(end)
        else:
            start -= taken.aligned_bytes
            start -= holes.hole_ending_at(start)
    return victims, end - start, False


@dataclass(slots=True, eq=False)
class StoredEntry:
    """Committed payload. `aligned_bytes` is its aligned size, and `readers` is the number of its leases."""

    key: bytes
    meta: bytes
    app: str
    location: PayloadLocation
    aligned_bytes: int
    cost_s: float = 0.0
    """Seconds to recompute the entry, as reported by its writer. 0: not reported."""
    written_s: float = 0.0
    used_s: float = 0.0
    """Time at which the entry's last lease or read ended, or at which it was written. The precision is about
    half a second."""
    readers: int = 0
    visible: bool = True
    last_use: int = 0
    """Sequence number of the entry's last use, among the uses of all entries of the store."""


class EntryPlacement:
    """Locations of entries in one arena, and memory for new entries.

    Args:
        evict: Called with each victim. It removes the entry from the index, and calls `remove`.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        grow: Grow,
        evict: Callable[[StoredEntry], None],
        namespaces: Mapping[str, NamespaceConfig] | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes // 64 * 64
        self.policy: EvictionPolicy[StoredEntry] = EvictionPolicy(self.capacity_bytes, namespaces)
        self.evictions = 0
        self.shortfall_bytes = 0
        """Bytes beyond the arena's end that are being allocated, because the largest call needs them."""
        self._grow = grow
        self._evict = evict
        self._allocator = ArenaAllocator()
        self._by_offset: dict[int, StoredEntry] = {}
        self._by_end: dict[int, StoredEntry] = {}
        self._budget = SearchBudget(MAX_EXAMINED_ENTRIES, MAX_EXAMINED_ENTRIES)
        self._growing_bytes = 0
        self._refused_bytes: dict[str, int] = {}
        """Smallest size for which evictions cannot make space until other memory is freed, by namespace."""
        self._gave_up_bytes: int | None = None
        """Size for which this call has ended its search for victims without success. None: no such size."""

    @property
    def end_bytes(self) -> int:
        """Current size of the arena in bytes."""
        return self._allocator.end_bytes

    @property
    def used_bytes(self) -> int:
        """Aligned bytes in use, including reservations and quarantined memory."""
        return self._allocator.end_bytes - self._allocator.free_bytes

    @property
    def examined_entries(self) -> int:
        """Number of entries that this call has examined in search of victims."""
        return MAX_EXAMINED_ENTRIES - self._budget.remaining

    def holes(self) -> list[tuple[int, int]]:
        """Return (offset, size) of all free memory, by offset. For tests and diagnosis."""
        return self._allocator.holes()

    def begin_call(self) -> None:
        """Reset the number of entries that the following calls of `allocate` may examine."""
        self._growing_bytes = 0
        self._budget, self._gave_up_bytes = SearchBudget(MAX_EXAMINED_ENTRIES, MAX_EXAMINED_ENTRIES), None

    def end_call(self) -> None:
        """Update `shortfall_bytes` for the call that has ended."""
        if self._growing_bytes:
            lacking = self._growing_bytes - self._allocator.hole_ending_at(self.end_bytes)
            self.shortfall_bytes = max(self.shortfall_bytes, lacking)

    def extend(self, grown_bytes: int) -> None:
        """Add `grown_bytes` of memory at the end of the arena."""
        self._allocator.extend(grown_bytes)
        self.shortfall_bytes = max(0, self.shortfall_bytes - grown_bytes)
        if grown_bytes:
            self._refused_bytes.clear()

    def allocate(self, size_bytes: int, app: str) -> int | ReserveRefusal:
        """Return the offset of `size_bytes` free bytes, after growth or eviction if needed, or GROWING or
        FULL."""
        name = self.policy.namespace_of(app)
        refused = self._refused_bytes.get(name)
        if refused is not None and size_bytes >= refused:
            return ReserveRefusal.FULL
        beyond = self.policy.ceiling_victims(app, size_bytes)
        if beyond is None:
            self._refused_bytes[name] = size_bytes
            return ReserveRefusal.FULL
        offset = self._allocator.allocate(size_bytes)
        if offset is None:
            if not self._grow_for(size_bytes):
                self._growing_bytes += size_bytes
                return ReserveRefusal.GROWING
            offset = self._allocator.allocate(size_bytes)
        if offset is not None:
            self._evict_all(beyond)
            return offset
        if self._gave_up_bytes is not None and size_bytes >= self._gave_up_bytes:
            return ReserveRefusal.FULL
        found = self._evict_for(size_bytes, app, only_own=self.policy.is_at_ceiling(app))
        if not isinstance(found, ReserveRefusal):
            # The adjacent victims may have fewer bytes than the namespace must free to stay below its
            # ceiling.
            self._evict_all(self.policy.ceiling_victims(app, size_bytes) or [])
        return found

    def free(self, offset: int, size_bytes: int) -> None:
        """Free memory that does not belong to an entry."""
        self._allocator.free(offset, size_bytes)
        self._refused_bytes.clear()

    def add(self, entry: StoredEntry, *, now_s: float) -> None:
        """Add an entry placed by `allocate`, as the most recently used of its namespace."""
        self.policy.add(entry, now_s=now_s)
        self._by_offset[entry.location.offset] = entry
        self._by_end[entry.location.offset + entry.aligned_bytes] = entry
        self._refused_bytes.clear()

    def unpin(self, entry: StoredEntry) -> None:
        """Allow the eviction of an entry whose leases have ended, as the most recently used of its
        namespace."""
        self.policy.unpin(entry)
        self._refused_bytes.clear()

    def remove(self, entry: StoredEntry) -> None:
        """Free the memory of an entry that the policy has removed and that has no reader."""
        offset = entry.location.offset
        del self._by_offset[offset]
        del self._by_end[offset + entry.aligned_bytes]
        self.free(offset, entry.aligned_bytes)

    def _grow_for(self, size_bytes: int) -> bool:
        """Extend the arena as far as possible for `size_bytes` bytes. Return False if the memory is still
        being allocated."""
        missing = size_bytes - self._allocator.hole_ending_at(self.end_bytes)
        # The rest of the arena may be too small alone, but sufficient next to an entry that can be evicted.
        missing = min(missing, self.capacity_bytes - self.end_bytes)
        if missing <= 0:
            return True
        grown = self._grow(missing)
        if grown is not None:
            self.extend(grown)
        return grown is not None

    def _evict_for(self, size_bytes: int, app: str, *, only_own: bool) -> int | ReserveRefusal:
        plan = self._plan_eviction(size_bytes, app, only_own=only_own)
        if (
            not plan.is_sufficient
            and self._budget.remaining > 0
            and self.policy.is_within_share(app, size_bytes)
        ):
            # The namespace is entitled to this memory, but the memory may be scattered between entries that
            # are within the shares of other namespaces.
            plan = self._plan_eviction(size_bytes, app, beyond_shares=True)
        self._evict_all(plan.victims)
        if plan.is_sufficient:
            offset = self._allocator.allocate(size_bytes)
            return ReserveRefusal.FULL if offset is None else offset
        if self._budget.remaining > 0:
            # Until something is freed, another search for this size would fail too.
            self._refused_bytes[self.policy.namespace_of(app)] = size_bytes
            return ReserveRefusal.FULL
        self._gave_up_bytes = size_bytes
        for entry in plan.tried_seeds:
            self.policy.touch(entry)
        return ReserveRefusal.FULL

    def _evict_all(self, victims: Sequence[StoredEntry]) -> None:
        for entry in victims:
            self._evict(entry)
        self.evictions += len(victims)

    def _plan_eviction(
        self, size_bytes: int, app: str, *, beyond_shares: bool = False, only_own: bool = False
    ) -> EvictionPlan[StoredEntry]:
        choice = self.policy.search_victims(app, size_bytes, beyond_shares=beyond_shares, only_own=only_own)
        return plan_eviction(size_bytes, choice, self._by_offset, self._by_end, self._allocator, self._budget)
