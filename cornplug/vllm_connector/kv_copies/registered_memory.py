"""Memory of the store or of embeddings that the device can access directly, registered incrementally.

A store's memory is one mapping. The daemon allocates its pages as needed, and keeps enough memory free for
the host. Registration makes the kernel allocate a page for every address, so it must not go beyond the
locations that the store has returned. It takes about as long as touching each page once, so a thread does it.
Memory that is not registered yet is copied through staging memory.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np

from cornplug.errors import StoreUnavailable
from cornplug.store.base import MappedStore, Store
from cornplug.vllm_connector import compat

LEAST_BYTES: Final = 64 << 20
"""Minimum size of a registration, because a new store grows by one KV page at a time."""
MOST_BYTES: Final = 1 << 30
"""Maximum size of a registration, so that the first pages can be used soon."""


class _Region:
    """Memory of one arena."""

    def __init__(self, arena_id: bytes, memory: memoryview) -> None:
        self.arena_id = arena_id
        self.memory = memory
        """Keeps the mapping alive."""
        self.address: int = np.frombuffer(memory, np.uint8).ctypes.data
        self.wanted = 0
        """End of the last requested location."""
        self.ends = [0]
        """Ends of the registered ranges. Each begins where the previous one ends."""
        self.failed = False
        self.busy = False


class RegisteredMemory:
    """Registered memory of one rank. The engine's thread queries it, and a separate thread registers memory.

    Args:
        register: registers (address, bytes) of this process with the device, and returns whether that worked.
        unregister: unregisters an address.
        enter_thread: sets the device of the thread.
        least_bytes, most_bytes: minimum and maximum size of a registration.
    """

    def __init__(
        self,
        store: Store | MappedStore,
        register: Callable[[int, int], bool],
        unregister: Callable[[int], None],
        enter_thread: Callable[[], None],
        *,
        least_bytes: int = LEAST_BYTES,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._store = store
        self._least_bytes, self._most_bytes = least_bytes, most_bytes
        self._register, self._unregister = register, unregister
        self._thread = ThreadPoolExecutor(1, "cornplug-register", initializer=enter_thread)
        self._region: _Region | None = None
        self._left: list[_Region] = []
        """Regions of stores that have ended."""
        self._users: list[Callable[[], bool]] = []
        self._closed = False

    def reaches(self, arena_id: bytes, end: int) -> bool:
        """Return whether the device can access the bytes of this arena up to `end`. If not, their
        registration is requested."""
        region = self._region
        if region is None or region.arena_id != arena_id:
            memory = self._store.mapped(arena_id) if isinstance(self._store, MappedStore) else None
            if memory is None:
                return False
            if region is not None:
                self._left.append(region)
            region = self._region = _Region(arena_id, memory)
        if end <= region.ends[-1]:
            return True
        region.wanted = max(region.wanted, end)
        if not (region.busy or region.failed or self._closed) and self._next_end(region):
            region.busy = True
            self._thread.submit(self._extend, region).add_done_callback(_log_failure)
        return False

    def runs(self, arena_id: bytes, offset: int, size: int) -> list[tuple[int, int]]:
        """Return (address, bytes) of the registered ranges that contain these bytes. No copy may cross two
        ranges.

        Raises StoreUnavailable for bytes for which `reaches` is false, or no longer true.
        """
        region = self._region
        if region is None or region.arena_id != arena_id or offset + size > region.ends[-1]:
            raise StoreUnavailable("the location is in another arena", reason="stale_location")
        found, at, ends = [], offset, region.ends
        while at < offset + size:
            stop = min(offset + size, ends[bisect_right(ends, at)])
            found.append((region.address + at, stop - at))
            at = stop
        return found

    def join(self, is_idle: Callable[[], bool]) -> None:
        """Add a user, which reports whether it has no copy in flight."""
        self._users.append(is_idle)

    def forget_ended(self) -> None:
        """Unregister the memory of stores that have ended, unless a copy is in flight."""
        if self._left and all(is_idle() for is_idle in self._users):
            while self._left:
                self._thread.submit(self._undo, self._left.pop()).add_done_callback(_log_failure)

    def leave(self, is_idle: Callable[[], bool]) -> None:
        """Remove a user whose copies have ended. The last user unregisters everything."""
        self._users = [one for one in self._users if one != is_idle]
        if self._users or self._closed:
            return
        self._closed = True
        if self._region is not None:
            self._left.append(self._region)
            self._region = None
        self.forget_ended()
        self._thread.shutdown(wait=True)

    # -- its thread -------------------------------------------------------------------------------

    def _extend(self, region: _Region) -> None:
        try:
            while not self._closed and (end := self._next_end(region)):
                start = region.ends[-1]
                if not self._register(region.address + start, end - start):
                    region.failed = True
                    compat.logger.warning(
                        "cornplug: the device can access only the first %d MiB of shared memory directly; "
                        "copies beyond that use other host memory, which is slower",
                        start >> 20,
                    )
                    return
                region.ends.append(end)
        finally:
            region.busy = False

    def _next_end(self, region: _Region) -> int:
        """Return the end of the next range to register, or 0 if it is too early for one."""
        start, wanted = region.ends[-1], region.wanted // mmap.PAGESIZE * mmap.PAGESIZE
        return min(wanted, start + self._most_bytes) if wanted - start >= self._least_bytes else 0

    def _undo(self, region: _Region) -> None:
        for start in reversed(region.ends[:-1]):
            self._unregister(region.address + start)


def _log_failure(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        compat.logger.error("cornplug: could not register memory with the device", exc_info=error)
