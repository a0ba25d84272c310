"""Counts of the disk tier since the daemon began."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Final

from cornplug.store.disk.disk_space import DiskRecord, DiskSpace
from cornplug.store.stats.store_stats import DiskNamespaceStat, DiskStat

UNUSED: Final = "evicted"
"""The cause of a removal with its segment."""


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
