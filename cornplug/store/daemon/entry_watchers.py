"""Dispatch of the index's changes to the clients' table, the access log, the disk and far stores."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cornplug.store.arena import SharedArena, WriteFences
from cornplug.store.base import PayloadLocation
from cornplug.store.daemon.access_log import AccessLog
from cornplug.store.daemon.entry_table_writer import EntryTableWriter
from cornplug.store.daemon.placement import StoredEntry
from cornplug.store.daemon.store_counters import RemovalCause
from cornplug.store.store_stats import DiskStat, FarStat

if TYPE_CHECKING:
    from cornplug.store.daemon.index import StoreIndex
    from cornplug.store.disk.disk_tier import DiskTier
    from cornplug.store.disk.disk_workers import DiskWorkers
    from cornplug.store.disk.open_disk import OpenedDisk
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
        from cornplug.store.disk.tier_protocols import MemoryTier

        assert self._table is not None, "clients see in the table which entries are on disk"
        above = MemoryTier(index, _ArenaMemory(arena, fences), index.placement.policy, self._table)
        self.disk = DiskTier(disk, above, capacity_bytes=arena.capacity_bytes)

    def open_far(self, far: OpenedFar, index: StoreIndex, arena: SharedArena, fences: WriteFences) -> None:
        """Add the far tier, which shares entries through far stores. Call this after `open_disk`."""
        from cornplug.store.disk.tier_protocols import MemoryTier
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
        """Handle the deletion of an entry that is not in memory. Return whether it was on disk or found in a
        far store."""
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
        """Return the keys of the entries that have these records of the table now. `records` can be any
        numbers."""
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
