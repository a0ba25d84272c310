"""Who moves KV, a slab at a time: a thread where a CPU copies, the engine's own polls where a GPU does."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Final, Protocol

from cornplug.vllm_connector import compat

Job = Generator[None, None, None]
"""Moves a slab between two `yield`s. Its `finally` reports the end, whichever way it ends."""

BURST_S: Final = 0.5
"""An engine that has had work for less than this is expected to be idle soon: copies wait for that."""
STEP_S: Final = 0.010
"""Seconds of copying beside each further step that computes tokens."""
STEP_SHARE: Final = 0.05
"""The same as a share of the step before, so that saves of long prefill steps keep up."""
_PAUSE_S: Final = 0.05
"""Time without a step after which work has begun anew."""
_MOST_FAILURES: Final = 8
"""Jobs that may fail one after the other before no more are begun."""


class StepBudget:
    """Time that copies for which nobody waits may take beside the engine's steps; unbounded before any."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left_s = math.inf
        self._busy_since: float | None = None
        """Start of the first of the steps with tokens that have followed each other since."""
        self._began = self._ended = 0.0
        """Of the last step."""

    def begin_step(self, *, computes: bool) -> None:
        """Set the time that copies may take beside the step that begins now."""
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
        """Note the end of a step's forward pass."""
        self._ended = self._clock()

    def spend(self, seconds: float) -> None:
        """Take the time of a copy."""
        self._left_s -= seconds

    def __bool__(self) -> bool:
        return self._left_s > 0


class KVMover:
    """A thread. Jobs of one urgency run in the order in which they came.

    A job that is not urgent stands aside at its next `yield` while an urgent one is there, and when it has
    used the time that a step leaves it. A daemon thread: a program's last copies are made when it ends
    (`kv/in_process.py`), and threads of the standard library's pools are over by then.
    """

    def __init__(self, enter_thread: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`enter_thread` is called on the thread, before any job."""
        self._enter_thread = enter_thread
        self._thread: threading.Thread | None = None
        self._clock = clock
        self._urgent: deque[Job] = deque()
        self._others: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._budget = StepBudget(clock)
        """Of jobs that are not urgent."""
        self._waiting = 0
        """Threads in `wait`, for which no step holds a job up."""

    def submit(self, job: Job, *, urgent: bool) -> None:
        """Queue a job; after `close` it is dropped."""
        with self._changed:
            if self._closed:
                return
            (self._urgent if urgent else self._others).append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cornplug-kv", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def begin_step(self, *, computes: bool) -> None:
        """Bound the copies beside a step of the engine.

        Jobs that are not urgent finish the slab that they have begun. They go on in a step without tokens,
        and for a bounded time beside each step of an engine that has had work for `BURST_S`.
        """
        with self._changed:
            self._budget.begin_step(computes=computes)
            if self._budget and self._others:
                self._changed.notify_all()

    def end_step(self) -> None:
        """Note the end of a step's forward pass."""
        self._budget.end_step()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether every job was done inside the time."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not (self._urgent or self._others), timeout_s)
            finally:
                self._waiting -= 1

    def close(self) -> None:
        """Let the slab end that is moving, and forget the rest."""
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
        """Wait for work. Returns the queue whose first job is to move a slab; None after `close`."""
        with self._changed:
            while not self._closed:
                may_run_others = bool(self._budget) or self._waiting > 0
                if queue := self._urgent or (self._others if may_run_others else None):
                    return queue
                self._changed.wait()
            return None

    def _slab(self, queue: deque[Job]) -> None:
        """Move one slab of a queue's first job."""
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
        self._failures = 0
        """Jobs that failed one after the other."""

    @property
    def works(self) -> bool:
        """Whether a job may succeed: the last `_MOST_FAILURES` jobs did not all fail."""
        return self._failures < _MOST_FAILURES

    def submit(self, job: PolledJob) -> None:
        """Begin a job's first copies."""
        self._resume(job)

    def poll(self) -> None:
        """Carry on the jobs whose copies have happened."""
        jobs, self._jobs = self._jobs, []
        for job, crossing in jobs:
            try:
                done = crossing.done()
            except Exception as e:  # noqa: BLE001 - whatever nobody foresaw
                self._end(job, e)
                continue
            if done:
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
            try:
                crossing.wait()
            except Exception as e:  # noqa: BLE001 - whatever nobody foresaw
                self._end(job, e)
                continue
            self._resume(job)

    def close(self) -> None:
        """Wait for the copies that are under way, and forget the rest."""
        jobs, self._jobs = self._jobs, []
        for job, crossing in jobs:
            try:
                crossing.wait()
                job.close()
            except Exception as e:  # noqa: BLE001 - whatever nobody foresaw
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
        """End a job whose copies failed: it reports that."""
        self._failed(error)
        try:
            job.close()
        except Exception as e:  # noqa: BLE001 - whatever nobody foresaw
            self._failed(e)

    def _failed(self, error: Exception) -> None:
        """A job has failed: the engine and the other jobs go on. A fault that stays is logged once."""
        self._failures += 1
        if self._failures == 1:
            compat.logger.error("cornplug: copying KV failed", exc_info=error)
        elif self._failures == _MOST_FAILURES:
            compat.logger.warning(
                "cornplug: KV pages are copied through staging memory from now on: %s", error
            )
