"""Space of the disk tier: the records of each segment, and the location of the next record.

    oldest segment ... newest segment | the next record
    └ dropped when a new segment would exceed the bound; records that were read move to the new segment

The segment with the fewest guaranteed bytes is dropped. If several segments have equally few, the oldest of
them is dropped. Bytes are guaranteed if their namespace is pinned, or would otherwise have less than its
share of the disk. Guaranteed records move to the new segment before others.

`DiskCounters` counts the disk tier's reads and writes since the daemon started. This module does no I/O. Only
the daemon's loop uses it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from cornplug.store.disk.record_format import ALIGN_BYTES
from cornplug.store.store_stats import DiskNamespaceStat, DiskStat

MAX_SEGMENT_BYTES: Final = 256 << 20
_MIN_SEGMENTS: Final = 8
MAX_RECORDS: Final = 1 << 20
"""Maximum number of records. Segments are dropped if there are more, because the daemon needs about 300 bytes
of memory per record."""
EVICTED: Final = "evicted"
"""Cause of the removal of a record whose segment was dropped."""


@dataclass(frozen=True, slots=True)
class DiskBounds:
    """Bounds of one namespace's records on the disk."""

    name: str = ""
    share_bytes: int = 0
    """Number of this namespace's bytes that other namespaces cannot displace."""
    ceiling_bytes: float = math.inf
    pinned: bool = False
    """Whether records of other namespaces never displace records of this namespace."""


@dataclass(slots=True, eq=False)
class DiskRecord:
    """Entry on disk."""

    key: bytes
    app: str
    cost_s: float
    written_s: float
    """Unix time at which the entry was written."""
    payload_bytes: int
    segment: int
    offset: int
    record_bytes: int
    was_read: bool = False
    """Whether the entry was read since its record was written or moved."""


@dataclass(slots=True)
class _Segment:
    size_bytes: int
    records: dict[int, DiskRecord] = field(default_factory=dict)
    """Records by offset."""
    bytes_by_name: Counter[str] = field(default_factory=Counter)
    """Bytes of live records, by namespace."""


@dataclass(frozen=True, slots=True)
class DroppedSegment:
    """Segment to delete, and the new locations of the records that are kept."""

    number: int
    lost_records: list[DiskRecord]
    moves: list[tuple[DiskRecord, int, int]]
    """Tuples of (record, segment, offset)."""


class DiskSpace:
    """Records of one disk tier, by key, namespace and segment.

    Args:
        existing: (number, bytes) of each segment of earlier daemons.
        bounds: Function that returns the bounds of an app's namespace. None: no bounds.
    """

    def __init__(
        self,
        size_bytes: int,
        existing: Iterable[tuple[int, int]] = (),
        bounds: Callable[[str], DiskBounds] | None = None,
    ) -> None:
        self.size_bytes = size_bytes
        self._bounds_of = bounds or (lambda app: DiskBounds())
        self._bounds: dict[str, DiskBounds] = {}
        """Bounds of each namespace that has or had a record."""
        self._by_name: dict[str, OrderedDict[bytes, DiskRecord]] = {}
        """Records of each namespace, oldest first."""
        self._bytes_by_name: Counter[str] = Counter()
        self.segment_bytes = _round_down(min(MAX_SEGMENT_BYTES, size_bytes // _MIN_SEGMENTS))
        self._segments: OrderedDict[int, _Segment] = OrderedDict(
            (number, _Segment(used)) for number, used in sorted(existing)
        )
        self._records: dict[bytes, DiskRecord] = {}
        self._newest = max(self._segments, default=0)
        self._is_open = False
        """Whether the newest segment accepts records. Segments of an earlier daemon do not accept records."""
        self.entries_by_app: Counter[str] = Counter()
        self.bytes_by_app: Counter[str] = Counter()
        """Number and bytes of live records, by app."""

    def __len__(self) -> int:
        return len(self._records)

    @property
    def used_bytes(self) -> int:
        """Size of all segments in bytes."""
        return sum(one.size_bytes for one in self._segments.values())

    @property
    def segments(self) -> list[int]:
        """Numbers of all segments, oldest first."""
        return list(self._segments)

    def all_keys(self) -> list[bytes]:
        """Return the keys of all records."""
        return list(self._records)

    def find(self, key: bytes) -> DiskRecord | None:
        """Return the record of an entry, or None."""
        return self._records.get(key)

    def add(self, record: DiskRecord, *, is_older: bool = False) -> bool:
        """Add a record that was written, or that a scan found. Return False if its segment has been dropped.

        Args:
            is_older: Whether this record is older than the records that were added before.
        """
        segment = self._segments.get(record.segment)
        if segment is None:
            return False
        self.remove(record.key)
        segment.records[record.offset] = record
        self._records[record.key] = record
        self._update_counts(record, 1)
        if is_older:
            self._by_name[self._bounds_of(record.app).name].move_to_end(record.key, last=False)
        return True

    def records_over_ceiling(self, app: str, new_bytes: int) -> list[DiskRecord] | None:
        """Return the oldest records of the app's namespace that have to be removed so that the namespace
        stays below its ceiling with `new_bytes` more. Returns None if removals are not enough."""
        bounds = self._bounds_of(app)
        missing = self._bytes_by_name[bounds.name] + new_bytes - bounds.ceiling_bytes
        if missing > 0 and bounds.pinned:
            return None
        excess: list[DiskRecord] = []
        for record in self._by_name.get(bounds.name, {}).values():
            if missing <= 0:
                break
            excess.append(record)
            missing -= record.record_bytes
        return excess if missing <= 0 else None

    def remove(self, key: bytes) -> DiskRecord | None:
        """Remove a record. Its bytes stay on disk until their segment is dropped."""
        record = self._records.pop(key, None)
        if record is None:
            return None
        self._update_counts(record, -1)
        self._remove_from_segment(record)
        return record

    def move(self, record: DiskRecord, segment: int, offset: int) -> bool:
        """Update the location of a record that was copied. Return False if it has been removed."""
        if self._records.get(record.key) is not record or segment not in self._segments:
            return False
        self._remove_from_segment(record)
        record.segment, record.offset, record.was_read = segment, offset, False
        self._segments[segment].records[offset] = record
        self._segments[segment].bytes_by_name[self._bounds_of(record.app).name] += record.record_bytes
        return True

    def allocate(self, record_bytes: int) -> tuple[int, int] | None:
        """Return the (segment, offset) for a new record, or None if the record does not fit in the newest
        segment.

        After None, call `open_segment` if `fits_segment` returns True.
        """
        if not self._is_open or self._segments[self._newest].size_bytes + record_bytes > self.segment_bytes:
            return None
        segment = self._segments[self._newest]
        offset, segment.size_bytes = segment.size_bytes, segment.size_bytes + record_bytes
        return self._newest, offset

    def fits_segment(self, record_bytes: int) -> bool:
        """Return whether this record fits in a new segment, together with the records that move into it."""
        return record_bytes <= self.segment_bytes - self.segment_bytes // 2

    def discard_segment(self, number: int) -> None:
        """Remove a new segment, which has no record yet, because its file could not be created."""
        self._segments.pop(number, None)
        self._is_open = self._is_open and number != self._newest

    @property
    def exceeds_bound(self) -> bool:
        """Whether the segments of an earlier daemon exceed this daemon's limit."""
        return self.used_bytes > self.size_bytes

    @property
    def is_full(self) -> bool:
        """Whether a segment has to be dropped before a new segment is created."""
        return self.used_bytes > self._max_old_bytes or len(self._records) > MAX_RECORDS

    @property
    def _max_old_bytes(self) -> int:
        return self.size_bytes - self.segment_bytes - self.segment_bytes // 2

    def open_segment(self) -> list[DroppedSegment]:
        """Start a new segment, and return the segments that are dropped for it.

        Records of dropped segments that were read since they were written move into the new segment, up to
        half of its size. Half a segment of the size limit is reserved for these records, so that the files
        never exceed the limit.
        """
        self._newest += 1
        self._is_open = True
        new = self._segments[self._newest] = _Segment(0)
        dropped = []
        while len(self._segments) > 1 and (
            self._old_bytes() > self._max_old_bytes or len(self._records) > MAX_RECORDS
        ):
            dropped.append(self._drop_segment(new))
        return dropped

    def remove_unmoved(self, records: Iterable[DiskRecord]) -> list[DiskRecord]:
        """Remove the records of dropped segments that could not be copied, and return them."""
        gone = [record for record in records if record.segment not in self._segments]
        for record in gone:
            if self._records.get(record.key) is record:
                del self._records[record.key]
                self._update_counts(record, -1)
        return gone

    def _remove_from_segment(self, record: DiskRecord) -> None:
        segment = self._segments.get(record.segment)
        if segment is not None and segment.records.pop(record.offset, None) is not None:
            segment.bytes_by_name[self._bounds_of(record.app).name] -= record.record_bytes

    def _update_counts(self, record: DiskRecord, sign: int) -> None:
        bounds = self._bounds_of(record.app)
        self._bounds[bounds.name] = bounds
        self._bytes_by_name[bounds.name] += sign * record.record_bytes
        if sign > 0:
            self._by_name.setdefault(bounds.name, OrderedDict())[record.key] = record
            self._segments[record.segment].bytes_by_name[bounds.name] += record.record_bytes
        else:
            self._by_name[bounds.name].pop(record.key, None)
        self.entries_by_app[record.app] += sign
        self.bytes_by_app[record.app] += sign * record.record_bytes
        if not self.entries_by_app[record.app]:
            del self.entries_by_app[record.app], self.bytes_by_app[record.app]

    def _old_bytes(self) -> int:
        return self.used_bytes - self._segments[self._newest].size_bytes

    def _guaranteed_bytes(self, name: str, segment: _Segment) -> int:
        """Return the guaranteed bytes of a namespace in a segment."""
        bounds = self._bounds[name]
        beyond_bytes = 0 if bounds.pinned else self._bytes_by_name[name] - bounds.share_bytes
        return segment.bytes_by_name[name] - max(0, min(beyond_bytes, segment.bytes_by_name[name]))

    def _drop_segment(self, new: _Segment) -> DroppedSegment:
        guaranteed = [name for name, one in self._bounds.items() if one.share_bytes or one.pinned]
        old = (number for number in self._segments if number != self._newest)
        # `min` returns the first of equals, which is the oldest.
        number = min(
            old, key=lambda one: sum(self._guaranteed_bytes(name, self._segments[one]) for name in guaranteed)
        )
        left_bytes = {name: self._guaranteed_bytes(name, self._segments[number]) for name in guaranteed}
        oldest = self._segments.pop(number)
        moves, lost = [], []
        wanted: list[tuple[bool, DiskRecord]] = []
        # A share guarantees the newest records of a namespace.
        for record in reversed(oldest.records.values()):
            name = self._bounds_of(record.app).name
            keeps = left_bytes.get(name, 0) > 0
            if keeps:
                left_bytes[name] -= record.record_bytes
            wanted.append((keeps, record))
        wanted.reverse()
        for keeps, record in sorted(wanted, key=lambda one: not one[0]):
            fits = new.size_bytes + record.record_bytes <= self.segment_bytes // 2
            if fits and (keeps or record.was_read):
                moves.append((record, self._newest, new.size_bytes))
                new.size_bytes += record.record_bytes
            else:
                lost.append(record)
        for record in lost:
            del self._records[record.key]
            self._update_counts(record, -1)
        return DroppedSegment(number, lost, moves)


def _round_down(size_bytes: int) -> int:
    return max(size_bytes // ALIGN_BYTES, 1) * ALIGN_BYTES


class DiskCounters:
    """Counts of the disk tier. `namespace_of` returns the namespace of an app. Only the daemon's loop uses
    them."""

    def __init__(self, space: DiskSpace, namespace_of: Callable[[str], str]) -> None:
        self.writes: Counter[str] = Counter()
        """Number of entries by outcome of their write, as in `DiskStat.writes`."""
        self.reads: Counter[str] = Counter()
        self._space, self._namespace_of = space, namespace_of
        self._hits: Counter[str] = Counter()
        self._removals: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def count_hit(self, record: DiskRecord) -> None:
        """Count an entry that was read into memory."""
        self.reads["read"] += 1
        self._hits[self._namespace_of(record.app)] += 1

    def count_removed(self, record: DiskRecord, cause: str) -> None:
        """Count an entry that was removed from the disk."""
        self._removals[self._namespace_of(record.app)][cause] += 1

    def stat(self, *, queued: int, scanning: bool) -> DiskStat:
        """Return copies of the counts, with the current sizes."""
        space = self._space
        entries: Counter[str] = Counter()
        used: Counter[str] = Counter()
        for app, count in space.entries_by_app.items():
            entries[self._namespace_of(app)] += count
            used[self._namespace_of(app)] += space.bytes_by_app[app]
        names = sorted({*entries, *self._hits, *self._removals})
        return DiskStat(
            capacity_bytes=space.size_bytes, used_bytes=space.used_bytes, entries=len(space), queued=queued,
            scanning=scanning, writes=dict(self.writes), reads=dict(self.reads),
            namespaces={
                name: DiskNamespaceStat(
                    used[name], entries[name], self._hits[name], dict(self._removals.get(name, ()))
                )
                for name in names
            },
        )  # fmt: skip
