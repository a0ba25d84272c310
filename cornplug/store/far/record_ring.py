"""Records in a bounded piece of memory, which is written round and round: the oldest make room."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

_WAIT_S: Final = 2.0
"""Longest wait of a new record for one in its place that is being sent."""


class RecordRing:
    """The records of one member. Thread-safe.

    Args:
        room: Where records lie, each in one piece.
    """

    def __init__(self, room: memoryview) -> None:
        self._room = room
        self._end = 0
        """Where the newest record ends."""
        self._places: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Name -> (offset, bytes), the oldest first."""
        self._held: list[tuple[int, int]] = []
        self._putting = threading.Lock()
        self._changed = threading.Condition()

    def __contains__(self, name: str) -> bool:
        with self._changed:
            return name in self._places

    def put(self, name: str, record: bytes) -> None:
        """Keep a record, in the place of an older one of its name.

        Raises ValueError for a record that is larger than the room, TimeoutError if bytes in its place are
        held for longer than 2 s.
        """
        size = len(record)
        if size > self._room.nbytes:
            raise ValueError(f"a record of {size} bytes, in a room of {self._room.nbytes}")
        with self._putting, self._changed:
            self._places.pop(name, None)
            width = max(size, 1)  # an empty record, too, has a byte of its own: its age then follows from it
            start = self._end if self._end + width <= self._room.nbytes else 0
            while self._places:
                oldest, place = next(iter(self._places.items()))
                # Where the record begins in front, those behind the newest one are the oldest.
                if not (start < self._end <= place[0] or _overlap(place, (start, size))):
                    break
                del self._places[oldest]
            self._end = start + width
            free = self._changed.wait_for(
                lambda: not any(_overlap(place, (start, size)) for place in self._held), _WAIT_S
            )
            if not free:
                raise TimeoutError(f"a record has been on its way for {_WAIT_S:g} s")
            self._room[start : start + size] = record
            self._places[name] = start, size

    def delete(self, name: str) -> None:
        """Remove a record, if there is one."""
        with self._changed:
            self._places.pop(name, None)

    def get(self, name: str) -> bytes | None:
        """A copy of a record; None where there is none."""
        with self.held(name) as place:
            return None if place is None else bytes(self._room[place[0] : place[0] + place[1]])

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[tuple[int, int] | None]:
        """Where a record lies, as (offset, bytes), which nothing is written over meanwhile; None where there
        is none."""
        with self._changed:
            place = self._places.get(name)
            if place is not None:
                self._held.append(place)
        try:
            yield place
        finally:
            if place is not None:
                with self._changed:
                    self._held.remove(place)
                    self._changed.notify_all()


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[0] + max(other[1], 1) and other[0] < one[0] + max(one[1], 1)
