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
from functools import partial
from typing import Final, Literal, Protocol

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
MIN_STEP_BYTES: Final = 64 << 20
"""Minimum bytes that a GPU may start to copy in each step, over both directions."""
IDLE_STEP_BYTES: Final = 512 << 20
"""Bytes that a GPU may start to copy in a step without tokens, and in the first step after a pause. To start
a slab of 32 MiB takes the engine's thread about 0.2 ms."""
THREAD_BYTES_PER_S: Final = 10e9
"""Bytes per second of a long step that may be started beyond `IDLE_STEP_BYTES`, about 6 % of the engine
thread's time."""
_MAX_STEP_S: Final = 0.25
"""Interval between two steps above which the engine may have been idle in between. Two such intervals in a
row are long steps."""
_MIN_SLAB_BYTES: Final = 8 << 20
"""Minimum bytes that the budget counts for a slab, because small slabs also take the engine's thread time."""


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


Direction = Literal["load", "save"]


class Transfer(Protocol):
    """Asynchronous copies for whose completion a `PolledJob` waits."""

    def is_done(self) -> bool:
        """Return whether the copies have completed."""

    def wait(self) -> None:
        """Wait until the copies have completed."""


class ByteBudget:
    """Number of bytes that a GPU may start to copy in each step, and may have in flight, over all cache
    groups and both directions. Used by the engine's thread.

    The limit is what the bus copies in one step, so that copies neither wait for the next step nor delay
    those of a request that arrives during it. It also bounds the time that the engine's thread spends on
    starting copies.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a budget for a bus with this bandwidth."""
        self._bytes_per_s, self._clock = bytes_per_s, clock
        self._limit = IDLE_STEP_BYTES
        self._started: dict[Direction, int] = {"load": 0, "save": 0}
        """Bytes whose copies started in the current step."""
        self._in_flight: dict[Direction, int] = {"load": 0, "save": 0}
        self._began_s: float | None = None
        """Time when the current step began, or None if it computes no tokens."""
        self._is_long = False

    def begin_step(self, *, computes: bool) -> None:
        """Set the budget of the step that begins now. `computes` is whether the step computes tokens."""
        now, previous_s = self._clock(), self._began_s
        self._began_s = now if computes else None
        self._started = {"load": 0, "save": 0}
        step_s = now - previous_s if computes and previous_s is not None else math.inf
        was_long, self._is_long = self._is_long, _MAX_STEP_S < step_s < math.inf
        if step_s > _MAX_STEP_S and not (was_long and self._is_long):
            self._limit = IDLE_STEP_BYTES
        else:
            step_s = min(step_s, _MAX_STEP_S)
            most = max(IDLE_STEP_BYTES, THREAD_BYTES_PER_S * step_s)
            self._limit = int(min(most, max(MIN_STEP_BYTES, self._bytes_per_s * step_s)))

    def has_room(self, direction: Direction) -> bool:
        """Return whether another slab may start in this direction. In each step, one slab of each direction
        may start if none is in flight, so that neither direction blocks the other."""
        if self._started[direction] == 0 and self._in_flight[direction] == 0:
            return True
        return max(sum(self._started.values()), sum(self._in_flight.values())) < self._limit

    def start(self, size: int, direction: Direction) -> None:
        """Record that copies of a slab of `size` bytes have started."""
        size = size if size > _MIN_SLAB_BYTES else _MIN_SLAB_BYTES
        self._started[direction] += size
        self._in_flight[direction] += size

    def end(self, size: int, direction: Direction) -> None:
        """Record that copies of a slab of `size` bytes have completed, or failed."""
        self._in_flight[direction] -= size if size > _MIN_SLAB_BYTES else _MIN_SLAB_BYTES


PolledJob = Generator[Transfer | None, None, None]
"""Copy job: a generator that starts copies, and yields the copies that must complete before it continues, or
None if it has none in flight and waits for the byte budget. Its `finally` block always reports the end of the
job."""


class PolledMover:
    """Runs copy jobs on the engine's own thread. The thread resumes the jobs between its steps, and does not
    wait for copies. Jobs of one direction run in the order in which they were submitted, loads before
    saves."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self._jobs: dict[Direction, list[tuple[PolledJob, Transfer | None]]] = {"load": [], "save": []}
        """Jobs in progress, with the copies that each waits for."""
        self._failures = 0
        """Number of consecutive failed jobs."""

    @property
    def is_healthy(self) -> bool:
        """Whether new jobs are likely to succeed. False after `_MAX_FAILURES` consecutive failures, and after
        `stop`."""
        return self._failures < _MAX_FAILURES

    def submit(self, job: PolledJob, direction: Direction) -> None:
        """Start a job, and run it until it waits for copies in flight or for the byte budget."""
        self._run(job, direction, lambda: next(job))

    def poll(self, *, wait: bool = False) -> None:
        """Resume the jobs whose copies have completed, as far as the byte budget permits. If `wait` is set,
        wait for copies in flight."""
        for direction, jobs in self._jobs.items():
            self._jobs[direction] = []
            for job, transfer in jobs:
                self._run(job, direction, partial(_advance, job, transfer, wait=wait))

    def is_idle(self) -> bool:
        """Return whether no job is in progress."""
        return not any(self._jobs.values())

    def wait(self) -> None:
        """Wait until all jobs have finished."""
        while not self.is_idle():
            self.budget.begin_step(computes=False)
            self.poll(wait=True)

    def stop(self, error: Exception) -> None:
        """Start no more jobs from now on, because the device has no memory for them."""
        self._failures = _MAX_FAILURES - 1
        self._record_failure(error)

    def close(self) -> None:
        """Wait for copies in flight, and end all jobs without starting further copies."""
        jobs = [one for queue in self._jobs.values() for one in queue]
        self._jobs = {"load": [], "save": []}
        for job, transfer in jobs:
            try:
                if transfer is not None:
                    transfer.wait()
                job.close()
            except Exception as e:  # noqa: BLE001 - any error
                self._record_failure(e)

    def _run(self, job: PolledJob, direction: Direction, resume: Callable[[], Transfer | None]) -> None:
        """Resume a job with `resume`, which returns what the job then waits for."""
        try:
            self._jobs[direction].append((job, resume()))
        except StopIteration:
            self._failures = 0 if self.is_healthy else self._failures
        except Exception as e:  # noqa: BLE001 - any error
            self._record_failure(e)
            try:
                job.close()
            except Exception as error:  # noqa: BLE001 - any error
                self._record_failure(error)

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


def _advance(job: PolledJob, transfer: Transfer | None, *, wait: bool) -> Transfer | None:
    """Resume a job until it waits for copies in flight, which are returned, or for the byte budget. If `wait`
    is set, copies in flight are waited for. Raises StopIteration at the job's end."""
    while True:
        if transfer is not None:
            if wait:
                transfer.wait()
            elif not transfer.is_done():
                return transfer
        transfer = next(job)
        if transfer is None:
            return None
