"""Which records lie in which segment, and where the next one goes: a queue of segments, bounded in bytes.

    oldest segment ... newest segment | the next record
    └ dropped whole when a new segment would exceed the bound; records that were read move to the new one

The segment that is dropped is the one with the fewest guaranteed bytes, and among equals the oldest. Bytes
are guaranteed if their namespace is pinned, or would otherwise have less than its share of the disk.
Guaranteed records move to the new segment before others.

`DiskCounters` counts the disk tier's reads and writes since the daemon started. Pure: no I/O. Only the
daemon's loop uses this module.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from cornplug.store.disk.record_format import ALIGN_BYTES
from cornplug.store.store_stats import DiskNamespaceStat, DiskStat

MOST_SEGMENT_BYTES: Final = 256 << 20
_LEAST_SEGMENTS: Final = 8
MOST_RECORDS: Final = 1 << 20
"""Records beyond which the oldest segment is dropped too: the daemon keeps about 300 bytes for each."""
UNUSED: Final = "evicted"
"""The cause of a removal with its segment."""


@dataclass(frozen=True, slots=True)
class DiskBounds:
    """Bounds of one namespace on the disk."""

    name: str = ""
    share_bytes: int = 0
    """Bytes that other namespaces do not displace."""
    ceiling_bytes: float = math.inf
    pinned: bool = False
    """Whether its records are never dropped for those of others."""


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
    bytes_by_name: Counter[str] = field(default_factory=Counter)
    """Of live records, by namespace."""


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
        bounds: Bounds of an app's namespace; None: there are none.
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
        """By namespace, of those that have had a record."""
        self._by_name: dict[str, OrderedDict[bytes, DiskRecord]] = {}
        """Records of each namespace, oldest first."""
        self._bytes_by_name: Counter[str] = Counter()
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

    def add(self, record: DiskRecord, *, older: bool = False) -> bool:
        """Add a record that was written, or that a scan found. Returns False if its segment has been dropped.

        Args:
            older: Whether it is older than the records added before.
        """
        segment = self._segments.get(record.segment)
        if segment is None:
            return False
        self.remove(record.key)
        segment.records[record.offset] = record
        self._records[record.key] = record
        self._count(record, 1)
        if older:
            self._by_name[self._bounds_of(record.app).name].move_to_end(record.key, last=False)
        return True

    def excess(self, app: str, new_bytes: int) -> list[DiskRecord] | None:
        """Return the oldest records of the app's namespace that must go so that `new_bytes` more fit below
        its ceiling; None if they cannot make room."""
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
        """Forget a record; its bytes stay until their segment goes."""
        record = self._records.pop(key, None)
        if record is None:
            return None
        self._count(record, -1)
        self._take_from_segment(record)
        return record

    def move(self, record: DiskRecord, segment: int, offset: int) -> bool:
        """A record was copied. False where it was forgotten meanwhile."""
        if self._records.get(record.key) is not record or segment not in self._segments:
            return False
        self._take_from_segment(record)
        record.segment, record.offset, record.was_read = segment, offset, False
        self._segments[segment].records[offset] = record
        self._segments[segment].bytes_by_name[self._bounds_of(record.app).name] += record.record_bytes
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

    @property
    def is_full(self) -> bool:
        """Whether a segment must go for a new one."""
        return self.used_bytes > self._most_old_bytes or len(self._records) > MOST_RECORDS

    @property
    def _most_old_bytes(self) -> int:
        return self.size_bytes - self.segment_bytes - self.segment_bytes // 2

    def open_segment(self) -> list[DroppedSegment]:
        """Begin a new segment. Returns the oldest ones, which must go for it.

        Records that were read since they were written move into the new segment, up to half of it: half a
        segment of the bound is kept for them, so that files never exceed it.
        """
        self._newest += 1
        self._open = True
        new = self._segments[self._newest] = _Segment(0)
        dropped = []
        while len(self._segments) > 1 and (
            self._old_bytes() > self._most_old_bytes or len(self._records) > MOST_RECORDS
        ):
            dropped.append(self._drop_one(new))
        return dropped

    def forget_unmoved(self, records: Iterable[DiskRecord]) -> list[DiskRecord]:
        """Those of `records`, of dropped segments, that could not be copied; they are forgotten."""
        gone = [record for record in records if record.segment not in self._segments]
        for record in gone:
            if self._records.get(record.key) is record:
                del self._records[record.key]
                self._count(record, -1)
        return gone

    def _take_from_segment(self, record: DiskRecord) -> None:
        segment = self._segments.get(record.segment)
        if segment is not None and segment.records.pop(record.offset, None) is not None:
            segment.bytes_by_name[self._bounds_of(record.app).name] -= record.record_bytes

    def _count(self, record: DiskRecord, by: int) -> None:
        bounds = self._bounds_of(record.app)
        self._bounds[bounds.name] = bounds
        self._bytes_by_name[bounds.name] += by * record.record_bytes
        if by > 0:
            self._by_name.setdefault(bounds.name, OrderedDict())[record.key] = record
            self._segments[record.segment].bytes_by_name[bounds.name] += record.record_bytes
        else:
            self._by_name[bounds.name].pop(record.key, None)
        self.entries_by_app[record.app] += by
        self.bytes_by_app[record.app] += by * record.record_bytes
        if not self.entries_by_app[record.app]:
            del self.entries_by_app[record.app], self.bytes_by_app[record.app]

    def _old_bytes(self) -> int:
        return self.used_bytes - self._segments[self._newest].size_bytes

    def _guaranteed(self, name: str, segment: _Segment) -> int:
        """Guaranteed bytes of a namespace in a segment."""
        bounds = self._bounds[name]
        beyond_bytes = 0 if bounds.pinned else self._bytes_by_name[name] - bounds.share_bytes
        return segment.bytes_by_name[name] - max(0, min(beyond_bytes, segment.bytes_by_name[name]))

    def _drop_one(self, new: _Segment) -> DroppedSegment:
        guaranteed = [name for name, one in self._bounds.items() if one.share_bytes or one.pinned]
        old = (number for number in self._segments if number != self._newest)
        # `min` takes the first of equals, which is the oldest.
        number = min(
            old, key=lambda one: sum(self._guaranteed(name, self._segments[one]) for name in guaranteed)
        )
        left_bytes = {name: self._guaranteed(name, self._segments[number]) for name in guaranteed}
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
            room = new.size_bytes + record.record_bytes <= self.segment_bytes // 2
            if room and (keeps or record.was_read):
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


class DiskCounters:
    """Used by the loop alone. Apps belong to namespaces by `name_of`."""

    def __init__(self, space: DiskSpace, name_of: Callable[[str], str]) -> None:
        self.writes: Counter[str] = Counter()
        """Outcome -> entries."""
        self.reads: Counter[str] = Counter()
        self._space, self._name_of = space, name_of
        self._hits: Counter[str] = Counter()
        self._removals: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def hit(self, record: DiskRecord) -> None:
        """An entry was read into memory."""
        self.reads["read"] += 1
        self._hits[self._name_of(record.app)] += 1

    def removed(self, record: DiskRecord, cause: str) -> None:
        """An entry is no longer on disk."""
        self._removals[self._name_of(record.app)][cause] += 1

    def stat(self, *, queued: int, scanning: bool) -> DiskStat:
        """Copies of the counts, beside the sizes of now."""
        space = self._space
        entries: Counter[str] = Counter()
        used: Counter[str] = Counter()
        for app, count in space.entries_by_app.items():
            entries[self._name_of(app)] += count
            used[self._name_of(app)] += space.bytes_by_app[app]
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
