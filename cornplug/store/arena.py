"""The shared memory of a pool: an unnamed file that lives exactly as long as someone maps it.

Nothing is left in the file system when a daemon is killed, and a stranger who knows a name
can open nothing. The daemon has the kernel set pages aside *before* it hands out room, so
that no writer ever dies of SIGBUS on a full /dev/shm.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
from pathlib import Path
from typing import Final

from cornplug.errors import ConfigError, StoreUnavailable
from cornplug.store.base import Location

STEP_BYTES: Final = 8 << 20
"""Least that is set aside at once; about 2 ms of the kernel's time."""

_log = logging.getLogger("cornplug.store")

_REMEDY: Final = (
    "Give a smaller store.size_bytes (--size), a store.shm_dir on a larger file system, or, "
    "in a container, more shared memory (docker run --shm-size)."
)


def free_bytes(shm_dir: Path) -> int:
    """Bytes that this user may still take there. Raises ConfigError when it is no folder."""
    try:
        stats = os.statvfs(shm_dir)
    except OSError as e:
        raise ConfigError("store.shm_dir", f"{shm_dir}: {e.strerror}", "Name an existing folder.") from e
    return stats.f_bavail * stats.f_frsize


def fitting_size(size_bytes: int, shm_dir: Path, *, clamp: bool) -> int:
    """The capacity to use: what was asked, if the file system has it free.

    Otherwise half of what is free when `clamp`, else ConfigError naming store.size_bytes.
    """
    free = free_bytes(shm_dir)
    if size_bytes <= free:
        return size_bytes
    if clamp and free >= 2 * STEP_BYTES:
        _log.warning(
            "%s has %d MiB free, less than the %d MiB wanted: this store takes half of that. %s",
            shm_dir, free >> 20, size_bytes >> 20, _REMEDY,
        )  # fmt: skip
        return free // 2
    raise ConfigError(
        "store.size_bytes", f"{size_bytes >> 20} MiB wanted, {shm_dir} has {free >> 20} MiB free", _REMEDY
    )


class Arena:
    """The daemon's side: owns the file and grows what is safe to write."""

    def __init__(self, shm_dir: Path, capacity_bytes: int) -> None:
        self.id = secrets.token_bytes(16)
        self.capacity_bytes = capacity_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self.backed_bytes = 0
        self.exhausted = False
        try:
            self.fd = os.open(shm_dir, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as e:
            problem = f"no unnamed file in {shm_dir}: {e.strerror}"
            raise ConfigError("store.shm_dir", problem, "Name a folder on tmpfs or ext4.") from e
        os.ftruncate(self.fd, self.capacity_bytes)

    def grow(self, want_bytes: int) -> int:
        """Set aside at least `want_bytes` more; how many it was, 0 when there is no more.

        After the first refusal of the file system it asks no more: the store is that small.
        """
        left = self.capacity_bytes - self.backed_bytes
        if self.exhausted or want_bytes > left:
            return 0
        step = min(max(want_bytes, STEP_BYTES), left)
        try:
            os.posix_fallocate(self.fd, self.backed_bytes, step)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
                raise
            self.exhausted = True
            # A failed fallocate may have kept part of its pages; give them back.
            os.ftruncate(self.fd, self.backed_bytes)
            os.ftruncate(self.fd, self.capacity_bytes)
            _log.error(
                "shared memory ran out: this store stays at %d MiB of its %d MiB. %s",
                self.backed_bytes >> 20, self.capacity_bytes >> 20, _REMEDY,
            )  # fmt: skip
            return 0
        self.backed_bytes += step
        return step

    def close(self) -> None:
        os.close(self.fd)


class MappedArena:
    """A client's side: the whole arena mapped; pages appear as the daemon sets them aside."""

    def __init__(self, fd: int, arena_id: bytes, capacity_bytes: int) -> None:
        self.id = arena_id
        self.capacity_bytes = capacity_bytes
        self._map = mmap.mmap(fd, capacity_bytes)

    def view(self, location: Location, *, writable: bool) -> memoryview:
        """The bytes of a location. The mapping lives as long as any view of it.

        Raises StoreUnavailable("stale_location") when the location is not of this arena."""
        end = location.offset + location.size
        if location.arena_id != self.id or location.offset < 0 or end > self.capacity_bytes:
            raise StoreUnavailable("location of another arena", reason="stale_location")
        view = memoryview(self._map)[location.offset : end]
        return view if writable else view.toreadonly()
