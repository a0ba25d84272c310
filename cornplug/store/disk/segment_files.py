"""Files of the disk tier: one folder of this user, used by one daemon, with append-only segments.

    lock                 locked by the daemon that uses the folder
    segment-00000042     records (`record_format.py`), one after another

A daemon never appends to a segment of an earlier daemon. A write that was interrupted by a kill is therefore
at the end of its segment, and no record follows it. Writes do not wait for the device. If the device loses a
record, reading the record is a miss, because its seal does not match. The mark that ends a record is flushed
on the writer's thread (`sync`, `drop`), because a power failure would otherwise restore a deleted entry.

`DiskScan` finds the records of earlier daemons while this daemon serves, newest segments first. A segment is
read in portions of a few milliseconds, and only while no recall waits.

`open_disk` checks and locks the folder.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cornplug.errors import ConfigError
from cornplug.local_socket import try_lock
from cornplug.private_paths import open_file, open_folder
from cornplug.store.base import PurgeRule
from cornplug.store.disk.disk_workers import DiskFailure, DiskWorkers
from cornplug.store.disk.record_format import (
    ALIGN_BYTES,
    CHUNK_BYTES,
    DEAD_STATE,
    MAGIC,
    STATE_OFFSET,
    TAG_BYTES,
    RecordDamaged,
    RecordHeader,
    RecordSealer,
    decode_record_header,
    encode_record_header,
)

_SEGMENT_PATTERN: Final = re.compile(r"segment-(\d{8})")
_LOCK_NAME: Final = "lock"
_SKIP_BYTES: Final = 1 << 20
"""Bytes that a scan reads at a time to find the next header."""
_SCAN_STEP_S: Final = 5e-3
_log = logging.getLogger("cornplug.store")
_SETTING: Final = "store.disk_path"
MIN_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """Record with a valid header, whose end is within its segment."""

    segment: int
    offset: int
    header: RecordHeader


class _OpenFile:
    """Descriptor that is closed when its last user releases it, because a reader may still use a dropped
    segment."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class SegmentFiles:
    """Segments in a folder. Thread-safe, but only one thread may write at a time.

    Args:
        setting: Name of the setting that selects the folder, for errors.

    Raises ConfigError if other users can access the folder, if it cannot be used, or if another daemon uses
    it.
    """

    def __init__(self, path: Path, secret: bytes, *, setting: str) -> None:
        self._folder = open_folder(path, setting=setting)
        self._sealer = RecordSealer(secret)
        self._files: dict[int, _OpenFile] = {}
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            try:
                self._files[0] = _OpenFile(open_file(self._folder, _LOCK_NAME, os.O_RDWR))
                if not try_lock(self._files[0].fd):
                    raise ConfigError(
                        setting, f"{path} is in use by another store", "Use another folder for each store."
                    )
                for name in os.listdir(self._folder):
                    if match := _SEGMENT_PATTERN.fullmatch(name):
                        self._files[int(match[1])] = _OpenFile(open_file(self._folder, name, os.O_RDWR))
            except OSError as e:
                raise ConfigError(setting, f"{path}: {e.strerror}", "Use a folder on a local disk.") from e
            on_error.pop_all()

    def list_segments(self) -> list[tuple[int, int]]:
        """Return (number, bytes) of each segment, oldest first. Raises OSError."""
        return [(i, os.fstat(self._files[i].fd).st_size) for i in sorted(self._files) if i]

    def create(self, number: int) -> None:
        """Create an empty segment. Raises OSError."""
        flags = os.O_RDWR | os.O_EXCL
        self._files[number] = _OpenFile(open_file(self._folder, _segment_name(number), flags))

    def drop(self, number: int) -> None:
        """Delete a segment and flush its removal to the device. Reads in progress complete.

        Raises OSError. The segment is then removed from this object anyway.
        """
        self._files.pop(number, None)
        os.unlink(_segment_name(number), dir_fd=self._folder)
        os.fsync(self._folder)

    def write(
        self,
        segment: int,
        offset: int,
        header: RecordHeader,
        meta: bytes,
        payload: memoryview,
        *,
        is_intact: Callable[[], bool] = lambda: True,
    ) -> RecordHeader | None:
        """Write an entry's record, and return its header.

        Returns None if `is_intact` returns False after the payload was written, because the payload may have
        changed. Raises OSError. In both cases, no scan finds the record.

        Args:
            header: Header of this meta and payload, with a new salt.
        """
        head = encode_record_header(header, self._sealer.header_tag)
        cipher = self._sealer.cipher(header.key, header.salt, head)
        file = self._file(segment)
        # The header is written last, so an incomplete record has no header.
        at = offset + len(head)
        at += _write_all(file.fd, cipher.seal_meta(meta), at)
        sealed = memoryview(bytearray(min(payload.nbytes, CHUNK_BYTES) + TAG_BYTES))
        for number in range(header.chunk_count):
            piece = payload[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            target = sealed[: piece.nbytes + TAG_BYTES]
            cipher.seal_chunk(number, piece, target)
            at += _write_all(file.fd, target, at)
        if not is_intact():
            return None
        _write_all(file.fd, head, offset)
        return header

    def find(self, segment: int, offset: int) -> FoundRecord:
        """Return the live record at this location. Raises RecordDamaged if there is no live record, and
        OSError."""
        file = self._files.get(segment)
        header = None
        if file is not None:
            data = os.pread(file.fd, ALIGN_BYTES, offset)
            header = decode_record_header(data, self._sealer.header_tag)
        if header is None or header.is_dead:
            raise RecordDamaged("no record was found")
        return FoundRecord(segment, offset, header)

    def read(
        self, found: FoundRecord, target: memoryview, *, may_write: Callable[[], bool] = lambda: True
    ) -> bytes | None:
        """Read an entry's payload into `target`, verify each chunk, and return the entry's meta.

        Calls `may_write` before each chunk. If it returns False because the reservation has ended, this
        returns None. Raises OSError, RecordDamaged, and ValueError if `target` does not have the payload's
        size. After an error, the content of `target` is undefined.
        """
        header = found.header
        if target.nbytes != header.payload_bytes:
            raise ValueError(f"payload of {header.payload_bytes} bytes, target of {target.nbytes}")
        file = self._files.get(found.segment)
        if file is None:
            raise RecordDamaged("the record's segment was deleted")
        head = encode_record_header(header, self._sealer.header_tag)
        cipher = self._sealer.cipher(header.key, header.salt, head)
        buffer = memoryview(bytearray(max(header.meta_bytes, CHUNK_BYTES) + TAG_BYTES))
        sealed = _read_all(file.fd, buffer[: header.meta_bytes + TAG_BYTES], found.offset + len(head))
        meta = cipher.open_meta(sealed)
        os.posix_fadvise(file.fd, found.offset, header.record_bytes, os.POSIX_FADV_WILLNEED)
        for number in range(header.chunk_count):
            start, size_bytes = header.chunk_at(number)
            sealed = _read_all(file.fd, buffer[:size_bytes], found.offset + start)
            if not may_write():
                return None
            cipher.open_chunk(number, sealed, target[number * CHUNK_BYTES :][: size_bytes - TAG_BYTES])
        return meta

    def copy(self, found: FoundRecord, segment: int, offset: int) -> None:
        """Copy a record to another location. The bytes are unchanged, because the seal does not depend on the
        location. Raises OSError, or RecordDamaged if the record is incomplete."""
        source, target = self._file(found.segment), self._file(segment)
        start, left = found.offset, found.header.used_bytes
        while left:
            done = os.copy_file_range(source.fd, target.fd, left, start, offset)
            if not done:
                raise RecordDamaged("the record ends before its last byte")
            start, offset, left = start + done, offset + done, left - done

    def mark_dead(self, segment: int, offset: int) -> None:
        """Mark a record as ended, so that no later scan finds it. A power failure before `sync` may undo the
        mark. Raises OSError."""
        _write_all(self._file(segment).fd, DEAD_STATE, offset + STATE_OFFSET)

    def sync(self, segment: int) -> None:
        """Flush a segment's written data to the device. Raises OSError."""
        os.fdatasync(self._file(segment).fd)

    def flush(self, segment: int) -> None:
        """Flush a segment's written data to the device, and remove it from the page cache. Raises OSError."""
        self.sync(segment)
        fd = self._file(segment).fd
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def scan(self, segment: int) -> Iterator[FoundRecord | None]:
        """Yield the live records of a segment, in order. Yields None after a step that found no record, so
        that the caller can pause. Raises OSError.

        A header that is damaged, or that was written with another secret, hides only its own record. Only
        headers are read. If a header is missing, up to `_SKIP_BYTES` are read at a time to find the next
        header.
        """
        file = self._file(segment)
        end, at = os.fstat(file.fd).st_size, 0
        while at < end:
            data = os.pread(file.fd, ALIGN_BYTES, at)
            header = decode_record_header(data, self._sealer.header_tag)
            if header is None or at + header.used_bytes > end:
                at = _next_magic(file.fd, at + ALIGN_BYTES)
                yield None
                continue
            if not header.is_dead:
                yield FoundRecord(segment, at, header)
            at += header.record_bytes

    def free_bytes(self) -> int:
        """Return the number of bytes that are free on the file system for this user. Raises OSError."""
        about = os.fstatvfs(self._folder)
        return about.f_bavail * about.f_frsize

    def _file(self, segment: int) -> _OpenFile:
        file = self._files.get(segment)
        if file is None:
            raise OSError(errno.ENOENT, "the segment was deleted")
        return file

    def close(self) -> None:
        """Close all files and release the lock."""
        self._files.clear()
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = -1


class DiskScan:
    """Scan for the records of earlier daemons in `segments`, which are ordered oldest first."""

    def __init__(self, files: SegmentFiles, workers: DiskWorkers, segments: Sequence[int]) -> None:
        self._found: deque[FoundRecord] = deque()
        self._workers, self._unread_segments = workers, len(segments)
        self._deleted_keys: set[bytes] = set()
        self._purges: list[tuple[PurgeRule, float]] = []
        for order, number in enumerate(reversed(segments)):
            self._schedule_step(_SegmentScan(files, number, order))

    @property
    def is_complete(self) -> bool:
        """Whether the scan is complete and all its records were taken."""
        return not self._unread_segments and not self._found

    @property
    def has_records(self) -> bool:
        """Whether there are records to take now."""
        return bool(self._found)

    def pop_found(self, max_records: int) -> list[FoundRecord]:
        """Remove and return at most `max_records` records."""
        taken = [self._found.popleft() for _ in range(min(max_records, len(self._found)))]
        if self.is_complete:
            self._deleted_keys.clear()
            self._purges.clear()
        return taken

    def record_deleted(self, key: bytes) -> None:
        """Record that an entry was deleted, so that `is_deleted` is true for its record if the scan finds
        it."""
        if not self.is_complete:
            self._deleted_keys.add(key)

    def record_purge(self, rule: PurgeRule) -> None:
        """Record that a purge has begun, so that `is_deleted` is true for matching records that are found
        later."""
        if not self.is_complete and not rule.dry_run:
            self._purges.append((rule, time.time()))

    def is_deleted(self, found: FoundRecord) -> bool:
        """Return whether the record's entry was deleted or purged since the scan began."""
        header = found.header
        return header.key in self._deleted_keys or any(
            header.written_s < begun_s and matches_purge(rule, header.app, begun_s - header.written_s)
            for rule, begun_s in self._purges
        )

    def _schedule_step(self, scan: _SegmentScan) -> None:
        self._workers.read_in_background(
            scan.order, scan.run_step, functools.partial(self._on_step_done, scan)
        )

    def _on_step_done(self, scan: _SegmentScan, result: bool | DiskFailure) -> None:
        if result is False:
            self._schedule_step(scan)
            return
        self._unread_segments -= 1
        if result is True:
            # As with segments, the newest record is first, because an entry may have several records, and the
            # newest of them counts.
            self._found.extend(reversed(scan.records))
        elif getattr(result, "errno", 0) != errno.ENOENT:
            # With ENOENT, the segment was dropped to free space for new records.
            _log.warning(
                "a segment of the store's disk cannot be read, so none of its entries are used: %s", result
            )


class _SegmentScan:
    """Scan of one segment. Newer segments have a lower `order`."""

    def __init__(self, files: SegmentFiles, number: int, order: int) -> None:
        self.order = order
        self.records: list[FoundRecord] = []
        self._steps = files.scan(number)

    def run_step(self) -> bool:
        """Scan for a few milliseconds, on a worker's thread. Return whether the segment's scan is
        complete."""
        end_s = time.monotonic() + _SCAN_STEP_S
        for found in self._steps:
            if found is not None:
                self.records.append(found)
            if time.monotonic() >= end_s:
                return False
        return True


def matches_purge(rule: PurgeRule, app: str, age_s: float) -> bool:
    """Return whether a purge deletes an entry on disk. The time since the entry's last read is unknown, so
    the entry's age is used instead, which is at least as long."""
    return rule.app in (None, app) and age_s >= max(rule.older_s, rule.unused_s)


@dataclass(frozen=True, slots=True)
class OpenedDisk:
    """Disk folder that this daemon has locked, with its limits."""

    files: SegmentFiles
    size_bytes: int
    write_bytes_s: int | None = None


def open_disk(
    path: Path, secret: bytes, *, size_bytes: int | None = None, write_bytes_s: int | None = None
) -> OpenedDisk:
    """Open the disk folder `path`.

    Raises ConfigError if the folder cannot be used, or if the package for encryption is not installed.

    Args:
        size_bytes: Maximum size of the folder's files in bytes. None: half of the free space on the file
            system. Existing files in the folder count as free space.
    """
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            _SETTING,
            "a store encrypts the entries that it writes to a disk, but cryptography is not installed",
            "Run: pip install 'cornplug[disk]'",
        )
    files = SegmentFiles(path, secret, setting=_SETTING)
    try:
        if size_bytes is None:
            own = sum(used for _, used in files.list_segments())
            size_bytes = (files.free_bytes() + own) // 2
    except OSError as e:
        files.close()
        raise ConfigError(_SETTING, f"{path}: {e.strerror}", "Use a folder on a local disk.") from e
    if size_bytes < MIN_BYTES:
        files.close()
        raise ConfigError(
            "store.disk_size_bytes", f"{size_bytes} bytes are too few for entries", "Use 1 GiB or more."
        )
    return OpenedDisk(files, size_bytes, write_bytes_s)


def _next_magic(fd: int, offset: int) -> int:
    """Return the offset of the next possible header, or `at + _SKIP_BYTES` if there is no header before that
    offset. Raises OSError."""
    data = os.pread(fd, _SKIP_BYTES, offset)
    found = data.find(MAGIC)
    while found % ALIGN_BYTES and found >= 0:
        found = data.find(MAGIC, found + 1)
    return offset + (found if found >= 0 else _SKIP_BYTES)


def _segment_name(number: int) -> str:
    return f"segment-{number:08d}"


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> int:
    view, done = memoryview(data), 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done:], offset + done)
    return done


def _read_all(fd: int, buffer: memoryview, offset: int) -> memoryview:
    done = 0
    while done < buffer.nbytes:
        size = os.preadv(fd, [buffer[done:]], offset + done)
        if not size:
            raise RecordDamaged("the record ends before its last byte")
        done += size
    return buffer
