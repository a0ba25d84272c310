"""Host memory (the store's pages or embeddings) that is registered with the device for direct access. The
memory is registered one range at a time.

A store's memory is one mapping. The daemon allocates the mapping's memory pages as needed, and keeps enough
memory free for the host. Registration makes the kernel allocate memory for every address. Therefore the
registered range must not extend beyond the locations that the store has returned. Registration takes about
as long as touching each memory page once, so a separate thread does it. KV pages in memory that is not yet
registered are copied through staging memory.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from cornplug.errors import StoreUnavailable
from cornplug.vllm_connector import compat

MIN_BYTES: Final = 64 << 20
"""Minimum number of bytes to register at a time. A new store grows by only one KV page at a time."""
MAX_BYTES: Final = 128 << 20
"""Maximum number of bytes to register at a time. Registration holds locks of the driver and of the process's
memory, for which the engine's kernel launches wait."""


class _Region:
    """Mapped memory of one store arena, and the part of it that is registered with the device."""

    def __init__(self, arena_id: bytes, memory: memoryview) -> None:
        self.arena_id = arena_id
        self.memory = memory
        """Mapping of the arena. This reference keeps the mapping alive."""
        self.address: int = np.frombuffer(memory, np.uint8).ctypes.data
        self.requested_end = 0
        """Offset up to which registration was requested: the highest end offset of all queried locations."""
        self.ends = [0]
        """End offsets of the registered ranges, after an initial 0. Each range begins at the end of the
        previous range."""
        self.sorted_ends = np.zeros(0, np.int64)
        """`ends` as an array. The engine's thread updates it."""
        self.has_failed = False
        self.is_registering = False


class ArenaMapper(Protocol):
    """Object that maps arenas, such as a `Store`."""

    def arena_memory(self, arena_id: bytes) -> memoryview | None:
        """Return the mapped memory of an arena, or None, as `Store.arena_memory` does."""


class RegisteredMemory:
    """Memory of the store, or of embedding rows, that one rank registers with its device. The engine's thread
    queries it, and a separate thread registers memory.

    Args:
        register: registers (address, number of bytes) with the device, and returns whether it succeeded.
        unregister: unregisters the range that begins at this address.
        enter_thread: sets the device of the registering thread.
        min_bytes, max_bytes: minimum and maximum number of bytes to register at a time.
    """

    def __init__(
        self,
        store: ArenaMapper,
        register: Callable[[int, int], bool],
        unregister: Callable[[int], None],
        enter_thread: Callable[[], None],
        *,
        min_bytes: int = MIN_BYTES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._store = store
        self._min_bytes, self._max_bytes = min_bytes, max_bytes
        self._register, self._unregister = register, unregister
        self._thread = ThreadPoolExecutor(1, "cornplug-register", initializer=enter_thread)
        self._region: _Region | None = None
        self._previous_regions: list[_Region] = []
        """Regions of previous stores that are still to be unregistered."""
        self._idle_checks: list[Callable[[], bool]] = []
        self._closed = False

    def can_access(self, arena_id: bytes, end: int) -> bool:
        """Return whether the device can directly access the bytes of this arena up to offset `end`. If not,
        request the registration of these bytes."""
        region = self._region
        if region is None or region.arena_id != arena_id:
            memory = self._store.arena_memory(arena_id)
            if memory is None:
                return False
            if region is not None:
                self._previous_regions.append(region)
            region = self._region = _Region(arena_id, memory)
        if end <= region.ends[-1]:
            return True
        region.requested_end = max(region.requested_end, end)
        if not (region.is_registering or region.has_failed or self._closed) and self._next_end(region):
            region.is_registering = True
            self._thread.submit(self._extend, region).add_done_callback(_log_failure)
        return False

    def registered_end(self, arena_id: bytes) -> int:
        """Return the end offset of the bytes of this arena that the device can directly access."""
        region = self._region
        return region.ends[-1] if region is not None and region.arena_id == arena_id else 0

    def split_ranges(self, arena_id: bytes, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Split byte ranges at the boundaries of registered ranges, as `byte_ranges` does.

        `ranges` has rows of (place, offset in the arena, size in bytes), where `place` increases by a byte
        per byte. Returns rows of (place, address, size in bytes). Raises StoreUnavailable if the device
        cannot (or can no longer) access all bytes directly.
        """
        starts = ranges[:, 1]
        stops = starts + ranges[:, 2]
        region = self._find_region(arena_id, stops.max().item())
        rows = ranges.copy()
        rows[:, 1] += region.address
        if len(region.ends) == 2:  # All memory is one registered range.
            return rows
        if len(region.ends) != len(region.sorted_ends):
            region.sorted_ends = np.array(region.ends)
        ends = region.sorted_ends
        crossing = ends.searchsorted(starts, "right") != ends.searchsorted(stops - 1, "right")
        if not crossing.any():
            return rows
        found = [rows[~crossing]]
        for place, offset, size in ranges[crossing].tolist():
            parts = np.array(self.byte_ranges(arena_id, offset, size), np.int64)
            begins = place + parts[:, 0] - parts[0, 0]
            found.append(np.column_stack((begins, parts)))
        return np.concatenate(found)

    def byte_ranges(self, arena_id: bytes, offset: int, size: int) -> list[tuple[int, int]]:
        """Split the `size` bytes at `offset` into (address, number of bytes) at the boundaries of registered
        ranges, which a single copy must not cross.

        Raises StoreUnavailable if the device cannot (or can no longer) access these bytes directly.
        """
        region = self._find_region(arena_id, offset + size)
        found, at, ends = [], offset, region.ends
        while at < offset + size:
            stop = min(offset + size, ends[bisect_right(ends, at)])
            found.append((region.address + at, stop - at))
            at = stop
        return found

    def _find_region(self, arena_id: bytes, end: int) -> _Region:
        region = self._region
        if region is None or region.arena_id != arena_id or end > region.ends[-1]:
            raise StoreUnavailable("the location is in another arena", reason="stale_location")
        return region

    def add_user(self, is_idle: Callable[[], bool]) -> None:
        """Add a user of the registered memory. `is_idle` returns whether the user has no copy in flight."""
        self._idle_checks.append(is_idle)

    def unregister_previous(self) -> None:
        """Unregister the memory of previous stores, unless a user has a copy in flight."""
        if self._previous_regions and all(is_idle() for is_idle in self._idle_checks):
            while self._previous_regions:
                self._thread.submit(self._unregister_region, self._previous_regions.pop()).add_done_callback(
                    _log_failure
                )

    def remove_user(self, is_idle: Callable[[], bool]) -> None:
        """Remove a user of the registered memory, after the user's copies have ended. After the last user has
        left, all memory is unregistered."""
        self._idle_checks = [one for one in self._idle_checks if one != is_idle]
        if self._idle_checks or self._closed:
            return
        self._closed = True
        if self._region is not None:
            self._previous_regions.append(self._region)
            self._region = None
        self.unregister_previous()
        self._thread.shutdown(wait=True)

    # -- the registering thread -------------------------------------------------------------------

    def _extend(self, region: _Region) -> None:
        try:
            while not self._closed and (end := self._next_end(region)):
                start = region.ends[-1]
                if not self._register(region.address + start, end - start):
                    region.has_failed = True
                    compat.logger.warning(
                        "cornplug: the device can access only the first %d MiB of shared memory directly; "
                        "copies beyond that use other host memory, which is slower",
                        start >> 20,
                    )
                    return
                region.ends.append(end)
        finally:
            region.is_registering = False

    def _next_end(self, region: _Region) -> int:
        """Return the end offset of the next range to register, or 0 if the range is smaller than the
        minimum."""
        start, wanted = region.ends[-1], region.requested_end // mmap.PAGESIZE * mmap.PAGESIZE
        return min(wanted, start + self._max_bytes) if wanted - start >= self._min_bytes else 0

    def _unregister_region(self, region: _Region) -> None:
        for start in reversed(region.ends[:-1]):
            self._unregister(region.address + start)


def _log_failure(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        compat.logger.error("cornplug: could not register memory with the device", exc_info=error)
