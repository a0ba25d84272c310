"""Thread that allocates memory before the index needs it.

The kernel needs about 2 ms to allocate 8 MiB. During this time, the thread does not hold the interpreter's
lock, so the daemon can reply to requests.

    server ──request_growth(target)──> thread: SharedArena.grow, step by step ──fileno() readable──> server:
    collect()
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Final

from cornplug.store.arena import SharedArena
from cornplug.store.daemon.placement import EntryPlacement

HEADROOM_BYTES: Final = 64 << 20
"""Bytes that are kept allocated beyond the memory in use. A sixteenth of the store is kept if that is
more."""
_MAX_HEADROOM_BYTES: Final = 1 << 30
_GROW_BY_BYTES: Final = 1 << 20
_MAX_STEP_BYTES: Final = 32 << 20
RETRY_S: Final = 5.0
"""Time in seconds until the next attempt after an allocation failed."""

_log = logging.getLogger("cornplug.store")


class ArenaGrowth:
    """Thread that allocates the arena's memory, so that the daemon's loop does not wait for the kernel.
    `fileno` is readable when `collect` has new memory to report."""

    def __init__(self, arena: SharedArena) -> None:
        self._arena = arena
        self._headroom_bytes = max(HEADROOM_BYTES, min(_MAX_HEADROOM_BYTES, arena.capacity_bytes // 16))
        self._changed = threading.Condition()
        self._target_bytes = self._grown_bytes = 0
        self._stop = False
        self.exhausted = False
        """Whether the last attempt found no memory."""
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="cornplug-growth", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._ready

    def allocate_initial(self) -> int:
        """Allocate memory for the first clients now, and return its size in bytes."""
        return self._arena.grow(min(self._arena.capacity_bytes, HEADROOM_BYTES))

    def grow(self, missing_bytes: int) -> int | None:
        """Return None if the index should wait for memory that the thread allocates, or 0 if it should evict
        entries because the host has no memory."""
        return 0 if self.exhausted else None

    def keep_headroom(self, placement: EntryPlacement) -> None:
        """Start to grow the arena if it has too little memory for new entries."""
        target = max(
            placement.used_bytes + self._headroom_bytes, placement.end_bytes + placement.shortfall_bytes
        )
        self.request_growth(min(self._arena.capacity_bytes, -(-target // _GROW_BY_BYTES) * _GROW_BY_BYTES))

    def request_growth(self, target_bytes: int) -> None:
        """Let the thread grow the arena to `target_bytes`, and return immediately."""
        with self._changed:
            if target_bytes > self._target_bytes:
                self._target_bytes = target_bytes
                self._changed.notify()

    def collect(self) -> int:
        """Return the number of bytes that were allocated since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        with self._changed:
            made, self._grown_bytes = self._grown_bytes, 0
        return made

    def close(self) -> None:
        """End the thread after its current step."""
        with self._changed:
            self._stop = True
            self._changed.notify()
        self._thread.join()
        os.close(self._ready)

    def _run(self) -> None:
        while (step := self._next_step()) is not None:
            try:
                made = self._arena.grow(step)
            except OSError as e:
                _log.error("no memory for the store: %s", e)
                made = 0
            with self._changed:
                self._grown_bytes += made
                self.exhausted = not made
            os.eventfd_write(self._ready, 1)

    def _next_step(self) -> int | None:
        """Wait until memory is wanted and return the number of bytes to allocate, or None after `close`."""
        with self._changed:
            if self.exhausted:
                self._changed.wait_for(lambda: self._stop, timeout=RETRY_S)
            self._changed.wait_for(lambda: self._stop or self._target_bytes > self._arena.backed_bytes)
            missing = self._target_bytes - self._arena.backed_bytes
            return None if self._stop else min(missing, _MAX_STEP_BYTES)
