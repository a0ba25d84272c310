"""The choice of entries to evict so that one payload fits: one of the oldest, and its neighbours.

Payloads lie in one piece, so freeing enough bytes is not freeing enough room: taking
victims by age alone from an arena of small entries could empty most of it before two holes
happen to meet. Instead an old entry's hole grows over its neighbours, the older one first, until the payload
fits. About `room` bytes are lost, at any fragmentation, and nothing at all is lost
when it cannot succeed. Of several such runs the one goes whose bytes have been unused longest. A search that
takes too long ends without success; the next one goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from cornplug.store.base import PayloadLocation
from cornplug.store.daemon.allocator import ArenaAllocator

_RUN_BYTES: Final = 256 << 10
_RUNS_LEAST, _RUNS_MOST = 8, 128
"""A run for each 256 KiB of the payload is compared, at least 8 and at most 128: a few percent of the time in
which its bytes are copied. Of the byte hits of an LRU that ignores place, a single run keeps 0.89 to 0.96, so
many keep 0.98 (`tests/store/daemon/test_byte_hits.py`)."""
_AS_GOOD_AS_OLDEST: Final = 1.25
"""A run that loses so little more than the oldest entry's bytes would needs no better one."""


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
