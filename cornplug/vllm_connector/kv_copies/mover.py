"""Who moves KV, a slab at a time: a thread where a CPU copies, the engine's own polls where a GPU does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from cornplug.vllm_connector import compat

Job = Generator[None, None, None]
"""Moves a slab between two `yield`s. Its `finally` reports the end, whichever way it ends."""


class KVMover:
    """A thread. Jobs of one urgency run in the order in which they came; one that is not urgent stands
    aside at its next `yield` while an urgent one is there."""

    def __init__(self, enter_thread: Callable[[], None]) -> None:
        """`enter_thread` is called on the thread, before any job."""
        self._thread = ThreadPoolExecutor(1, "cornplug-kv", initializer=enter_thread)
        self._urgent: deque[Job] = deque()
        self._others: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, job: Job, *, urgent: bool) -> None:
        """Queue a job; after `close` it is dropped."""
        with self._changed:
            if self._closed:
                return
            (self._urgent if urgent else self._others).append(job)
            self._one_more()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether every job was done inside the time."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._urgent or self._others), timeout_s)

    def close(self) -> None:
        """Let the slab end that is moving, and forget the rest."""
        with self._changed:
            self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _one_more(self) -> None:
        # As many slabs are under way as there are jobs: each ends its job or asks for one more.
        self._thread.submit(self._slab).add_done_callback(_log_failure)

    def _slab(self) -> None:
        """Move one slab of the job that is to go first."""
        with self._changed:
            queue = self._urgent or self._others
            job = queue[0]
        over = True
        try:
            over = next(job, job) is job
        finally:
            with self._changed:
                if over:
                    queue.popleft()
                    self._changed.notify_all()
                elif not self._closed:
                    self._one_more()


class Crossing(Protocol):
    """Copies that are under way."""

    def done(self) -> bool:
        """Whether they have happened."""

    def wait(self) -> None:
        """Wait until they have happened."""


PolledJob = Generator[Crossing, None, None]
"""Begins copies and yields those that are to have happened before it goes on. Its `finally` reports the end,
whichever way it ends."""


class PolledMover:
    """Jobs that the engine's own thread carries on between its steps. They wait for no copy."""

    def __init__(self) -> None:
        self._jobs: list[tuple[PolledJob, Crossing]] = []

    def submit(self, job: PolledJob) -> None:
        """Begin a job's first copies."""
        self._resume(job)

    def poll(self) -> None:
        """Carry on the jobs whose copies have happened."""
        jobs, self._jobs = self._jobs, []
        for job, crossing in jobs:
            if crossing.done():
                self._resume(job)
            else:
                self._jobs.append((job, crossing))

    def is_idle(self) -> bool:
        """Whether no job is under way."""
        return not self._jobs

    def wait(self) -> None:
        """Wait until every job is done."""
        while self._jobs:
            job, crossing = self._jobs.pop(0)
            crossing.wait()
            self._resume(job)

    def close(self) -> None:
        """Wait for the copies that are under way, and forget the rest."""
        jobs, self._jobs = self._jobs, []
        for job, crossing in jobs:
            crossing.wait()
            job.close()

    def _resume(self, job: PolledJob) -> None:
        try:
            crossing = next(job, None)
        except RuntimeError:  # torch's and CUDA's; the job has reported its end
            compat.logger.exception("cornplug: moving KV failed")
            return
        if crossing is not None:
            self._jobs.append((job, crossing))


def _log_failure(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        compat.logger.error("cornplug: moving KV failed", exc_info=error)
