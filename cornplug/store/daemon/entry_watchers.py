"""Dispatch of the index's changes to the clients' table, the access log, the disk and far stores, and the
daemon's side of the clients' table (`cornplug/store/entry_table.py`).
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

from cornplug.store.arena import SharedArena, WriteFences, create_sealed_memory
from cornplug.store.base import PayloadLocation
from cornplug.store.daemon.access_log import AccessLog
from cornplug.store.daemon.placement import StoredEntry
from cornplug.store.daemon.store_counters import RemovalCause
from cornplug.store.entry_table import (
    BUCKETS,
    FAR_UP,
    FIRST_TICKET_WORD,
    HAS_DISK,
    MAX_META_BYTES,
    META_OFFSET,
    ON_DISK_RECORD,
    RECORD,
    RECORD_MASK,
    RECORDS,
    SERVING,
    TAGS_PER_BUCKET,
    TICKETS,
    UNTAGGED,
    WORD_BYTES,
    TableShape,
    tag_of,
)
from cornplug.store.store_stats import DiskStat, FarStat

if TYPE_CHECKING:
    from cornplug.store.daemon.index import StoreIndex
    from cornplug.store.disk.disk_tier import DiskTier
    from cornplug.store.disk.disk_workers import DiskWorkers
    from cornplug.store.disk.segment_files import OpenedDisk
    from cornplug.store.far.far_tier import FarTier
    from cornplug.store.far.open_far import OpenedFar


class EntryWatchers:
    """Components that are notified of one index's changes: table, access log, disk and far stores. Each
    component is optional."""

    def __init__(self, table: EntryTableWriter | None = None, log: AccessLog | None = None) -> None:
        self._table, self._log = table, log
        self.disk: DiskTier | None = None
        self._far: FarTier | None = None

    def open_disk(self, disk: OpenedDisk, index: StoreIndex, arena: SharedArena, fences: WriteFences) -> None:
        """Add the disk tier, so that entries are also written to disk. Raises OSError if the disk cannot be
        used."""
        from cornplug.store.disk.disk_tier import DiskTier
        from cornplug.store.disk.disk_workers import MemoryTier

        assert self._table is not None, "clients see in the table which entries are on disk"
        above = MemoryTier(index, _ArenaMemory(arena, fences), index.placement.policy, self._table)
        self.disk = DiskTier(disk, above, capacity_bytes=arena.capacity_bytes)

    def open_far(self, far: OpenedFar, index: StoreIndex, arena: SharedArena, fences: WriteFences) -> None:
        """Add the far tier, which shares entries through far stores. Call this after `open_disk`."""
        from cornplug.store.disk.disk_workers import MemoryTier
        from cornplug.store.far.far_tier import FarTier

        assert self._table is not None, "clients see in the table which entries were found"
        disk = self.disk
        self._far = FarTier(
            far, MemoryTier(index, _ArenaMemory(arena, fences), index.placement.policy, self._table),
            is_on_disk=(lambda key: False) if disk is None else disk.holds,
            show_far_up=self._table.show_far_up, show_ticket=self._table.show_ticket,
        )  # fmt: skip

    @property
    def wakeup_sources(self) -> list[DiskTier | DiskWorkers]:
        """Descriptors that are readable when `step` has work."""
        disk: list[DiskTier | DiskWorkers] = [] if self.disk is None else [self.disk]
        return disk + ([] if self._far is None else [*self._far.wakeup_sources])

    def on_added(self, entry: StoredEntry, now_s: float) -> None:
        """Handle the publication of an entry."""
        if self._log is not None:
            self._log.log("put", [entry], now_s)
        if self._table is not None:
            self._table.add(entry.key, entry.location, entry.meta)
        if self.disk is not None:
            self.disk.on_added(entry)
        if self._far is not None:
            self._far.on_added(entry)

    def on_read(self, entries: Sequence[StoredEntry], now_s: float) -> None:
        """Handle reads of entries."""
        if self._log is not None:
            self._log.log("get", entries, now_s)
        if self.disk is not None:
            self.disk.on_read(entries)
        if self._far is not None:
            self._far.on_read(entries)

    def on_removed(self, entry: StoredEntry, cause: RemovalCause) -> None:
        """Handle the removal of an entry from memory. `cause` is the reason for the removal."""
        if self._table is not None:
            self._table.remove(entry.key)
        if self.disk is not None:
            self.disk.on_removed(entry.key, cause)
        if self._far is not None:
            self._far.on_removed(entry.key, cause)

    def recall(self, keys: Sequence[bytes], ticket: int = 0) -> None:
        """Start to read into memory the entries of `keys` that are on disk only or were found in far stores.
        Look up the remaining keys in far stores, and show `ticket` in the table when the far stores have
        replied."""
        if self.disk is not None:
            self.disk.recall(keys)
        if self._far is not None:
            self._far.recall(keys, ticket)

    @property
    def has_pending_work(self) -> bool:
        """Whether `step` has more to do immediately."""
        return (self.disk is not None and self.disk.has_pending_work) or (
            self._far is not None and self._far.has_pending_work
        )

    def step(self) -> None:
        """Continue the background work for the disk and far stores."""
        if self.disk is not None:
            self.disk.step()
        if self._far is not None:
            self._far.step()

    def close(self) -> None:
        """Write the buffered lines of the log and the entries that wait for the disk, and close all
        watchers."""
        if self._log is not None:
            self._log.close()
        if self.disk is not None:
            self.disk.close()
        if self._far is not None:
            self._far.close()

    def delete_from_tiers(self, key: bytes) -> bool:
        """Delete an entry that is not in memory from the disk and from far stores. Return whether any of them
        had it."""
        was_on_disk = self.disk is not None and self.disk.delete(key, "deleted")
        was_far = self._far is not None and self._far.delete(key)
        return was_on_disk or was_far

    def disk_stat(self) -> DiskStat | None:
        """Return a snapshot of the disk's statistics, or None if the store has no disk."""
        return self.disk.stat() if self.disk is not None else None

    def far_stat(self) -> dict[str, FarStat]:
        """Return a snapshot of each far store's statistics."""
        return self._far.stat() if self._far is not None else {}

    def keys_of(self, records: Sequence[int]) -> list[bytes]:
        """Return the keys of the entries whose records in the table have these numbers. Numbers without an
        entry are ignored."""
        if self._table is None:
            return []
        keys = [self._table.key_of(record) for record in records]
        return [key for key in keys if key is not None]


class _ArenaMemory:
    """Access to the arena for the threads of the disk and far tiers. The arena stays mapped as long as a
    thread has a view."""

    def __init__(self, arena: SharedArena, fences: WriteFences) -> None:
        self._bytes = memoryview(mmap.mmap(arena.fd, arena.capacity_bytes))
        self._fences = fences

    def view(self, location: PayloadLocation) -> memoryview:
        """Return a writable view of a location."""
        return self._bytes[location.offset : location.offset + location.size]

    def may_write(self, location: PayloadLocation) -> bool:
        """Return whether this location is still reserved."""
        return self._fences.is_writable(location)


class EntryTableWriter:
    """Table of entries that only this process writes. Raises OSError if there is no memory for it.

    Args:
        has_disk: Whether clients look for entries that are on disk only.
    """

    def __init__(self, shape: TableShape, *, has_disk: bool = False) -> None:
        self.shape = shape
        self.fd, mapped = create_sealed_memory("cornplug-table", shape.size_bytes, others_write=False)
        self._bytes = memoryview(mapped)
        self._words = self._bytes.cast("Q")
        self._words[BUCKETS], self._words[RECORDS] = shape.buckets, shape.records
        self._words[HAS_DISK] = has_disk
        self._words[SERVING] = 1
        # The content of the table is for clients. This process reads it only to choose a lane, which is one
        # word of a bucket.
        self._record_and_lane: dict[bytes, tuple[int, int]] = {}
        """Record number of each entry, and index of the word with its tag, by key."""
        self._untagged: Counter[int] = Counter()
        """Number of entries without a tag, by the index of the bucket's first word."""
        self._untagged_total = 0
        self._keys: dict[int, bytes] = {}
        self._free: list[int] = []
        self._used = 0

    def __len__(self) -> int:
        """Return the number of entries that have a tag."""
        return len(self._record_and_lane)

    def add(self, key: bytes, location: PayloadLocation, meta: bytes) -> None:
        """Add an entry that is new, or that was on disk only, to the table. If its bucket has no word for a
        tag, or all records are in use, only count the entry in its bucket."""
        at = self.shape.bucket_word(key)
        lane = self._choose_lane(key, at)
        record = self._allocate_record() if lane is not None else 0
        if lane is None or not record:
            self._count_untagged(at, 1)
            return
        self._record_and_lane[key], self._keys[record] = (record, lane), key
        if len(meta) <= MAX_META_BYTES:
            self._write_record(record, location, meta)
        # The tag is written last, so a reader that finds the tag finds a complete record, or detects that the
        # record is damaged.
        self._words[lane] = tag_of(key) | record

    def remove(self, key: bytes) -> None:
        """Remove from the table an entry that was passed to `add`."""
        place = self._record_and_lane.pop(key, None)
        if place is None:
            self._count_untagged(self.shape.bucket_word(key), -1)
            return
        record, lane = place
        self._words[lane] = 0
        start = self.shape.record_offset(record)
        self._bytes[start : start + META_OFFSET] = bytes(META_OFFSET)
        del self._keys[record]
        self._free.append(record)

    def show_on_disk(self, key: bytes) -> None:
        """Mark an entry in the table as on disk only, unless its bucket is full or it is already marked."""
        at, word = self.shape.bucket_word(key), tag_of(key) | ON_DISK_RECORD
        if self._find_lane(word, at) is None and (lane := self._find_lane(0, at)) is not None:
            self._words[lane] = word

    def hide_on_disk(self, key: bytes) -> None:
        """Remove the mark that an entry is on disk only, if the table has this mark."""
        if (lane := self._find_lane(tag_of(key) | ON_DISK_RECORD, self.shape.bucket_word(key))) is not None:
            self._words[lane] = 0

    def show_far_up(self, is_up: bool) -> None:
        """Show in the table whether a far store responds."""
        self._words[FAR_UP] = is_up

    def show_ticket(self, ticket: int) -> None:
        """Show in the table that the far-store lookup with this ticket is complete."""
        self._words[FIRST_TICKET_WORD + ticket % TICKETS] = ticket

    def _find_lane(self, word: int, bucket_word: int) -> int | None:
        return next(
            (i for i in range(bucket_word, bucket_word + TAGS_PER_BUCKET) if self._words[i] == word), None
        )

    def _choose_lane(self, key: bytes, bucket_word: int) -> int | None:
        """Return the index of the word (lane) in the bucket for the tag of an entry in memory, or None if no
        word can be used. The choices, in this order, are the word that shows this entry as on disk, a free
        word, and the word of another entry that is on disk only."""
        if not self._words[HAS_DISK]:
            return self._find_lane(0, bucket_word)
        lane = self._find_lane(tag_of(key) | ON_DISK_RECORD, bucket_word)
        if lane is None:
            lane = self._find_lane(0, bucket_word)
        if lane is None:
            lanes = range(bucket_word, bucket_word + TAGS_PER_BUCKET)
            lane = next((i for i in lanes if self._words[i] & RECORD_MASK == ON_DISK_RECORD), None)
        return lane

    def key_of(self, record: int) -> bytes | None:
        """Return the key of the entry whose record has this number, or None if there is no such entry."""
        return self._keys.get(record)

    def close(self) -> None:
        """Close the table. From now on, clients get StoreUnavailable when they use it."""
        self._words[SERVING] = 0
        os.close(self.fd)

    def _count_untagged(self, bucket_word: int, delta: int) -> None:
        self._untagged[bucket_word] += delta
        self._words[bucket_word + TAGS_PER_BUCKET] = self._untagged[bucket_word]
        self._untagged_total += delta
        self._words[UNTAGGED] = self._untagged_total
        if not self._untagged[bucket_word]:
            del self._untagged[bucket_word]

    def _allocate_record(self) -> int:
        """Take an unused record for a new entry, and return its number, or 0 if all records are in use."""
        if self._free:
            return self._free.pop()
        if self._used == self.shape.records:
            return 0
        self._used += 1
        return self._used

    def _write_record(self, record: int, location: PayloadLocation, meta: bytes) -> None:
        data = RECORD.pack(0, location.generation, location.offset, location.size, len(meta)) + meta
        start = self.shape.record_offset(record)
        self._bytes[start : start + len(data)] = data
        self._words[start // WORD_BYTES] = xxhash.xxh3_64_intdigest(data[WORD_BYTES:])
