"""Purges, which delete the entries of an app, or old entries, in batches.

A purge deletes every entry that existed when the purge began and that matches its rule. If the rule has no
age, the purge also ends reservations, whose commits then fail. Entries that are written later stay. The
client requests one batch after another, so that requests of other clients are handled in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from cornplug.store.base import PurgeCount, PurgeRule
from cornplug.store.daemon.entry_watchers import EntryWatchers
from cornplug.store.daemon.placement import StoredEntry
from cornplug.store.daemon.reservations import OpenEntries, OpenEntry
from cornplug.store.daemon.store_counters import RemovalCause
from cornplug.store.messages import check_purge

BATCH_ENTRIES: Final = 256
"""Number of entries in a batch, which takes about 1.5 ms if all of them are deleted. The first batch also
lists all keys, which takes 5 ms for 200,000 keys."""


class PurgeJobs:
    """Purges of one store that are in progress, at most one per client."""

    def __init__(
        self,
        entries: Mapping[bytes, StoredEntry],
        open_entries: OpenEntries,
        drop: Callable[[StoredEntry, RemovalCause], None],
        watchers: EntryWatchers,
    ) -> None:
        self._entries, self._open_entries, self._drop = entries, open_entries, drop
        self._watchers = watchers
        self._remaining: dict[int, list[bytes | OpenEntry]] = {}

    def purge_batch(
        self, owner: int, rule: PurgeRule, *, begins: bool, now_s: float
    ) -> tuple[PurgeCount, bool]:
        """Purge a batch of entries. Return the counts of the batch, and whether further batches remain.

        Raises ValueError for an invalid rule.

        Args:
            begins: Whether this is the first batch of a purge.
        """
        check_purge(rule)
        if begins:
            self._remaining[owner] = [
                *self._open_entries.list_open(),
                *self._entries,
                *self._on_disk_only(rule),
            ]
        left = self._remaining.get(owner, [])
        some = left[-BATCH_ENTRIES:]
        del left[-BATCH_ENTRIES:]
        count = self._purge(some, rule, now_s)
        if not left:
            self.forget(owner)
        return count, bool(left)

    def forget(self, owner: int) -> None:
        """Discard the state of a client's purge, because the client has disconnected or the purge is
        complete."""
        self._remaining.pop(owner, None)

    def _on_disk_only(self, rule: PurgeRule) -> list[bytes]:
        disk = self._watchers.disk
        if disk is None:
            return []
        disk.begin_purge(rule)
        return [key for key in disk.all_keys() if key not in self._entries]

    def _purge(self, items: list[bytes | OpenEntry], rule: PurgeRule, now_s: float) -> PurgeCount:
        entries = size_bytes = leased = writing = 0
        for each in items:
            if isinstance(each, OpenEntry):
                if not each.has_ended and not each.is_complete and _matches_open_entry(each, rule):
                    writing += 1
                    if not rule.dry_run:
                        self._open_entries.end(each)
                continue
            entry = self._entries.get(each)
            if entry is None and self._watchers.disk is not None:
                on_disk = self._watchers.disk.purge(each, rule)
                if on_disk is not None:
                    entries, size_bytes = entries + 1, size_bytes + on_disk
            if entry is None or not _matches(entry, rule, now_s):
                continue
            entries, size_bytes, leased = (
                entries + 1,
                size_bytes + entry.aligned_bytes,
                leased + bool(entry.readers),
            )
            if not rule.dry_run:
                self._drop(entry, "purged")
        return PurgeCount(entries, size_bytes, leased, writing)


def _matches_open_entry(open_entry: OpenEntry, rule: PurgeRule) -> bool:
    return not rule.older_s and not rule.unused_s and rule.app in (None, open_entry.app)


def _matches(entry: StoredEntry, rule: PurgeRule, now_s: float) -> bool:
    if rule.app is not None and entry.app != rule.app:
        return False
    # An entry with a reader is in use now.
    unused_s = 0.0 if entry.readers else now_s - entry.used_s
    return now_s - entry.written_s >= rule.older_s and unused_s >= rule.unused_s
