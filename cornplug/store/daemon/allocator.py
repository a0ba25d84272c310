"""Allocator of an arena: 64-byte aligned extents in segregated size classes, coalesced when freed.

Free extents are in a two-level table (powers of two, with eight steps each, as in TLSF), so an allocation
costs the same with ten or a hundred thousand holes. The allocator computes with offsets and sizes, and
accesses no memory.

    |<-- extent -->|<- free ->|<------ extent ------>|<------ free ------>| end
    0                                                                     end_bytes
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

ALIGN: Final = 64
_STEP_BITS: Final = 3
_SCAN_LIMIT: Final = 64
"""Maximum number of holes that an allocation examines in its own size class, whose holes may be too small.
Examining more holes would make a batch miss its deadline."""


def align_up(size_bytes: int) -> int:
    """Return the number of bytes that a payload takes in the arena. This is its size rounded up to a multiple
    of 64, and at least 64."""
    return max(ALIGN, (size_bytes + ALIGN - 1) & -ALIGN)


class ArenaAllocator:
    """Allocator of extents in [0, end_bytes). Sizes are multiples of 64."""

    def __init__(self) -> None:
        self.end_bytes = 0
        self.free_bytes = 0
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        # These are ordered dicts, because finding the first key of a dict takes time for each key that was
        # removed before it.
        self._classes: list[OrderedDict[int, None]] = []
        self._nonempty_classes = 0

    def extend(self, size_bytes: int) -> None:
        """Add `size_bytes` of free memory at the end of the arena. Does nothing for 0."""
        if not size_bytes:
            return
        start = self.end_bytes
        self.end_bytes += size_bytes
        self.free(start, size_bytes)

    def allocate(self, size_bytes: int) -> int | None:
        """Return the offset of an extent of exactly `size_bytes`, or None if no hole is large enough."""
        start = self._find_hole(size_bytes)
        if start is None:
            return None
        hole = self._remove_hole(start)
        if hole > size_bytes:
            self._add_hole(start + size_bytes, hole - size_bytes)
        return start

    def free(self, start: int, size_bytes: int) -> None:
        """Free an extent, and merge it with the holes on both sides."""
        end = start + size_bytes
        if end in self._size_at:
            end += self._remove_hole(end)
        before = self._start_of_end.get(start)
        if before is not None:
            self._remove_hole(before)
            start = before
        self._add_hole(start, end - start)

    def hole_ending_at(self, end: int) -> int:
        """Return the size of the hole that ends at this offset, or 0."""
        start = self._start_of_end.get(end)
        return 0 if start is None else end - start

    def hole_at(self, start: int) -> int:
        """Return the size of the hole that begins at this offset, or 0."""
        return self._size_at.get(start, 0)

    def holes(self) -> list[tuple[int, int]]:
        """Return (offset, size) of all holes, by offset. For tests and diagnosis."""
        return sorted(self._size_at.items())

    def _find_hole(self, size_bytes: int) -> int | None:
        own = _size_class(size_bytes)
        # Any hole of a higher class fits, so no search is needed there.
        higher = self._nonempty_classes >> (own + 1)
        if higher:
            index = own + 1 + (higher & -higher).bit_length() - 1
            return next(iter(self._classes[index]))
        if self._nonempty_classes >> own & 1:
            for _, start in zip(range(_SCAN_LIMIT), self._classes[own], strict=False):
                if self._size_at[start] >= size_bytes:
                    return start
        return None

    def _add_hole(self, start: int, size_bytes: int) -> None:
        index = _size_class(size_bytes)
        while len(self._classes) <= index:
            self._classes.append(OrderedDict())
        self._classes[index][start] = None
        self._nonempty_classes |= 1 << index
        self._size_at[start] = size_bytes
        self._start_of_end[start + size_bytes] = start
        self.free_bytes += size_bytes

    def _remove_hole(self, start: int) -> int:
        size_bytes = self._size_at.pop(start)
        del self._start_of_end[start + size_bytes]
        index = _size_class(size_bytes)
        del self._classes[index][start]
        if not self._classes[index]:
            self._nonempty_classes &= ~(1 << index)
        self.free_bytes -= size_bytes
        return size_bytes


def _size_class(size_bytes: int) -> int:
    units = size_bytes // ALIGN
    power = units.bit_length() - 1
    if power < _STEP_BITS:
        return units
    return ((power - _STEP_BITS + 1) << _STEP_BITS) + (units >> (power - _STEP_BITS)) - (1 << _STEP_BITS)
