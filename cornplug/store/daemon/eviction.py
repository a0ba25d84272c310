"""The choice of entries to evict so that one payload fits: the policy's first choice, then its neighbours.

Payloads lie in one piece, so freeing enough bytes is not freeing enough room: taking
victims by age alone from an arena of small entries could empty most of it before two holes
happen to meet. Instead the oldest entry's hole grows over its neighbours until the payload
fits. About `room` bytes are lost, at any fragmentation, and nothing at all is lost
when it cannot succeed. A search that takes too long ends without success; the next one goes on
from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cornplug.store.base import PayloadLocation
from cornplug.store.daemon.allocator import ArenaAllocator


class EvictableEntry(Protocol):
    """An entry as eviction sees it."""

    @property
    def location(self) -> PayloadLocation: ...
    @property
    def room(self) -> int: ...
    @property
    def readers(self) -> int: ...


E = TypeVar("E", bound=EvictableEntry)


class VictimChoice(Protocol[E]):
    """The entries that one payload may displace, by the rules of `eviction_policy.py`."""

    def __iter__(self) -> Iterator[E]:
        """Those to begin a run with, the first choice first."""

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
    too_short: set[int] = set()
    tried: list[E] = []
    for oldest in choice:
        if looks.left <= 0:
            break
        begun = looks.left
        looks.left -= 1
        tried.append(oldest)
        if oldest.location.offset in too_short:
            continue
        victims, size, bounded = _run_around(oldest, room, choice, by_offset, by_end, holes, looks)
        if size >= room:
            return EvictionPlan(victims, True, [])
        if not bounded:
            # Only where hardly less than all looks went into this run is a smaller step the only way.
            return EvictionPlan(victims if begun > looks.most // 2 else [], False, tried[:-1])
        # Two obstacles bound this run: none of its members can do better.
        too_short.update(entry.location.offset for entry in victims)
    return EvictionPlan([], False, tried)


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
        after = by_offset.get(end)
        before = by_end.get(start)
        if after is not None and not after.readers and choice.take(after):
            victims.append(after)
            end += after.room
            end += holes.hole_at(end)
        elif before is not None and not before.readers and choice.take(before):
            victims.append(before)
            start -= before.room
            start -= holes.hole_ending_at(start)
        else:
            return victims, end - start, True
    return victims, end - start, False
