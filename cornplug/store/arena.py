"""Shared memory of a store: an unnamed file that exists as long as a process maps it.

It is a sealed memfd, not a file in /dev/shm. Containers have only 64 MiB of /dev/shm by default. A sealed
memfd cannot be truncated by a client, is freed when a daemon is killed, and has no name that another user
could open. The daemon allocates pages *before* it returns reservations, and leaves enough memory for the
host, so that writers never run out of memory.

A table (`WriteFences`) shows which reservations can be written now. The daemon writes the table, and clients
map it read-only. Each reservation has a slot in the table. The slot contains the generation of the reserved
memory as long as writers may write it. The store cannot revoke the mapping of a late writer, which may be
another process than the one that reserved. `view` therefore checks the slot first. A writer that passes the
check can finish its write during the quarantine.

`ArenaAllocator` allocates 64-byte aligned extents of the arena in segregated size classes, and coalesces them
when they are freed. Free extents are in a two-level table (powers of two, with eight steps each, as in TLSF),
so an allocation costs the same with ten or a hundred thousand holes. The allocator computes with offsets and
sizes, and accesses no memory.

    |<-- extent -->|<- free ->|<------ extent ------>|<------ free ------>| end
    0                                                                     end_bytes
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from cornplug.errors import ConfigError, StoreUnavailable
from cornplug.store.base import PayloadLocation

_F_SEAL_FUTURE_WRITE: Final = 0x0010
"""Seal that Linux 5.1 added. The standard library has no constant for it."""
FENCE_SLOTS: Final = 1 << 16
"""Maximum number of open reservations of all clients."""
FENCE_TABLE_BYTES: Final = 8 * FENCE_SLOTS
NO_SLOT: Final = -1
_CGROUPS: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")
MIN_STEP_BYTES: Final = 8 << 20
"""Minimum size in bytes of an allocation. An allocation of this size takes about 2 ms."""
_MFD_NOEXEC_SEAL: Final = 8
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_log = logging.getLogger("cornplug.store")
_REMEDY: Final = "Reduce store.size_bytes (--size), or add memory to this host or container."
ALIGN: Final = 64
_STEP_BITS: Final = 3
_SCAN_LIMIT: Final = 64
"""Maximum number of holes that an allocation examines in its own size class, whose holes may be too small.
Examining more holes would make a batch miss its deadline."""


def create_sealed_memory(name: str, size_bytes: int, *, others_write: bool) -> tuple[int, mmap.mmap]:
    """Create `size_bytes` of zeroed memory. Return its descriptor and this process's writable map.

    No process can truncate the memory. Unless `others_write`, the memory can be written only through this
    map: other processes can map the descriptor only read-only. Linux before 5.1 cannot enforce this, so
    readers verify what they read on any version. Raises OSError if the kernel does not provide the memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    mapped = mmap.mmap(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    if not others_write:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
    return fd, mapped


class WriteFences:
    """The daemon's side of the table of writable reservations. Clients can map the table if `shared` is
    set."""

    def __init__(self, *, shared: bool = False) -> None:
        if shared:
            self.fd, mapped = create_sealed_memory("cornplug-fences", FENCE_TABLE_BYTES, others_write=False)
        else:
            self.fd, mapped = -1, mmap.mmap(-1, FENCE_TABLE_BYTES)
        self._table = memoryview(mapped).cast("Q")
        self._free: list[int] = []
        self._used = 0

    def open_slot(self, generation: int) -> int:
        """Mark this generation as writable and return its slot, or NO_SLOT if all slots are in use."""
        if self._free:
            slot = self._free.pop()
        elif self._used < FENCE_SLOTS:
            slot = self._used
            self._used += 1
        else:
            return NO_SLOT
        self._table[slot] = generation
        return slot

    def free_slot(self, slot: int) -> None:
        """Free the slot, so that no further write to its reservation begins."""
        self._table[slot] = 0
        self._free.append(slot)

    def is_writable(self, location: PayloadLocation) -> bool:
        """Return whether this location is still reserved, and may be written."""
        return _is_writable(self._table, location)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class MappedFences:
    """A client's side of the table of writable reservations."""

    def __init__(self, fd: int) -> None:
        """Map the table. Raises OSError or ValueError if `fd` is not a table of writable reservations."""
        self._table = memoryview(mmap.mmap(fd, FENCE_TABLE_BYTES, prot=mmap.PROT_READ)).cast("Q")

    def is_writable(self, location: PayloadLocation) -> bool:
        """Return whether this location is still reserved, and may be written."""
        return _is_writable(self._table, location)

    def are_writable(self, locations: Sequence[PayloadLocation]) -> list[bool]:
        """Return for each location whether it is still reserved, and may be written."""
        table = self._table
        return [0 <= at.fence < FENCE_SLOTS and table[at.fence] == at.generation for at in locations]


class MemoryLimit(NamedTuple):
    """Memory limit of this host or of a cgroup."""

    total_bytes: int
    available_bytes: int
    """Available memory in bytes. Page cache counts as available, because the kernel can reclaim it."""
    limit_name: str
    """Name of the limit, for messages."""


def host_memory(*, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> MemoryLimit:
    """Return the memory that this process can use now: the minimum over the host and all its cgroups.

    Raises OSError if /proc is not mounted."""
    return min([_host_limit(proc), *_cgroup_limits(proc, cgroups)], key=lambda memory: memory.available_bytes)


def choose_store_size(size_bytes: int | None, *, clamp: bool, memory: MemoryLimit | None = None) -> int:
    """Return the capacity in bytes that a store should use.

    This is `size_bytes`, or a quarter of the free memory if `size_bytes` is None. If there is not enough
    memory, the result is half of the free memory with `clamp`. Without `clamp`, ConfigError is raised for
    store.size_bytes.
    """
    memory = memory or host_memory()
    free = memory.available_bytes
    if size_bytes is None:
        _log.info(
            "store.size_bytes is not set, so this store uses a quarter of the %d MiB that %s has left",
            free >> 20,
            memory.limit_name,
        )
        size_bytes = free // 4
        if size_bytes >= MIN_STEP_BYTES:
            return size_bytes
    if size_bytes <= free - _headroom_bytes(memory):
        return size_bytes
    if clamp and free >= 2 * MIN_STEP_BYTES:
        _log.warning(
            "%s has %d MiB left, too little for a store of %d MiB: this store uses half of what is left. %s",
            memory.limit_name, free >> 20, size_bytes >> 20, _REMEDY,
        )  # fmt: skip
        return free // 2
    problem = f"the store needs {size_bytes >> 20} MiB, but {memory.limit_name} has {free >> 20} MiB left"
    raise ConfigError("store.size_bytes", problem, _REMEDY)


class SharedArena:
    """The daemon's side of the arena. It owns the memory and allocates its pages."""

    def __init__(self, capacity_bytes: int) -> None:
        """Create the memory. Raises ConfigError if the kernel does not provide it."""
        self.id = secrets.token_bytes(16)
        self.capacity_bytes = max(1, capacity_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.backed_bytes = 0
        self._shortage_logged = False
        try:
            self.fd = _create_memfd()
            os.ftruncate(self.fd, self.capacity_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as e:
            problem = f"cannot create {self.capacity_bytes >> 20} MiB of shared memory: {e.strerror}"
            raise ConfigError("store.size_bytes", problem, _REMEDY) from e

    def grow(self, min_bytes: int) -> int:
        """Allocate at least `min_bytes` more bytes. Return the number of allocated bytes, or 0 if there is
        no memory now."""
        left = self.capacity_bytes - self.backed_bytes
        if not 0 < min_bytes <= left:
            return 0
        step = min(max(min_bytes, MIN_STEP_BYTES), left)
        memory = host_memory()
        if memory.available_bytes - step < _headroom_bytes(memory):
            # The kernel would not reject the allocation, but would kill a process for it.
            self._log_shortage(f"{memory.limit_name} has {memory.available_bytes >> 20} MiB left")
            return 0
        try:
            os.posix_fallocate(self.fd, self.backed_bytes, step)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
                raise
            self._log_shortage(e.strerror or "refused")
            return 0
        self.backed_bytes += step
        if self._shortage_logged:
            _log.info("memory is available again, this store grows from %d MiB", self.backed_bytes >> 20)
        self._shortage_logged = False
        return step

    def _log_shortage(self, why: str) -> None:
        if not self._shortage_logged:
            _log.error(
                "out of memory (%s): this store stays at %d MiB of its %d MiB for now. %s",
                why, self.backed_bytes >> 20, self.capacity_bytes >> 20, _REMEDY,
            )  # fmt: skip
        self._shortage_logged = True

    def close(self) -> None:
        os.close(self.fd)


class MappedArena:
    """A client's map of the whole arena. Pages become available as the daemon allocates them."""

    def __init__(self, fd: int, arena_id: bytes, capacity_bytes: int, fences: MappedFences) -> None:
        self.id = arena_id
        self.capacity_bytes = capacity_bytes
        self._map = mmap.mmap(fd, capacity_bytes)
        self._fences = fences

    def view(self, location: PayloadLocation, *, writable: bool) -> memoryview:
        """Return the bytes of a location. The arena stays mapped as long as any returned view exists.

        Raises the same errors as `Store.view`.
        """
        end = location.offset + location.size
        if location.arena_id != self.id or location.offset < 0 or end > self.capacity_bytes:
            raise StoreUnavailable("the location is in another arena", reason="stale_location")
        if writable and not self._fences.is_writable(location):
            raise StoreUnavailable("this reservation has ended", reason="stale_location")
        return self.bytes_at(location.offset, location.size, writable=writable)

    def are_writable(self, locations: Sequence[PayloadLocation]) -> list[bool]:
        """Return for each location whether it is in this arena and still reserved."""
        return [
            at.arena_id == self.id and 0 <= at.offset <= self.capacity_bytes - at.size and reserved
            for at, reserved in zip(locations, self._fences.are_writable(locations), strict=True)
        ]

    def bytes_at(self, offset: int, size: int, *, writable: bool = False) -> memoryview:
        """Return bytes of the arena, without checking which entry they belong to."""
        view = memoryview(self._map)[offset : offset + size]
        return view if writable else view.toreadonly()


def align_up(size_bytes: int) -> int:
    """Return the number of bytes that a payload takes in the arena. This is its size rounded up to a multiple
    of 64, and at least 64."""
    return max(ALIGN, (size_bytes + ALIGN - 1) & -ALIGN)


class ArenaAllocator:
    """Allocator of extents in [0, end_bytes). Sizes are multiples of 64."""

    def __init__(self) -> None:
        self.end_bytes = 0
        self.free_bytes = 0
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        # These are ordered dicts, because finding the first key of a dict takes time for each key that was
        # removed before it.
        self._classes: list[OrderedDict[int, None]] = []
        self._nonempty_classes = 0

    def extend(self, size_bytes: int) -> None:
        """Add `size_bytes` of free memory at the end of the arena. Does nothing for 0."""
        if not size_bytes:
            return
        start = self.end_bytes
        self.end_bytes += size_bytes
        self.free(start, size_bytes)

    def allocate(self, size_bytes: int) -> int | None:
        """Return the offset of an extent of exactly `size_bytes`, or None if no hole is large enough."""
        start = self._find_hole(size_bytes)
        if start is None:
            return None
        hole = self._remove_hole(start)
        if hole > size_bytes:
            self._add_hole(start + size_bytes, hole - size_bytes)
        return start

    def free(self, start: int, size_bytes: int) -> None:
        """Free an extent, and merge it with the holes on both sides."""
        end = start + size_bytes
        if end in self._size_at:
            end += self._remove_hole(end)
        before = self._start_of_end.get(start)
        if before is not None:
            self._remove_hole(before)
            start = before
        self._add_hole(start, end - start)

    def hole_ending_at(self, end: int) -> int:
        """Return the size of the hole that ends at this offset, or 0."""
        start = self._start_of_end.get(end)
        return 0 if start is None else end - start

    def hole_at(self, start: int) -> int:
        """Return the size of the hole that begins at this offset, or 0."""
        return self._size_at.get(start, 0)

    def holes(self) -> list[tuple[int, int]]:
        """Return (offset, size) of all holes, by offset. For tests and diagnosis."""
        return sorted(self._size_at.items())

    def _find_hole(self, size_bytes: int) -> int | None:
        own = _size_class(size_bytes)
        # Any hole of a higher class fits, so no search is needed there.
        higher = self._nonempty_classes >> (own + 1)
        if higher:
            index = own + 1 + (higher & -higher).bit_length() - 1
            return next(iter(self._classes[index]))
        if self._nonempty_classes >> own & 1:
            for _, start in zip(range(_SCAN_LIMIT), self._classes[own], strict=False):
                if self._size_at[start] >= size_bytes:
                    return start
        return None

    def _add_hole(self, start: int, size_bytes: int) -> None:
        index = _size_class(size_bytes)
        while len(self._classes) <= index:
            self._classes.append(OrderedDict())
        self._classes[index][start] = None
        self._nonempty_classes |= 1 << index
        self._size_at[start] = size_bytes
        self._start_of_end[start + size_bytes] = start
        self.free_bytes += size_bytes

    def _remove_hole(self, start: int) -> int:
        size_bytes = self._size_at.pop(start)
        del self._start_of_end[start + size_bytes]
        index = _size_class(size_bytes)
        del self._classes[index][start]
        if not self._classes[index]:
            self._nonempty_classes &= ~(1 << index)
        self.free_bytes -= size_bytes
        return size_bytes


def _is_writable(table: memoryview, location: PayloadLocation) -> bool:
    return 0 <= location.fence < FENCE_SLOTS and table[location.fence] == location.generation


def _host_limit(proc: Path) -> MemoryLimit:
    found = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    total, available = (int(found[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    return MemoryLimit(total, available, "this host's memory")


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[MemoryLimit]:
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # Processes beyond "high" are not killed, but their allocations are slowed down.
            for limit in ("memory.max", "memory.high"):
                yield from _walk_cgroups(cgroups, path, limit, "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _walk_cgroups(cgroups / "memory", path, *names)


def _walk_cgroups(root: Path, path: str, limit: str, usage: str, cache: str) -> Iterator[MemoryLimit]:
    """Yield the limits of a cgroup and of the cgroups that contain it. In a container, `path` may be the
    cgroup's path on the host. Then only the root is visible, which is the container's own cgroup."""
    at = root / path.lstrip("/")
    for group in [at, *at.parents]:
        # "No limit" is the text "max" in version 2, and the largest number of pages in version 1.
        with contextlib.suppress(OSError, ValueError):
            total = int((group / limit).read_text())
            used = int((group / usage).read_text())
            if total < 1 << 60:
                spare = _read_field(group / "memory.stat", cache)
                yield MemoryLimit(total, max(0, total - used + spare), f"the limit of cgroup {group}")
        if group == root:
            return


def _read_field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _headroom_bytes(memory: MemoryLimit) -> int:
    """Return the number of bytes that a store leaves free, so that the kernel does not kill processes."""
    return memory.total_bytes // 20


def _create_memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("cornplug-store", flags | _MFD_NOEXEC_SEAL)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return os.memfd_create("cornplug-store", flags)  # Linux before 6.3


def _size_class(size_bytes: int) -> int:
    units = size_bytes // ALIGN
    power = units.bit_length() - 1
    if power < _STEP_BITS:
        return units
    return ((power - _STEP_BITS + 1) << _STEP_BITS) + (units >> (power - _STEP_BITS)) - (1 << _STEP_BITS)
