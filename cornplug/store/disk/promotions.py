"""Recalls, which read entries from disk into memory because clients will read them.

recalled ──reserve──> read, each chunk verified ──> committed: clients find it in the table
    └ refused         └ damaged: removed

Namespaces are served in rotation. If there are several namespaces, each has at most half of the bytes that
are recalled at a time.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from cornplug.store.base import Reservation, ReserveRefusal, ReserveTerms
from cornplug.store.disk.disk_space import DiskCounters, DiskRecord, DiskSpace
from cornplug.store.disk.disk_workers import DISK_OWNER, DiskFailure, DiskWorkers, MemoryTier
from cornplug.store.disk.record_format import RecordDamaged
from cornplug.store.disk.segment_files import SegmentFiles

_MAX_READS: Final = 4
"""Number of entries that the reader threads have at a time. It exceeds the number of threads, so that each
thread's next read is queued."""


class Promotions:
    """Recalls of one disk tier.

    Args:
        max_bytes: Maximum payload bytes recalled at a time. More entries would evict one another.
        delete: Function that deletes an entry from the disk, with the cause.
    """

    def __init__(
        self,
        files: SegmentFiles,
        space: DiskSpace,
        workers: DiskWorkers,
        memory_tier: MemoryTier,
        counters: DiskCounters,
        *,
        max_bytes: int,
        delete: Callable[[bytes, str], bool],
    ) -> None:
        self._files, self._space, self._workers = files, space, workers
        self._index, self._memory, self._rules = memory_tier.index, memory_tier.memory, memory_tier.rules
        self._counters, self._max_bytes, self._delete = counters, max_bytes, delete
        self._waiting: OrderedDict[str, OrderedDict[bytes, DiskRecord]] = OrderedDict()
        """Waiting records by namespace. The next record is taken from the first namespace."""
        self._reading: dict[bytes, DiskRecord] = {}
        self._bytes: Counter[str] = Counter()
        """Payload bytes of entries that wait or are being read, by namespace."""

    def recall(self, keys: Sequence[bytes]) -> None:
        """Queue these entries for reading, in this order, as far as the limit of bytes allows."""
        for key in keys:
            record = self._space.find(key)
            if record is None or key in self._reading or self._index.find(key):
                continue
            name = self._rules.namespace_of(record.app)
            if key in self._waiting.get(name, ()):
                continue
            if not self._has_capacity(name, record.payload_bytes):
                self._counters.reads["refused"] += 1
                return
            record.was_read = True
            self._bytes[name] += record.payload_bytes
            self._enqueue(record)

    def _has_capacity(self, name: str, payload_bytes: int) -> bool:
        """Return whether this namespace may recall `payload_bytes` more. It may always recall one record."""
        own_bytes, all_bytes = self._bytes[name], self._bytes.total()
        most_bytes = self._max_bytes // (2 if len(self._rules.names) > 1 else 1)
        return not own_bytes or (
            own_bytes + payload_bytes <= most_bytes and all_bytes + payload_bytes <= self._max_bytes
        )

    def _enqueue(self, record: DiskRecord, *, at_front: bool = False) -> None:
        name = self._rules.namespace_of(record.app)
        waiting = self._waiting.setdefault(name, OrderedDict())
        waiting[record.key] = record
        if at_front:
            waiting.move_to_end(record.key, last=False)
            self._waiting.move_to_end(name, last=False)

    def _pop_next(self) -> DiskRecord:
        """Remove and return the next record, and move its namespace to the end of the rotation."""
        name, waiting = self._waiting.popitem(last=False)
        _, record = waiting.popitem(last=False)
        if waiting:
            self._waiting[name] = waiting
        return record

    def _release_bytes(self, record: DiskRecord) -> None:
        """Subtract a record from the bytes that wait or are being read."""
        self._bytes[self._rules.namespace_of(record.app)] -= record.payload_bytes

    def step(self) -> None:
        """Start reads as far as memory and readers are available."""
        while self._waiting and len(self._reading) < _MAX_READS:
            record = self._pop_next()
            key = record.key
            if self._space.find(key) is not record or self._index.find(key):
                self._release_bytes(record)
                continue
            reservation = self._index.reserve(
                DISK_OWNER, [(key, record.payload_bytes)], ReserveTerms(record.app, cost_s=record.cost_s),
                now_s=time.monotonic(), is_promotion=True,
            )[0]  # fmt: skip
            if reservation is ReserveRefusal.GROWING:
                self._enqueue(record, at_front=True)
                return
            if isinstance(reservation, Reservation):
                self._start_read(record, reservation)
            else:
                self._release_bytes(record)
                self._counters.reads[reservation.value] += 1

    def _start_read(self, record: DiskRecord, reservation: Reservation) -> None:
        self._reading[record.key] = record
        place = record.segment, record.offset
        work = functools.partial(self._read, record.key, record.payload_bytes, *place, reservation)
        self._workers.read(work, functools.partial(self._on_read, record, place, reservation))

    def _read(
        self, key: bytes, size_bytes: int, segment: int, offset: int, reservation: Reservation
    ) -> bytes | None:
        """Read an entry into the reserved memory. Return its meta, or None if the reservation has ended. Runs
        on a reader's thread."""
        found = self._files.find(segment, offset)
        if (found.header.key, found.header.payload_bytes) != (key, size_bytes):
            raise RecordDamaged("the record belongs to another entry")
        may_write = functools.partial(self._memory.may_write, reservation.location)
        return self._files.read(found, self._memory.view(reservation.location), may_write=may_write)

    def _on_read(
        self,
        record: DiskRecord,
        location: tuple[int, int],
        reservation: Reservation,
        meta: bytes | DiskFailure | None,
    ) -> None:
        del self._reading[record.key]
        if isinstance(meta, bytes) and self._space.find(record.key) is record:
            self._release_bytes(record)
            age_s = max(0.0, time.time() - record.written_s)
            if self._index.commit(DISK_OWNER, reservation.token, meta, age_s=age_s):
                self._counters.count_hit(record)
            else:
                self._counters.reads["late"] += 1
            return
        self._index.release(DISK_OWNER, [reservation.token], now_s=time.monotonic())
        if isinstance(meta, RecordDamaged) and location != (record.segment, record.offset):
            # The record was moved during the read.
            self._enqueue(record)
            return
        self._release_bytes(record)
        if meta is None or isinstance(meta, bytes):
            self._counters.reads["late"] += 1
        else:
            # If the record stayed, clients would wait for it repeatedly.
            self._counters.reads["damaged" if isinstance(meta, RecordDamaged) else "disk_error"] += 1
            self._delete(record.key, "damaged")
