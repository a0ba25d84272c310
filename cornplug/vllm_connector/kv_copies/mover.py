"""One thread that moves KV, a slab at a time: loads, which requests wait for, go before saves."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor

from cornplug.vllm_connector import compat

Job = Generator[None, None, None]
"""Moves a slab between two `yield`s. Its `finally` reports the end, whichever way it ends."""


class KVMover:
    """Jobs of one urgency run in the order in which they came; one that is not urgent stands
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


def _log_failure(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        compat.logger.error("cornplug: moving KV failed", exc_info=error)
