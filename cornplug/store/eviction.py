"""Whom to evict so that one payload fits: least recently used first, and then his neighbours.

Payloads lie in one piece, so freeing enough bytes is not freeing enough room: taking
victims by age alone from an arena of small entries could empty most of it before two holes
happen to meet. Instead the oldest entry's hole grows over its neighbours until the payload
fits. About `room` bytes are lost, whatever the fragmentation, and nothing at all is lost
when it cannot succeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from cornplug.store.allocator import Allocator
from cornplug.store.base import Location


class Placed(Protocol):
    """An entry as eviction sees it."""

    @property
    def location(self) -> Location: ...
    @property
    def room(self) -> int: ...
    @property
    def readers(self) -> int: ...


E = TypeVar("E", bound=Placed)


def plan_eviction(
    room: int,
    oldest_first: Iterable[E],
    by_offset: Mapping[int, E],
    by_end: Mapping[int, E],
    holes: Allocator,
) -> list[E] | None:
    """Entries to drop so that a hole of `room` bytes appears, or None when leases and
    reservations stand in every way. Changes nothing."""
    too_short: set[int] = set()
    for oldest in oldest_first:
        if oldest.location.offset in too_short:
            continue
        victims, size = _run_around(oldest, room, by_offset, by_end, holes)
        if size >= room:
            return victims
        # Two obstacles bound this run: none of its members can do better.
        too_short.update(entry.location.offset for entry in victims)
    return None


def _run_around(
    oldest: E, room: int, by_offset: Mapping[int, E], by_end: Mapping[int, E], holes: Allocator
) -> tuple[list[E], int]:
    victims = [oldest]
    start = oldest.location.offset
    end = start + oldest.room
    end += holes.hole_at(end)
    start -= holes.hole_ending_at(start)
    while end - start < room:
        after = by_offset.get(end)
        before = by_end.get(start)
        if after is not None and not after.readers:
            victims.append(after)
            end += after.room
            end += holes.hole_at(end)
        elif before is not None and not before.readers:
            victims.append(before)
            start -= before.room
            start -= holes.hole_ending_at(start)
        else:
            break
    return victims, end - start
