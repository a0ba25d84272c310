"""The records that earlier daemons have left, found while this one serves: newest segments first."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Sequence

from cornplug.store.base import PurgeRule
from cornplug.store.disk.disk_workers import DiskFailure, DiskWorkers
from cornplug.store.disk.segment_files import FoundRecord, SegmentFiles

_log = logging.getLogger("cornplug.store")


class DiskScan:
    """One scan of `segments`, the oldest first."""

    def __init__(self, files: SegmentFiles, workers: DiskWorkers, segments: Sequence[int]) -> None:
        self._found: deque[FoundRecord] = deque()
        self._unread = len(segments)
        self._ended_keys: set[bytes] = set()
        self._purges: list[tuple[PurgeRule, float]] = []
        for number in reversed(segments):
            workers.read(functools.partial(_records, files, number), self._read)

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

    def _read(self, records: list[FoundRecord] | DiskFailure) -> None:
        self._unread -= 1
        if isinstance(records, list):
            self._found.extend(records)
        else:
            _log.warning("a segment of the store's disk cannot be read: %s", records)


def purge_names(rule: PurgeRule, app: str, age_s: float) -> bool:
    """Whether a purge ends an entry on disk, of which only the age is known: it was not read for at most so
    long."""
    return rule.app in (None, app) and age_s >= max(rule.older_s, rule.unused_s)


def _records(files: SegmentFiles, number: int) -> list[FoundRecord]:
    # The last of a segment first, as its segments: of two records of an entry the newer one comes first.
    return list(files.scan(number))[::-1]
