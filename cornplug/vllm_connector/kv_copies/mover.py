"""Scheduling of KV copies, a slab at a time: on a thread if a CPU copies, or polled by the engine if a GPU
copies.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Final, Protocol

from cornplug.vllm_connector import compat

Job = Generator[None, None, None]
"""Generator that copies a slab between two `yield`s. Its `finally` reports the end in every case."""

BURST_S: Final = 0.5
"""Seconds of continuous work up to which an engine is expected to be idle soon, so that copies wait."""
STEP_S: Final = 0.010
"""Seconds of copying during each further step that computes tokens."""
STEP_SHARE: Final = 0.05
"""The same as a share of the previous step, so that saves of long prefill steps keep up."""
_PAUSE_S: Final = 0.05
"""Time without a step after which the engine counts as newly busy."""
_MOST_FAILURES: Final = 8
"""Number of consecutive failures after which no more jobs are started."""


class StepBudget:
    """Time budget for non-urgent copies during the engine's steps. Unlimited before the first step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left_s = math.inf
        self._busy_since: float | None = None
        """Start of the first of the consecutive steps with tokens."""
        self._began = self._ended = 0.0
        """Start and end of the last step."""

    def begin_step(self, *, computes: bool) -> None:
        """Set the copy time for the step that begins now."""
        now = self._clock()
        lasted_s, pause_s = self._ended - self._began, now - self._ended
        self._began = self._ended = now
        if not computes:
            self._left_s, self._busy_since = math.inf, None
            return
        if self._busy_since is None or pause_s > _PAUSE_S:
            self._busy_since = now
        busy = now - self._busy_since >= BURST_S
        self._left_s = max(STEP_S, STEP_SHARE * lasted_s) if busy else 0.0

    def end_step(self) -> None:
        """Record the end of a step's forward pass."""
        self._ended = self._clock()

    def spend(self, seconds: float) -> None:
        """Subtract the time of a copy."""
        self._left_s -= seconds

    def __bool__(self) -> bool:
        return self._left_s > 0


class KVMover:
    """A thread that runs copy jobs. Jobs of the same urgency run in order of arrival.

    A job that is not urgent pauses at its next `yield` if an urgent job is queued, and when it has used the
    time budget of a step. The thread is a daemon thread, because a program's last copies run when it ends
    (`kv/copies_in_flight.py`), after the threads of the standard library's pools have ended.
    """

    def __init__(self, enter_thread: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Create a mover. Its thread starts with the first job, and calls `enter_thread` before any job."""
        self._enter_thread = enter_thread
        self._thread: threading.Thread | None = None
        self._clock = clock
        self._urgent: deque[Job] = deque()
        self._others: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._budget = StepBudget(clock)
        """Budget of jobs that are not urgent."""
        self._waiting = 0
        """Number of threads in `wait`, during which steps do not pause jobs."""

    def submit(self, job: Job, *, urgent: bool) -> None:
        """Queue a job. After `close` it is dropped."""
        with self._changed:
            if self._closed:
                return
            (self._urgent if urgent else self._others).append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cornplug-kv", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def begin_step(self, *, computes: bool) -> None:
        """Limit the copies during a step of the engine.

        Jobs that are not urgent finish their current slab. They continue in a step without tokens, and for a
        limited time during each step of an engine that has been busy for `BURST_S`.
        """
        with self._changed:
            self._budget.begin_step(computes=computes)
            if self._budget and self._others:
                self._changed.notify_all()

    def end_step(self) -> None:
        """Record the end of a step's forward pass."""
        self._budget.end_step()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for all jobs, and return whether they finished within the timeout."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not (self._urgent or self._others), timeout_s)
            finally:
                self._waiting -= 1

    def close(self) -> None:
        """Finish the current slab, and drop the remaining jobs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._enter_thread()
        except Exception:  # noqa: BLE001 - torch's and CUDA's; the jobs fail and report it
            compat.logger.exception("cornplug: the thread that copies KV cannot use its device")
        while (queue := self._next_queue()) is not None:
            self._slab(queue)

    def _next_queue(self) -> deque[Job] | None:
        """Wait for work. Returns the queue whose first job should copy a slab, or None after `close`."""
        with self._changed:
            while not self._closed:
                may_run_others = bool(self._budget) or self._waiting > 0
                if queue := self._urgent or (self._others if may_run_others else None):
                    return queue
                self._changed.wait()
            return None

    def _slab(self, queue: deque[Job]) -> None:
        """Copy one slab of a queue's first job."""
        job, over, began = queue[0], True, self._clock()
        try:
            over = next(job, job) is job
        except Exception:  # noqa: BLE001 - the other jobs go on
            compat.logger.exception("cornplug: copying KV failed")
        with self._changed:
            if queue is self._others:
                self._budget.spend(self._clock() - began)
            if over:
                queue.popleft()
                self._changed.notify_all()


class Crossing(Protocol):
    """Copies in flight."""

    def done(self) -> bool:
        """Return whether they have completed."""

    def wait(self) -> None:
        """Wait until they have completed."""


PolledJob = Generator[Crossing, None, None]
"""Generator that starts copies and yields those that must complete before it continues. Its `finally` reports
the end in every case."""


class PolledMover:
    """Jobs that the engine's own thread advances between its steps, without waiting for copies."""

    def __init__(self) -> None:
        self._jobs: list[tuple[PolledJob, Crossing]] = []
        self._failures = 0
        """Number of consecutive failed jobs."""

    @property
    def works(self) -> bool:
        """Whether a job may succeed: the last `_MOST_FAILURES` jobs did not all fail."""
        return self._failures < _MOST_FAILURES

    def submit(self, job: PolledJob) -> None:
        """Start a job's first copies."""
        self._resume(job)

    def poll(self) -> None:
        """Advance the jobs whose copies have completed."""
        jobs, self._jobs = self._jobs, []
        for job, crossing in jobs:
            try:
                done = crossing.done()
            except Exception as e:  # noqa: BLE001 - any error
                self._end(job, e)
                continue
            if done:
                self._resume(job)
            else:
                self._jobs.append((job, crossing))

    def is_idle(self) -> bool:
        """Return whether no job is in progress."""
        return not self._jobs

    def wait(self) -> None:
        """Wait until all jobs have finished."""
        while self._jobs:
            job, crossing = self._jobs.pop(0)
            try:
                crossing.wait()
            except Exception as e:  # noqa: BLE001 - any error
                self._end(job, e)
                continue
            self._resume(job)

    def close(self) -> None:
        """Wait for copies in flight, and drop the remaining jobs."""
        jobs, self._jobs = self._jobs, []
        for job, crossing in jobs:
            try:
                crossing.wait()
                job.close()
            except Exception as e:  # noqa: BLE001 - any error
                self._failed(e)

    def _resume(self, job: PolledJob) -> None:
        try:
            crossing = next(job, None)
        except Exception as e:  # noqa: BLE001 - torch's and CUDA's too; the job has reported its end
            self._failed(e)
            return
        if crossing is not None:
            self._jobs.append((job, crossing))
        else:
            self._failures = 0

    def _end(self, job: PolledJob, error: Exception) -> None:
        """End a job whose copies failed, and let it report the failure."""
        self._failed(error)
        try:
            job.close()
        except Exception as e:  # noqa: BLE001 - any error
            self._failed(e)

    def _failed(self, error: Exception) -> None:
        """Handle a failed job. The engine and other jobs continue, and repeated failures are logged once."""
        self._failures += 1
        if self._failures == 1:
            compat.logger.error("cornplug: copying KV failed", exc_info=error)
        elif self._failures == _MOST_FAILURES:
            compat.logger.warning(
                "cornplug: KV pages are copied through staging memory from now on: %s", error
            )
