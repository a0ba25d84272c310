"""Disk tier of a store. It writes entries in the background, and recalls them after they have left memory.

    committed, read ──> queue ──> a segment, by the writer     entries are written once, sealed
    recalled        ──> memory, by readers (`promotions.py`)
    evicted                                                    the table shows it as on disk only
    deleted, purged, expired                                   the record is marked as ended
    restart         ──> scan of headers (`segment_files.py`)   the table shows the entries that it finds

Only the daemon's loop calls the tier, and no call blocks. Entries are not leased while they are written. An
entry that is evicted during the write gets no record.
"""

from __future__ import annotations

import errno
import functools
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from cornplug.store.base import PurgeRule
from cornplug.store.disk.disk_space import (
    EVICTED,
    DiskBounds,
    DiskCounters,
    DiskRecord,
    DiskSpace,
    DroppedSegment,
)
from cornplug.store.disk.disk_workers import DiskFailure, DiskWorkers, MemoryTier, TieredEntry
from cornplug.store.disk.promotions import Promotions
from cornplug.store.disk.record_format import RecordDamaged, RecordHeader, new_salt
from cornplug.store.disk.segment_files import DiskScan, FoundRecord, SegmentFiles, matches_purge
from cornplug.store.store_stats import DiskStat

MAX_QUEUED: Final = 1 << 16
"""Maximum number of entries that wait to be written. If there are more, new entries are not queued until they
are read."""
RETRY_S: Final = 5.0
"""Pause in seconds between a failed write and the next write."""
_MAX_WRITES: Final = 8
"""Maximum number of entries that the writer thread has at a time, including queued entries, so that the
thread does not wait for its next write."""
_FLUSH_BYTES: Final = 64 << 20
"""Written bytes after which the writer flushes to the device."""
_FOUND_PER_STEP: Final = 256
"""Number of records found by the scan that one iteration of the loop adds. This takes about 1 ms."""
_DRAIN_S: Final = 5.0
"""Maximum time for writing the remaining entries at shutdown, in seconds."""
_OUTCOME_BY_ERRNO: Final = {
    errno.ENOSPC: "disk_full", errno.EDQUOT: "disk_full", errno.EFBIG: "disk_full",
    errno.EROFS: "disk_readonly", errno.EACCES: "disk_readonly",
}  # fmt: skip
_log = logging.getLogger("cornplug.store")


class DiskOptions(Protocol):
    """Disk folder and limits of a tier. `open_disk` provides them."""

    @property
    def files(self) -> SegmentFiles: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def write_bytes_s(self) -> int | None: ...


class DiskTier:
    """Disk tier of one daemon. `fileno` is readable when `step` has something to do.

    Args:
        capacity_bytes: Capacity of the memory tier.
    """

    def __init__(self, disk: DiskOptions, memory_tier: MemoryTier, *, capacity_bytes: int) -> None:
        self._files, self._index, self._rules, self._marks = (
            disk.files,
            memory_tier.index,
            memory_tier.rules,
            memory_tier.marks,
        )
        self._memory = memory_tier.memory
        self._bounds: dict[str, DiskBounds] = {}
        self._space = DiskSpace(disk.size_bytes, self._files.list_segments(), self._bounds_of)
        self._counters = DiskCounters(self._space, self._rules.namespace_of)
        self._workers = DiskWorkers(write_bytes_s=disk.write_bytes_s)
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._writing: dict[bytes, bool] = {}
        """Entries that the writer thread has, by key. The value is whether the entry was removed since its
        write began."""
        self._writing_bytes: Counter[str] = Counter()
        """Bytes of the records that are being written, by namespace."""
        self._write_problem = ""
        """Outcome of the last write if it failed, otherwise empty."""
        self._resume_s = 0.0
        self._unflushed_bytes = 0
        self._unsynced_segments: set[int] = set()
        """Segments with ended records whose marks are not flushed to the device yet."""
        self._pending_syncs = 0
        """Number of segments that the writer is flushing."""
        self._scan = DiskScan(self._files, self._workers, self._space.segments)
        self._promotions = Promotions(
            self._files, self._space, self._workers, memory_tier, self._counters,
            max_bytes=capacity_bytes // 4, delete=self.delete,
        )  # fmt: skip
        if self._space.exceeds_bound:
            self._open_segment()

    def fileno(self) -> int:
        return self._workers.fileno()

    @property
    def has_pending_work(self) -> bool:
        """Whether `step` has more to do immediately."""
        return self._scan.has_records

    def on_added(self, entry: TieredEntry) -> None:
        """Queue an entry in memory for writing, unless it is already on disk."""
        self._enqueue(entry.key)

    def on_read(self, entries: Iterable[TieredEntry]) -> None:
        """Mark the records of entries that were read in memory, and queue entries without a record."""
        for entry in entries:
            record = self._space.find(entry.key)
            if record is None:
                self._enqueue(entry.key)
            else:
                record.was_read = True

    def on_removed(self, key: bytes, cause: str) -> None:
        """Handle the removal of an entry from memory."""
        if cause != EVICTED:
            self.delete(key, cause)
        elif self._space.find(key) is not None:
            self._marks.show_on_disk(key)

    def delete(self, key: bytes, cause: str) -> bool:
        """Delete an entry from the disk, so that later daemons do not find it either. Return whether the
        entry was on disk."""
        self._queue.pop(key, None)
        if key in self._writing:
            self._writing[key] = True
        self._scan.record_deleted(key)
        record = self._space.remove(key)
        if record is None:
            return False
        self._marks.hide_on_disk(key)
        self._mark_dead(record.segment, record.offset)
        self._counters.count_removed(record, cause)
        return True

    def holds(self, key: bytes) -> bool:
        """Return whether an entry is on disk."""
        return self._space.find(key) is not None

    def recall(self, keys: Sequence[bytes]) -> None:
        """Start to read into memory the entries of `keys` that are on disk only."""
        for key in keys:
            record = self._space.find(key)
            if record is not None and self._is_expired(record.app, record.written_s):
                self.delete(key, "expired")
        self._promotions.recall(keys)

    def all_keys(self) -> list[bytes]:
        """Return the keys of all entries on disk."""
        return self._space.all_keys()

    def begin_purge(self, rule: PurgeRule) -> None:
        """Let a running scan skip the records that match the purge's rule."""
        self._scan.record_purge(rule)

    def purge(self, key: bytes, rule: PurgeRule) -> int | None:
        """Delete an entry that is on disk only, and return the size of its record in bytes, or None if the
        rule does not match. With `rule.dry_run`, the entry stays."""
        record = self._space.find(key)
        if record is None or not matches_purge(rule, record.app, time.time() - record.written_s):
            return None
        if not rule.dry_run:
            self.delete(key, "purged")
        return record.record_bytes

    def stat(self) -> DiskStat:
        """Return a snapshot of the statistics."""
        queued = len(self._queue) + len(self._writing)
        return self._counters.stat(queued=queued, scanning=not self._scan.is_complete)

    def step(self) -> None:
        """Process the results of the threads, and start more work."""
        self._workers.collect()
        for found in self._scan.pop_found(_FOUND_PER_STEP):
            self._add_found(found)
        self._sync_dead_marks()
        self._start_writes()
        self._promotions.step()

    def close(self) -> None:
        """Write the waiting entries, for a few seconds at most, and close the disk."""
        end_s = time.monotonic() + _DRAIN_S
        self._workers.lift_rate_limit()
        while (self._queue or self._writing) and not self._write_problem and time.monotonic() < end_s:
            self.step()
            self._workers.wait(min(0.05, max(0.0, end_s - time.monotonic())))
        self._sync_dead_marks()
        self._workers.close()
        self._files.close()

    def _bounds_of(self, app: str) -> DiskBounds:
        """Return the share and ceiling of an app's namespace on this disk."""
        name = self._rules.namespace_of(app)
        if name not in self._bounds:
            rules, size_bytes = self._rules.rules_of(app), self._space.size_bytes
            ceiling_bytes = rules.ceiling * size_bytes if rules.ceiling < 1 else math.inf
            self._bounds[name] = DiskBounds(
                name, int(rules.share * size_bytes), ceiling_bytes, pinned=rules.pinned
            )
        return self._bounds[name]

    def _is_expired(self, app: str, written_s: float) -> bool:
        ttl_s = self._rules.ttl_s(app)
        return ttl_s is not None and time.time() - written_s >= ttl_s

    def _add_found(self, found: FoundRecord) -> None:
        header = found.header
        known = self._space.find(header.key) is not None
        if known or self._scan.is_deleted(found) or self._is_expired(header.app, header.written_s):
            self._mark_dead(found.segment, found.offset)
            return
        record = _disk_record(header, found.segment, found.offset)
        if self._space.records_over_ceiling(record.app, record.record_bytes):
            # Newer records already fill the namespace up to its ceiling. Records of a pinned namespace stay.
            self._mark_dead(found.segment, found.offset)
            return
        if self._space.add(record, is_older=True) and self._index.find(header.key) is None:
            self._marks.show_on_disk(header.key)

    def _enqueue(self, key: bytes) -> None:
        if key in self._queue or key in self._writing or self._space.find(key) is not None:
            return
        if len(self._queue) < MAX_QUEUED:
            self._queue[key] = None
        else:
            self._counters.writes["dropped"] += 1

    def _start_writes(self) -> None:
        # During the scan, an entry may have an older record, which is ended when the scan finds it.
        if not self._queue or time.monotonic() < self._resume_s:
            return
        if not self._scan.is_complete and self._space.is_full and self._rules.has_guarantees:
            # The segment to drop may have guaranteed records that are not found yet.
            return
        most = 1 if self._write_problem else _MAX_WRITES
        while self._queue and len(self._writing) < most:
            key, _ = self._queue.popitem(last=False)
            entry = self._index.find(key)
            if entry is None:
                self._counters.writes["gone"] += 1
            elif self._space.find(key) is None:
                self._write(entry)

    def _write(self, entry: TieredEntry) -> None:
        written_s = time.time() - (time.monotonic() - entry.written_s)
        header = RecordHeader(
            entry.key, entry.app, entry.location.size, len(entry.meta), entry.cost_s, written_s, new_salt()
        )
        size_bytes = header.record_bytes
        if not self._space.fits_segment(size_bytes):
            self._counters.writes["too_large"] += 1
            return
        name = self._rules.namespace_of(entry.app)
        excess = self._space.records_over_ceiling(entry.app, self._writing_bytes[name] + size_bytes)
        if excess is None:
            self._counters.writes["ceiling"] += 1
            return
        for record in excess:
            self.delete(record.key, EVICTED)
        at = self._space.allocate(size_bytes)
        if at is None:
            self._open_segment()
            at = self._space.allocate(size_bytes)
        assert at is not None, "a new segment has space for a record that fits"
        self._writing[entry.key] = False
        self._writing_bytes[name] += size_bytes
        work = functools.partial(
            self._files.write, *at, header, entry.meta, self._memory.view(entry.location),
            is_intact=lambda: entry.visible,
        )  # fmt: skip
        self._workers.write(
            work, functools.partial(self._on_written, entry.key, at, name, size_bytes), size_bytes
        )
        self._flush_if_due(at[0], size_bytes)

    def _flush_if_due(self, segment: int, size_bytes: int) -> None:
        self._unflushed_bytes += size_bytes
        if self._unflushed_bytes >= _FLUSH_BYTES:
            self._unflushed_bytes = 0
            self._workers.write(functools.partial(self._files.flush, segment), self._check_result)

    def _on_written(
        self,
        key: bytes,
        location: tuple[int, int],
        name: str,
        size_bytes: int,
        header: RecordHeader | DiskFailure | None,
    ) -> None:
        ended = self._writing.pop(key)
        self._writing_bytes[name] -= size_bytes
        if isinstance(header, (OSError, RecordDamaged)):
            self._counters.writes[self._record_failure(header)] += 1
            return
        if self._write_problem:
            _log.info("the store's disk accepts entries again")
        self._write_problem = ""
        if header is None:
            self._counters.writes["gone"] += 1
        elif ended:
            self._mark_dead(*location)
        else:
            older = self._space.remove(key)
            if older is not None:
                # The scan found this older record during the write.
                self._mark_dead(older.segment, older.offset)
            if self._space.add(_disk_record(header, *location)):
                self._counters.writes["written"] += 1
        entry = self._index.find(key)
        if entry is not None:
            # If the entry has a record now, `_enqueue` does nothing. Otherwise this is a new entry with the
            # same key.
            self._enqueue(key)
        elif self._space.find(key) is not None:
            self._marks.show_on_disk(key)

    def _open_segment(self) -> None:
        dropped = self._space.open_segment()
        number = self._space.segments[-1]
        self._workers.write(
            functools.partial(self._files.create, number), functools.partial(self._on_segment_created, number)
        )
        for one in dropped:
            for record in one.lost_records:
                self._record_lost(record)
            for record, segment, offset in one.moves:
                work = functools.partial(self._copy_record, record.segment, record.offset, segment, offset)
                done = functools.partial(self._on_moved, record, segment, offset)
                self._workers.write(work, done, record.record_bytes)
            self._workers.write(
                functools.partial(self._files.drop, one.number),
                functools.partial(self._on_segment_dropped, one),
            )

    def _copy_record(self, old: int, old_offset: int, segment: int, offset: int) -> bool:
        """Copy a record. Runs on the writer's thread."""
        self._files.copy(self._files.find(old, old_offset), segment, offset)
        return True

    def _on_moved(self, record: DiskRecord, segment: int, offset: int, result: bool | DiskFailure) -> None:
        if result is True and not self._space.move(record, segment, offset):
            self._mark_dead(segment, offset)

    def _on_segment_dropped(self, dropped: DroppedSegment, result: DiskFailure | None) -> None:
        self._check_result(result)
        for record in self._space.remove_unmoved(record for record, _, _ in dropped.moves):
            self._record_lost(record)

    def _record_lost(self, record: DiskRecord) -> None:
        self._marks.hide_on_disk(record.key)
        self._counters.count_removed(record, EVICTED)

    def _on_segment_created(self, number: int, result: DiskFailure | None) -> None:
        if result is not None:
            self._record_failure(result)
            self._space.discard_segment(number)

    def _mark_dead(self, segment: int, offset: int) -> None:
        # This fails if the segment was dropped or the disk fails. This daemon does not read the record
        # anyway.
        self._workers.write(functools.partial(self._files.mark_dead, segment, offset), self._check_result)
        self._unsynced_segments.add(segment)

    def _sync_dead_marks(self) -> None:
        """Flush the marks of ended records to the device, so that a power failure does not undo them.

        One flush of a segment covers all of its records that ended before the flush, because a purge may end
        thousands of records.
        """
        if self._pending_syncs:
            return
        segments, self._unsynced_segments = self._unsynced_segments, set()
        self._pending_syncs = len(segments)
        for segment in segments:
            self._workers.write(functools.partial(self._files.sync, segment), self._on_synced)

    def _on_synced(self, result: DiskFailure | None) -> None:
        self._pending_syncs -= 1
        self._check_result(result)

    def _check_result(self, result: DiskFailure | None) -> None:
        if isinstance(result, OSError) and result.errno != errno.ENOENT:
            self._record_failure(result)

    def _record_failure(self, problem: DiskFailure) -> str:
        """Pause writes after this failure, and return the outcome to count for the failed write."""
        kind = _OUTCOME_BY_ERRNO.get(getattr(problem, "errno", 0), "disk_error")
        if kind != self._write_problem:
            _log.error("a write to the store's disk failed, so writes are paused: %s", problem)
        self._write_problem, self._resume_s = kind, time.monotonic() + RETRY_S
        return kind


def _disk_record(header: RecordHeader, segment: int, offset: int) -> DiskRecord:
    return DiskRecord(
        header.key, header.app, header.cost_s, header.written_s, header.payload_bytes, segment, offset,
        header.record_bytes,
    )  # fmt: skip
