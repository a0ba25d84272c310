"""Threads of a tier: one writer and several readers. The daemon's loop does not wait for them.

    loop ──write(work, on_done)──> thread: work() ──fileno() readable──> loop: collect() calls on_done(result)

The threads do reads for which a client waits before background reads. Encryption, decryption and system calls
run without the interpreter's lock, so the loop replies in parallel.

The protocols are the interfaces of the store that its tiers use. `cornplug/store/daemon/` implements them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import PriorityQueue
from typing import Final, Protocol, TypeVar

from cornplug.settings import NamespaceConfig
from cornplug.store.base import PayloadLocation, Reservation, ReserveRefusal, ReserveTerms
from cornplug.store.disk.record_format import RecordDamaged

_READERS: Final = 2
_JOIN_TIMEOUT_S: Final = 5.0
"""Maximum wait for a thread at shutdown, in seconds, in case it hangs in a device."""
T = TypeVar("T")
DiskFailure = OSError | RecordDamaged
Job = Callable[[], None]
_Jobs = PriorityQueue[tuple[int, int, Job | None]]
"""Queue of (rank, number, job). The number keeps jobs of one rank in order. A job of None ends the thread."""
_FOREGROUND, _STOP, _BACKGROUND = range(3)
"""Ranks of jobs. The job with the lowest rank runs first."""
DISK_OWNER: Final = 0
"""Owner number of the disk tier's reservations. Clients have other numbers."""
FAR_OWNER: Final = -1
"""Owner number of the far tier's reservations."""


class DiskWorkers:
    """Threads that do I/O for the daemon's loop. `fileno` is readable when there is a result to collect.

    Args:
        write_bytes_s: Maximum write rate in bytes per second. None: unlimited.
        readers: Number of threads that read.
        name: Name of the threads.
    """

    def __init__(
        self, *, write_bytes_s: int | None = None, readers: int = _READERS, name: str = "cornplug-disk"
    ) -> None:
        self._write_bytes_s = write_bytes_s
        self._results: deque[Job] = deque()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._numbers = itertools.count()
        self._writes: _Jobs = PriorityQueue()
        self._reads: _Jobs = PriorityQueue()
        self._queues = [self._writes] + [self._reads] * readers
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=name, daemon=True)
            for queue in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        return self._ready

    def write(
        self, work: Callable[[], T], on_done: Callable[[T | DiskFailure], None], size_bytes: int = 0
    ) -> None:
        """Run `work`, which writes `size_bytes`, after all earlier writes. `on_done` is called with its
        result or error."""
        pause_s = size_bytes / self._write_bytes_s if self._write_bytes_s else 0.0
        self._writes.put((_FOREGROUND, next(self._numbers), self._make_job(work, on_done, pause_s)))

    def read(self, work: Callable[[], T], on_done: Callable[[T | DiskFailure], None]) -> None:
        """Run `work` in parallel with writes and other reads. `on_done` is called with its result or
        error."""
        self._reads.put((_FOREGROUND, next(self._numbers), self._make_job(work, on_done, 0.0)))

    def read_in_background(
        self, order: int, work: Callable[[], T], on_done: Callable[[T | DiskFailure], None]
    ) -> None:
        """Run `work` when no other read waits, in increasing `order`. `work` is not run if `close` is called
        first."""
        self._reads.put((_BACKGROUND + order, next(self._numbers), self._make_job(work, on_done, 0.0)))

    def _make_job(
        self, work: Callable[[], T], on_done: Callable[[T | DiskFailure], None], pause_s: float
    ) -> Job:
        def job() -> None:
            result: T | DiskFailure
            try:
                result = work()
            except (OSError, RecordDamaged) as e:
                # With its traceback, the error would be part of a reference cycle, and a busy daemon does not
                # collect cycles.
                result = e.with_traceback(None)
            self._results.append(lambda: on_done(result))
            os.eventfd_write(self._ready, 1)
            if pause_s:
                self._closing.wait(pause_s)

        return job

    def collect(self) -> None:
        """Call `on_done` for each available result."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        while self._results:
            self._results.popleft()()

    def wait(self, seconds: float) -> None:
        """Wait until there is a result to collect, for at most `seconds`."""
        poller = select.poll()
        poller.register(self._ready, select.POLLIN)
        poller.poll(seconds * 1e3)

    def lift_rate_limit(self) -> None:
        """Stop limiting the write rate."""
        self._closing.set()

    def close(self, *, within_s: float = _JOIN_TIMEOUT_S) -> None:
        """End the threads after their queued writes and reads. Results are discarded. Waits for each thread
        for at most `within_s` seconds."""
        self.lift_rate_limit()
        for queue in self._queues:
            queue.put((_STOP, next(self._numbers), None))
        for thread in self._threads:
            thread.join(within_s)
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._ready)

    def _run(self, queue: _Jobs) -> None:
        while (job := queue.get()[2]) is not None:
            job()


class TieredEntry(Protocol):
    """Entry in memory."""

    @property
    def key(self) -> bytes: ...
    @property
    def meta(self) -> bytes: ...
    @property
    def app(self) -> str: ...
    @property
    def location(self) -> PayloadLocation: ...
    @property
    def cost_s(self) -> float: ...
    @property
    def written_s(self) -> float:
        """Time at which the entry was written, on the monotonic clock."""

    @property
    def visible(self) -> bool:
        """Whether the entry is stored. This becomes False before the entry's memory can be reused."""


class TieredIndex(Protocol):
    """Index of the entries in memory."""

    def find(self, key: bytes) -> TieredEntry | None:
        """Return an entry, or None."""

    def reserve(
        self,
        owner: int,
        entries: Sequence[tuple[bytes, int]],
        terms: ReserveTerms,
        *,
        now_s: float,
        is_promotion: bool = False,
    ) -> list[Reservation | ReserveRefusal]:
        """Reserve memory for each (key, size), or return the reason why there is no memory.

        Args:
            is_promotion: Whether the entries are on disk or in a far store.
        """

    def commit(self, owner: int, token: int, meta: bytes, *, age_s: float = 0.0) -> bool:
        """Publish an entry that was written `age_s` seconds ago."""

    def release(self, owner: int, tokens: Sequence[int], *, now_s: float) -> None:
        """Release reservations."""


class NamespaceRules(Protocol):
    """Rules of the namespaces."""

    def namespace_of(self, app: str) -> str:
        """Return the namespace of an app."""

    @property
    def names(self) -> Sequence[str]:
        """Names of all namespaces."""

    @property
    def has_guarantees(self) -> bool:
        """Whether a namespace is pinned or has a share."""

    def rules_of(self, app: str) -> NamespaceConfig:
        """Return the rules of an app's namespace."""

    def ttl_s(self, app: str) -> float | None:
        """Return the time to live of an app's entries, or None."""


class DiskMarks(Protocol):
    """Marks that show clients which entries are on disk only."""

    def show_on_disk(self, key: bytes) -> None:
        """Mark an entry as on disk only."""

    def hide_on_disk(self, key: bytes) -> None:
        """Remove the mark of an entry."""


class EntryMemory(Protocol):
    """Memory of entries and reservations."""

    def view(self, location: PayloadLocation) -> memoryview:
        """Return a writable view of a location."""

    def may_write(self, location: PayloadLocation) -> bool:
        """Return whether this location is still reserved."""


@dataclass(frozen=True, slots=True)
class MemoryTier:
    """Parts of the daemon that the disk tier and the far tier use."""

    index: TieredIndex
    memory: EntryMemory
    rules: NamespaceRules
    marks: DiskMarks
