"""Which records lie in which segment, and where the next one goes: a queue of segments, bounded in bytes.

    oldest segment ... newest segment | the next record
    └ dropped whole when a new segment would exceed the bound; records that were read move to the new one

Pure: no I/O. The daemon's loop alone uses it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from cornplug.store.disk.record_format import ALIGN_BYTES

MOST_SEGMENT_BYTES: Final = 256 << 20
_LEAST_SEGMENTS: Final = 8
MOST_RECORDS: Final = 1 << 20
"""Records beyond which the oldest segment is dropped too: the daemon keeps about 300 bytes for each."""


@dataclass(slots=True, eq=False)
class DiskRecord:
    """An entry on disk, whole as far as the scan or the writer can tell."""

    key: bytes
    app: str
    cost_s: float
    written_s: float
    """Unix time."""
    payload_bytes: int
    segment: int
    offset: int
    record_bytes: int
    was_read: bool = False
    """Since it was written, or moved."""


@dataclass(slots=True)
class _Segment:
    size_bytes: int
    records: dict[int, DiskRecord] = field(default_factory=dict)
    """By offset."""


@dataclass(frozen=True, slots=True)
class DroppedSegment:
    """A segment that must go, and its records that deserve to stay: their new places."""

    number: int
    lost: list[DiskRecord]
    moves: list[tuple[DiskRecord, int, int]]
    """(record, segment, offset)."""


class DiskSpace:
    """The records of one disk tier.

    Args:
        existing: (number, bytes) of the segments that an earlier daemon has left.
    """

    def __init__(self, size_bytes: int, existing: Iterable[tuple[int, int]] = ()) -> None:
        self.size_bytes = size_bytes
        self.segment_bytes = _down(min(MOST_SEGMENT_BYTES, size_bytes // _LEAST_SEGMENTS))
        self._segments: OrderedDict[int, _Segment] = OrderedDict(
            (number, _Segment(used)) for number, used in sorted(existing)
        )
        self._records: dict[bytes, DiskRecord] = {}
        self._newest = max(self._segments, default=0)
        self._open = False
        """Whether the newest segment takes records: one of an earlier daemon takes none."""
        self.entries_by_app: Counter[str] = Counter()
        self.bytes_by_app: Counter[str] = Counter()
        """Of live records."""

    def __len__(self) -> int:
        return len(self._records)

    @property
    def used_bytes(self) -> int:
        """Of all segments."""
        return sum(one.size_bytes for one in self._segments.values())

    @property
    def segments(self) -> list[int]:
        """Numbers of all segments, the oldest first."""
        return list(self._segments)

    def all_keys(self) -> list[bytes]:
        """Of all records."""
        return list(self._records)

    def find(self, key: bytes) -> DiskRecord | None:
        """The record of an entry."""
        return self._records.get(key)

    def add(self, record: DiskRecord) -> bool:
        """A record that is written, or that a scan found. False where its segment is gone meanwhile."""
        segment = self._segments.get(record.segment)
        if segment is None:
            return False
        self.remove(record.key)
        segment.records[record.offset] = record
        self._records[record.key] = record
        self._count(record, 1)
        return True

    def remove(self, key: bytes) -> DiskRecord | None:
        """Forget a record; its bytes stay until their segment goes."""
        record = self._records.pop(key, None)
        if record is None:
            return None
        self._count(record, -1)
        if record.segment in self._segments:
            self._segments[record.segment].records.pop(record.offset, None)
        return record

    def move(self, record: DiskRecord, segment: int, offset: int) -> bool:
        """A record was copied. False where it was forgotten meanwhile."""
        if self._records.get(record.key) is not record or segment not in self._segments:
            return False
        if record.segment in self._segments:
            self._segments[record.segment].records.pop(record.offset, None)
        record.segment, record.offset, record.was_read = segment, offset, False
        self._segments[segment].records[offset] = record
        return True

    def place(self, record_bytes: int) -> tuple[int, int] | None:
        """(segment, offset) for a new record; None where the newest segment has no room for it.

        Then `open_segment`, where `fits` says that this is of use.
        """
        if not self._open or self._segments[self._newest].size_bytes + record_bytes > self.segment_bytes:
            return None
        segment = self._segments[self._newest]
        offset, segment.size_bytes = segment.size_bytes, segment.size_bytes + record_bytes
        return self._newest, offset

    def fits(self, record_bytes: int) -> bool:
        """Whether a new segment has room for this record, also beside those that move into it."""
        return record_bytes <= self.segment_bytes - self.segment_bytes // 2

    def give_up(self, number: int) -> None:
        """Forget a new segment, which has no record: it could not be made."""
        self._segments.pop(number, None)
        self._open = self._open and number != self._newest

    @property
    def exceeds_bound(self) -> bool:
        """Whether an earlier daemon has left more than this one may keep."""
        return self.used_bytes > self.size_bytes

    def open_segment(self) -> list[DroppedSegment]:
        """Begin a new segment. Returns the oldest ones, which must go for it.

        Records that were read since they were written move into the new segment, up to half of it: half a
        segment of the bound is kept for them, so that files never exceed it.
        """
        self._newest += 1
        self._open = True
        new = self._segments[self._newest] = _Segment(0)
        dropped = []
        most = self.size_bytes - self.segment_bytes - self.segment_bytes // 2
        while len(self._segments) > 1 and (self._old_bytes() > most or len(self._records) > MOST_RECORDS):
            dropped.append(self._drop_oldest(new))
        return dropped

    def forget_unmoved(self, records: Iterable[DiskRecord]) -> list[DiskRecord]:
        """Those of `records`, of dropped segments, that could not be copied; they are forgotten."""
        gone = [record for record in records if record.segment not in self._segments]
        for record in gone:
            if self._records.get(record.key) is record:
                del self._records[record.key]
                self._count(record, -1)
        return gone

    def _count(self, record: DiskRecord, by: int) -> None:
        self.entries_by_app[record.app] += by
        self.bytes_by_app[record.app] += by * record.record_bytes
        if not self.entries_by_app[record.app]:
            del self.entries_by_app[record.app], self.bytes_by_app[record.app]

    def _old_bytes(self) -> int:
        return self.used_bytes - self._segments[self._newest].size_bytes

    def _drop_oldest(self, new: _Segment) -> DroppedSegment:
        number, oldest = self._segments.popitem(last=False)
        moves, lost = [], []
        for record in oldest.records.values():
            if record.was_read and new.size_bytes + record.record_bytes <= self.segment_bytes // 2:
                moves.append((record, self._newest, new.size_bytes))
                new.size_bytes += record.record_bytes
            else:
                lost.append(record)
        for record in lost:
            del self._records[record.key]
            self._count(record, -1)
        return DroppedSegment(number, lost, moves)


def _down(size_bytes: int) -> int:
    return max(size_bytes // ALIGN_BYTES, 1) * ALIGN_BYTES
