"""The records that earlier daemons have left, found while this one serves: newest segments first.

A segment is read in portions of a few milliseconds, and only while no recall waits.
"""

from __future__ import annotations

import errno
import functools
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from cornplug.store.base import PurgeRule
from cornplug.store.disk.disk_workers import DiskFailure, DiskWorkers
from cornplug.store.disk.segment_files import FoundRecord, SegmentFiles

_PORTION_S: Final = 5e-3
_log = logging.getLogger("cornplug.store")


class DiskScan:
    """One scan of `segments`, the oldest first."""

    def __init__(self, files: SegmentFiles, workers: DiskWorkers, segments: Sequence[int]) -> None:
        self._found: deque[FoundRecord] = deque()
        self._workers, self._unread = workers, len(segments)
        self._ended_keys: set[bytes] = set()
        self._purges: list[tuple[PurgeRule, float]] = []
        for order, number in enumerate(reversed(segments)):
            self._read_portion(_SegmentScan(files, number, order))

    @property
    def over(self) -> bool:
        """Whether every record was taken."""
        return not self._unread and not self._found

    @property
    def has_records(self) -> bool:
        """Whether there are some to take now."""
        return bool(self._found)

    def take(self, most: int) -> list[FoundRecord]:
        """At most so many records."""
        taken = [self._found.popleft() for _ in range(min(most, len(self._found)))]
        if self.over:
            self._ended_keys.clear()
            self._purges.clear()
        return taken

    def ended(self, key: bytes) -> None:
        """An entry was deleted: its record may be found later."""
        if not self.over:
            self._ended_keys.add(key)

    def purged(self, rule: PurgeRule) -> None:
        """A purge has begun."""
        if not self.over and not rule.dry_run:
            self._purges.append((rule, time.time()))

    def is_ended(self, found: FoundRecord) -> bool:
        """Whether its entry was deleted or purged since the scan began."""
        header = found.header
        return header.key in self._ended_keys or any(
            header.written_s < begun_s and purge_names(rule, header.app, begun_s - header.written_s)
            for rule, begun_s in self._purges
        )

    def _read_portion(self, scan: _SegmentScan) -> None:
        self._workers.read_later(scan.order, scan.portion, functools.partial(self._read, scan))

    def _read(self, scan: _SegmentScan, over: bool | DiskFailure) -> None:
        if over is False:
            self._read_portion(scan)
            return
        self._unread -= 1
        if over is True:
            # Newest first, as with segments: an entry may have several records, and the newest one counts.
            self._found.extend(reversed(scan.records))
        elif getattr(over, "errno", 0) != errno.ENOENT:
            # A segment that no longer exists was dropped to make room for new records.
            _log.warning("a segment of the store's disk cannot be read: %s", over)


class _SegmentScan:
    """The scan of one segment. Newer segments have a lower `order`."""

    def __init__(self, files: SegmentFiles, number: int, order: int) -> None:
        self.order = order
        self.records: list[FoundRecord] = []
        self._steps = files.scan(number)

    def portion(self) -> bool:
        """Read on for a few milliseconds, on a worker's thread. Returns whether the segment has been read."""
        end_s = time.monotonic() + _PORTION_S
        for found in self._steps:
            if found is not None:
                self.records.append(found)
            if time.monotonic() >= end_s:
                return False
        return True


def purge_names(rule: PurgeRule, app: str, age_s: float) -> bool:
    """Whether a purge ends an entry on disk, of which only the age is known: it was not read for at most so
    long."""
    return rule.app in (None, app) and age_s >= max(rule.older_s, rule.unused_s)
