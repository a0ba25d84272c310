"""Where entries lie in the arena, and room for new ones: by growth first, then by eviction.

policy       which to evict     (`eviction_policy.py`)
by_offset    offset -> entry    all room in use by entries, also of deleted ones with a lease
by_end       end -> entry       the same

A payload is contiguous, so it is not enough to free its number of bytes. If victims were chosen by age alone,
most of an arena of small entries could be evicted before two holes happen to be adjacent. Instead the hole of
an old entry grows over its neighbours, the older neighbour first, until the payload fits. About `room` bytes
are evicted, at any fragmentation, and nothing is evicted if the search cannot succeed. Of several such runs,
the one whose bytes have been unused longest is evicted. A search that takes too long ends without success,
and the next search continues from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from cornplug.settings import NamespaceConfig
from cornplug.store.base import PayloadLocation, ReserveRefusal
from cornplug.store.daemon.allocator import ArenaAllocator
from cornplug.store.daemon.eviction_policy import EvictionPolicy

_RUN_BYTES: Final = 256 << 10
_RUNS_LEAST, _RUNS_MOST = 8, 128
"""A run for each 256 KiB of the payload is compared, at least 8 and at most 128: a few percent of the time in
which its bytes are copied. Of the byte hits of an LRU that ignores place, a single run keeps 0.89 to 0.96, so
many keep 0.98 (`tests/store/daemon/test_byte_hits.py`)."""
_AS_GOOD_AS_OLDEST: Final = 1.25
"""A run that loses so little more than the oldest entry's bytes would needs no better one."""
MAX_LOOKS: Final = 8192
"""Entries that one call of `reserve` looks at in search of victims: about 10 ms."""
Grow = Callable[[int], int | None]
"""Asks for so many bytes more at the arena's end; returns the number of bytes that it added: more, less or 0.
None: they are being made, and `EntryPlacement.extend` will tell."""


class EvictableEntry(Protocol):
    """An entry as eviction sees it."""

    @property
    def location(self) -> PayloadLocation: ...
    @property
    def room(self) -> int: ...
    @property
    def readers(self) -> int: ...
    @property
    def last_use(self) -> int:
        """Of all uses, the number of its last one."""


E = TypeVar("E", bound=EvictableEntry)


class VictimChoice(Protocol[E]):
    """The entries that one payload may displace, by the rules of `eviction_policy.py`."""

    def __iter__(self) -> Iterator[E]:
        """Those to begin a run with, the first choice first."""

    def source(self, entry: E) -> object:
        """The entries among which this one is chosen by its age: runs of two sources are not compared."""

    def loss(self, room: int, entry: E) -> float:
        """How much `room` bytes are worth that were used when `entry` was."""

    def take(self, entry: E) -> bool:
        """Whether this run may have a neighbour too."""


@dataclass(slots=True)
class LookBudget:
    """The number of entries that may still be looked at: all clients wait meanwhile."""

    left: int
    most: int


@dataclass(frozen=True, slots=True)
class EvictionPlan(Generic[E]):
    """The result of a search."""

    victims: list[E]
    """To drop: for the whole room, or so far, where the looks ended while it still grew."""
    enough: bool
    """Whether a hole of the wanted size appears."""
    tried: list[E]
    """Where leases and reservations stand in the way: the next search had better begin elsewhere."""


def plan_eviction(
    room: int,
    choice: VictimChoice[E],
    by_offset: Mapping[int, E],
    by_end: Mapping[int, E],
    holes: ArenaAllocator,
    looks: LookBudget,
) -> EvictionPlan[E]:
    """Entries to drop so that a hole of `room` bytes appears. Changes nothing but `looks`."""
    tried: list[E] = []
    members: set[int] = set()
    best: list[E] = []
    least, good, source = math.inf, 0.0, None
    runs = min(max(room // _RUN_BYTES, _RUNS_LEAST), _RUNS_MOST)
    for oldest in choice:
        if looks.left <= 0:
            break
        # Comparing leaves the other half of the looks to payloads for which there is no run yet.
        if best and (not runs or looks.left < looks.most // 2 or choice.source(oldest) is not source):
            break
        begun = looks.left
        looks.left -= 1
        tried.append(oldest)
        if oldest.location.offset in members:
            continue
        runs -= 1
        good = good or _AS_GOOD_AS_OLDEST * choice.loss(room, oldest)
        victims, size, bounded = _run_around(oldest, room, choice, by_offset, by_end, holes, looks)
        if size >= room:
            loss = sum(choice.loss(entry.room, entry) for entry in victims)
            if loss < least:
                best, least, source = victims, loss, choice.source(oldest)
            if loss <= good:
                break
        elif not bounded and not best:
            # Only where hardly less than all looks went into this run is a smaller step the only way.
            return EvictionPlan(victims if begun > looks.most // 2 else [], False, tried[:-1])
        # A run of another member is about the same; where two obstacles bound it, none can do better.
        members.update(entry.location.offset for entry in victims)
    return EvictionPlan(best, True, []) if best else EvictionPlan([], False, tried)


def _run_around(
    oldest: E,
    room: int,
    choice: VictimChoice[E],
    by_offset: Mapping[int, E],
    by_end: Mapping[int, E],
    holes: ArenaAllocator,
    looks: LookBudget,
) -> tuple[list[E], int, bool]:
    """The run of evictable entries around one, its size, and whether it can grow no more."""
    victims = [oldest]
    start = oldest.location.offset
    end = start + oldest.room
    end += holes.hole_at(end)
    start -= holes.hole_ending_at(start)
    while end - start < room and looks.left > 0:
        looks.left -= 1
        after, before = by_offset.get(end), by_end.get(start)
        sides = [one for one in (after, before) if one is not None and not one.readers]
        if len(sides) == 2 and sides[1].last_use < sides[0].last_use:
            sides.reverse()
        taken = next(filter(choice.take, sides), None)
        if taken is None:
            return victims, end - start, True
        victims.append(taken)
        if taken is after:
            end += taken.room
            end += holes.hole_at(end)
        else:
            start -= taken.room
            start -= holes.hole_ending_at(start)
    return victims, end - start, False


@dataclass(slots=True, eq=False)
class StoredEntry:
    """One committed payload. `room` is its aligned size; `readers` the leases on it."""

    key: bytes
    meta: bytes
    app: str
    location: PayloadLocation
    room: int
    cost_s: float = 0.0
    """Seconds that its recomputation takes, as its writer said; 0: it did not."""
    written_s: float = 0.0
    used_s: float = 0.0
    """End of its last lease or copying read, or its writing, to about half a second."""
    readers: int = 0
    visible: bool = True
    last_use: int = 0
    """Of all uses of the store's entries, the number of its last one."""


class EntryPlacement:
    """The room of one arena.

    Args:
        evict: Told of each victim; it removes the entry from the index, and from here by `remove`.
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
        """Room beyond the arena's end that the largest call wanted, and that is being made for it."""
        self._grow = grow
        self._evict = evict
        self._allocator = ArenaAllocator()
        self._by_offset: dict[int, StoredEntry] = {}
        self._by_end: dict[int, StoredEntry] = {}
        self._looks = LookBudget(MAX_LOOKS, MAX_LOOKS)
        self._growing_bytes = 0
        self._refused_bytes: dict[str, int] = {}
        """Namespace -> the room that no eviction makes for it until something is freed."""
        self._gave_up_bytes: int | None = None
        """The room for which this call has ended its search."""

    @property
    def end_bytes(self) -> int:
        """The arena's size so far."""
        return self._allocator.end_bytes

    @property
    def used_bytes(self) -> int:
        """Aligned room that is taken, also by reservations and quarantine."""
        return self._allocator.end_bytes - self._allocator.free_bytes

    @property
    def looks(self) -> int:
        """Entries that this call has looked at in search of victims."""
        return MAX_LOOKS - self._looks.left

    def holes(self) -> list[tuple[int, int]]:
        """All (offset, size) of free room, by offset. For tests and diagnosis."""
        return self._allocator.holes()

    def begin_call(self) -> None:
        """Give the next requests for room a fresh budget of looks."""
        self._growing_bytes = 0
        self._looks, self._gave_up_bytes = LookBudget(MAX_LOOKS, MAX_LOOKS), None

    def end_call(self) -> None:
        """Note the room that this call wanted and that is being made."""
        if self._growing_bytes:
            lacking = self._growing_bytes - self._allocator.hole_ending_at(self.end_bytes)
            self.shortfall_bytes = max(self.shortfall_bytes, lacking)

    def extend(self, grown_bytes: int) -> None:
        """Tell that the arena has grown, which `grow` was not asked for."""
        self._allocator.extend(grown_bytes)
        self.shortfall_bytes = max(0, self.shortfall_bytes - grown_bytes)
        if grown_bytes:
            self._refused_bytes.clear()

    def make_room(self, room: int, app: str) -> int | ReserveRefusal:
        """The offset of `room` free bytes, by growth or eviction; GROWING or FULL without them."""
        name = self.policy.name_of(app)
        refused = self._refused_bytes.get(name)
        if refused is not None and room >= refused:
            return ReserveRefusal.FULL
        beyond = self.policy.ceiling_victims(app, room)
        if beyond is None:
            self._refused_bytes[name] = room
            return ReserveRefusal.FULL
        offset = self._allocator.allocate(room)
        if offset is None:
            if not self._extend_for(room):
                self._growing_bytes += room
                return ReserveRefusal.GROWING
            offset = self._allocator.allocate(room)
        if offset is not None:
            self._evict_all(beyond)
            return offset
        if self._gave_up_bytes is not None and room >= self._gave_up_bytes:
            return ReserveRefusal.FULL
        found = self._evict_for(room, app, only_own=self.policy.at_ceiling(app))
        if not isinstance(found, ReserveRefusal):
            # The victims, which lie side by side, may be fewer bytes than the ceiling asks for.
            self._evict_all(self.policy.ceiling_victims(app, room) or [])
        return found

    def free(self, offset: int, room: int) -> None:
        """Take back room that no entry has."""
        self._allocator.free(offset, room)
        self._refused_bytes.clear()

    def add(self, entry: StoredEntry, *, now_s: float) -> None:
        """A new entry in room that `make_room` gave: the last to be evicted."""
        self.policy.add(entry, now_s=now_s)
        self._by_offset[entry.location.offset] = entry
        self._by_end[entry.location.offset + entry.room] = entry
        self._refused_bytes.clear()

    def unpin(self, entry: StoredEntry) -> None:
        """Allow an entry's eviction, as of the one used last: its leases have ended."""
        self.policy.unpin(entry)
        self._refused_bytes.clear()

    def remove(self, entry: StoredEntry) -> None:
        """Free the room of an entry that the policy has forgotten and no reader has."""
        offset = entry.location.offset
        del self._by_offset[offset]
        del self._by_end[offset + entry.room]
        self.free(offset, entry.room)

    def _extend_for(self, room: int) -> bool:
        """Grow as far as possible; False when that is under way."""
        missing = room - self._allocator.hole_ending_at(self.end_bytes)
        # The rest of the arena may be too little alone, and enough beside an entry that can be evicted.
        missing = min(missing, self.capacity_bytes - self.end_bytes)
        if missing <= 0:
            return True
        grown = self._grow(missing)
        if grown is not None:
            self.extend(grown)
        return grown is not None

    def _evict_for(self, room: int, app: str, *, only_own: bool) -> int | ReserveRefusal:
        plan = self._plan(room, app, only_own=only_own)
        if not plan.enough and self._looks.left > 0 and self.policy.within_share(app, room):
            # It has a right to room, which may lie scattered between entries of others' shares.
            plan = self._plan(room, app, beyond_shares=True)
        self._evict_all(plan.victims)
        if plan.enough:
            offset = self._allocator.allocate(room)
            return ReserveRefusal.FULL if offset is None else offset
        if self._looks.left > 0:
            # Until something is freed, asking for as much again would search in vain again.
            self._refused_bytes[self.policy.name_of(app)] = room
            return ReserveRefusal.FULL
        self._gave_up_bytes = room
        for entry in plan.tried:
            self.policy.touch(entry)
        return ReserveRefusal.FULL

    def _evict_all(self, victims: Sequence[StoredEntry]) -> None:
        for entry in victims:
            self._evict(entry)
        self.evictions += len(victims)

    def _plan(
        self, room: int, app: str, *, beyond_shares: bool = False, only_own: bool = False
    ) -> EvictionPlan[StoredEntry]:
        choice = self.policy.search(app, room, beyond_shares=beyond_shares, only_own=only_own)
        return plan_eviction(room, choice, self._by_offset, self._by_end, self._allocator, self._looks)
