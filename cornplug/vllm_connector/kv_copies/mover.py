"""Runs KV copies, a slab (several pages) at a time.

On a CPU, a separate thread runs the copies. On a GPU, the engine's thread starts asynchronous copies and
polls them.
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
"""Copy job: a generator that copies one slab between two `yield`s. Its `finally` block always reports the end
of the job."""

BURST_S: Final = 0.5
"""Seconds after the engine becomes busy during which non-urgent copies wait. The engine may be idle again
before the end of this time."""
STEP_S: Final = 0.010
"""Minimum seconds for non-urgent copies in each step with tokens, if the engine has been busy for longer than
`BURST_S`."""
STEP_SHARE: Final = 0.05
"""Fraction of the previous step's duration that non-urgent copies may use, if this is more than `STEP_S`.
Saves thus keep up with long prefill steps."""
_MIN_PAUSE_S: Final = 0.05
"""Minimum seconds between two steps after which the engine counts as newly busy."""
_MAX_FAILURES: Final = 8
"""Number of consecutive failed jobs after which no more jobs are started."""


class StepBudget:
    """Time budget for non-urgent copies during the engine's steps. The budget is unlimited before the first
    step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left_s = math.inf
        self._busy_since: float | None = None
        """Time when the current series of steps with tokens began. None if the last step had no tokens."""
        self._began_s = self._ended_s = 0.0
        """`_began_s` and `_ended_s` are the times when the last step began and ended."""

    def begin_step(self, *, computes: bool) -> None:
        """Set the time budget for the step that begins now. `computes` is whether the step computes
        tokens."""
        now = self._clock()
        lasted_s, pause_s = self._ended_s - self._began_s, now - self._ended_s
        self._began_s = self._ended_s = now
        if not computes:
            self._left_s, self._busy_since = math.inf, None
            return
        if self._busy_since is None or pause_s > _MIN_PAUSE_S:
            self._busy_since = now
        busy = now - self._busy_since >= BURST_S
        self._left_s = max(STEP_S, STEP_SHARE * lasted_s) if busy else 0.0

    def end_step(self) -> None:
        """Record the end of a step's forward pass."""
        self._ended_s = self._clock()

    def spend(self, seconds: float) -> None:
        """Subtract the time of a copy from the budget."""
        self._left_s -= seconds

    def __bool__(self) -> bool:
        return self._left_s > 0


class KVMover:
    """Runs copy jobs on a separate thread. Jobs of the same urgency run in the order in which they were
    queued.

    A non-urgent job pauses at its next `yield` while an urgent job is queued, and when the step's time budget
    is used up. The thread is a daemon thread, because a program's last copies run when the program ends
    (`kv/pauses.py`). The threads of the standard library's pools have ended by then.
    """

    def __init__(self, enter_thread: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Create a mover. Its thread starts with the first job, and calls `enter_thread` before any job."""
        self._enter_thread = enter_thread
        self._thread: threading.Thread | None = None
        self._clock = clock
        self._urgent: deque[Job] = deque()
        self._background: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._budget = StepBudget(clock)
        """Time budget for non-urgent jobs during steps."""
        self._waiting = 0
        """Number of threads that are in `wait`. While a thread is in `wait`, steps do not pause jobs."""

    def submit(self, job: Job, *, urgent: bool) -> None:
        """Queue a copy job. After `close`, the job is dropped without running."""
        with self._changed:
            if self._closed:
                return
            (self._urgent if urgent else self._background).append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cornplug-kv", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def begin_step(self, *, computes: bool) -> None:
        """Limit the time for non-urgent copies during the engine's step that begins now.

        Non-urgent jobs first finish their current slab. They then continue in a step without tokens. If the
        engine has been busy for `BURST_S`, they also continue for a limited time in each step.
        """
        with self._changed:
            self._budget.begin_step(computes=computes)
            if self._budget and self._background:
                self._changed.notify_all()

    def end_step(self) -> None:
        """Record the end of a step's forward pass."""
        self._budget.end_step()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for all queued jobs, and return whether they finished within the timeout."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not (self._urgent or self._background), timeout_s)
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
        except Exception:  # noqa: BLE001 - torch and CUDA errors; the jobs then fail and report them
            compat.logger.exception("cornplug: the thread that copies KV cannot use its device")
        while (queue := self._next_queue()) is not None:
            self._copy_slab(queue)

    def _next_queue(self) -> deque[Job] | None:
        """Wait until a job may run. Return the queue whose first job should copy its next slab, or None after
        `close`."""
        with self._changed:
            while not self._closed:
                may_run_others = bool(self._budget) or self._waiting > 0
                if queue := self._urgent or (self._background if may_run_others else None):
                    return queue
                self._changed.wait()
            return None

    def _copy_slab(self, queue: deque[Job]) -> None:
        """Let the first job in `queue` copy one slab. Remove the job if it has ended."""
        job, over, began = queue[0], True, self._clock()
        try:
            over = next(job, job) is job
        except Exception:  # noqa: BLE001 - any error; the other jobs continue
            compat.logger.exception("cornplug: copying KV failed, so some pages were not loaded or saved")
        with self._changed:
            if queue is self._background:
                self._budget.spend(self._clock() - began)
            if over:
                queue.popleft()
                self._changed.notify_all()


class Transfer(Protocol):
    """Asynchronous copies for whose completion a `PolledJob` waits."""

    def is_done(self) -> bool:
        """Return whether the copies have completed."""

    def wait(self) -> None:
        """Wait until the copies have completed."""


PolledJob = Generator[Transfer, None, None]
"""Copy job: a generator that starts copies, and yields the copies that must complete before it continues.
Its `finally` block always reports the end of the job."""


class PolledMover:
    """Runs copy jobs on the engine's own thread. The thread resumes the jobs between its steps, and does not
    wait for copies."""

    def __init__(self) -> None:
        self._jobs: list[tuple[PolledJob, Transfer]] = []
        self._failures = 0
        """Number of consecutive failed jobs."""

    @property
    def is_healthy(self) -> bool:
        """Whether new jobs are likely to succeed. False after `_MAX_FAILURES` consecutive failures."""
        return self._failures < _MAX_FAILURES

    def submit(self, job: PolledJob) -> None:
        """Start a job, and run it until it yields its first copies."""
        self._resume(job)

    def poll(self) -> None:
        """Resume the jobs whose copies have completed."""
        jobs, self._jobs = self._jobs, []
        for job, crossing in jobs:
            try:
                done = crossing.is_done()
            except Exception as e:  # noqa: BLE001 - any error
                self._end_failed_job(job, e)
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
                self._end_failed_job(job, e)
                continue
            self._resume(job)

    def close(self) -> None:
        """Wait for copies in flight, and end all jobs without starting further copies."""
        jobs, self._jobs = self._jobs, []
        for job, crossing in jobs:
            try:
                crossing.wait()
                job.close()
            except Exception as e:  # noqa: BLE001 - any error
                self._record_failure(e)

    def _resume(self, job: PolledJob) -> None:
        try:
            crossing = next(job, None)
        except Exception as e:  # noqa: BLE001 - any error; the job has already reported its end
            self._record_failure(e)
            return
        if crossing is not None:
            self._jobs.append((job, crossing))
        else:
            self._failures = 0

    def _end_failed_job(self, job: PolledJob, error: Exception) -> None:
        """End a job whose copies failed, and let it report the failure."""
        self._record_failure(error)
        try:
            job.close()
        except Exception as e:  # noqa: BLE001 - any error
            self._record_failure(e)

    def _record_failure(self, error: Exception) -> None:
        """Handle a failed job. The engine and other jobs continue, and repeated failures are logged once."""
        self._failures += 1
        if self._failures == 1:
            compat.logger.error(
                "cornplug: copying KV failed, so some pages were not loaded or saved", exc_info=error
            )
        elif self._failures == _MAX_FAILURES:
            compat.logger.warning(
                "cornplug: KV pages are copied through staging memory from now on: %s", error
            )
