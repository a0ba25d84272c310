"""Queue of jobs for the towers. It joins duplicates, forms batches, and drops late requests. It uses neither
torch nor I/O.

submit ──join_or_add──> queue of EncodeJobs ──take──> a batch for one tower ──finish──> replies
                            │ same key: one job, several requests (also while it runs)
                            └ same features: several jobs, computed once, counted once in a batch

`backlog_ahead` returns the work ahead of a new request.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Generic, Self, TypeVar

from opentelemetry.trace import INVALID_SPAN, Span

from cornplug.encoder_service.fair_queue import QueuedJob, WeightedFairQueue, form_batch
from cornplug.encoder_service.formats.messages import EncodeRefusal, EncodeReply, EncodeRequest
from cornplug.qos import DEFAULT_CLASS, ServiceClass

EncodeResult = EncodeReply | EncodeRefusal
PayloadT = TypeVar("PayloadT")
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunningBatch:
    """Batch that a tower is computing."""

    tower: object
    tokens: int
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """Queued jobs and running batches of a service. Jobs with equal features count once."""

    queued_by_tower: Mapping[object, tuple[int, int]]
    """Number of tokens and of jobs in the queue, by tower."""
    running: Sequence[RunningBatch]

    @classmethod
    def from_queue(cls, queue: Iterable[QueuedJob], running: Iterable[RunningBatch]) -> Self:
        """Create the load from a queue and running batches. `running` may contain the same batch several
        times."""
        waiting: dict[object, tuple[int, int]] = {}
        for job in _distinct_jobs(queue):
            tokens, items = waiting.get(job.tower, (0, 0))
            waiting[job.tower] = tokens + job.tokens, items + 1
        return cls(queued_by_tower=waiting, running=tuple(dict.fromkeys(running)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Load of a service after one more job is queued, and the work ahead of that job."""

    load: ServiceLoad
    tokens_until_served: float
    """Number of tokens that are served until the job is done, including the job's own tokens."""
    tokens_by_class: Mapping[ServiceClass, int]
    """Number of tokens in the queue by class, without the job's own tokens."""


def backlog_ahead(
    queue: Sequence[QueuedJob],
    running: Iterable[RunningBatch],
    fair_queue: WeightedFairQueue,
    new: QueuedJob,
    demand: Mapping[ServiceClass, float],
) -> Backlog:
    """Return the backlog ahead of `new`. For `demand`, see `WeightedFairQueue.tokens_until_served`."""
    tokens_by_class: dict[ServiceClass, int] = {}
    apps: dict[str, int] = {}
    own = new.tokens
    for job in _distinct_jobs(queue):
        tokens_by_class[job.qos] = tokens_by_class.get(job.qos, 0) + job.tokens
        if job.qos == new.qos and job.app != new.app:
            apps[job.app] = apps.get(job.app, 0) + job.tokens
        elif job.qos == new.qos and job.due_s <= new.due_s:
            own += job.tokens
    # Apps are served alternately. While one app's tokens are served, every other app gets as many tokens.
    own += sum(min(own, tokens) for tokens in apps.values())
    return Backlog(
        load=ServiceLoad.from_queue((*queue, new), running),
        tokens_until_served=fair_queue.tokens_until_served(new.qos, own, tokens_by_class, demand),
        tokens_by_class=tokens_by_class,
    )


def _distinct_jobs(queue: Iterable[QueuedJob]) -> Iterable[QueuedJob]:
    return {job.feature_key: job for job in queue}.values()


@dataclass(slots=True, eq=False, kw_only=True)
class PendingRequest:
    """Request that has no reply yet. Times are on the batcher's clock, in seconds."""

    request: EncodeRequest
    received_s: float
    qos: ServiceClass = DEFAULT_CLASS
    inline: bool = False
    """Whether the reply must contain the tensor even if the store has it."""
    account: str | None = None
    """Account to whose store quota the result counts (`StoreQuota`), or None without a quota."""
    future: Future[EncodeResult] = field(default_factory=Future)
    span: Span = INVALID_SPAN
    queued_s: float | None = None
    """Time at which the request joined the queue, by `time.monotonic`. The observer sets it."""

    predicted_reply_s: float | None = None
    """Seconds from receipt to reply, as predicted at admission, or None without a prediction."""

    @property
    def due_s(self) -> float:
        return self.received_s + self.request.deadline_s

    def send_reply(self, reply: EncodeResult) -> bool:
        """Send the reply to the caller. Returns False if the caller has disconnected or already has a
        reply."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return False
        self.future.set_result(reply)
        return True


@dataclass(slots=True, eq=False, kw_only=True)
class EncodeJob(Generic[PayloadT]):
    """One embedding to compute, for all requests that wait for it."""

    key: tuple[bytes, bytes]
    """(embedding key, model identity). Requests with equal values share a job, even if their inputs differ.
    The processors of two engines may round an image differently. However, a later request would in any case
    use the entry that is saved under the key."""
    feature_key: bytes
    """Key of the features. Jobs with the same key share a tower output."""
    tower: object
    """Tower that computes the features. Only jobs with the same tower object can share a batch."""
    tokens: int
    payload: PayloadT
    requests: list[PendingRequest]
    qos: ServiceClass = field(init=False)
    """Best service class of `requests`. If a request of a better class joins, the job gets that class."""
    app: str = field(init=False)
    due_s: float = field(init=False)
    """Earliest deadline of `requests`, on the batcher's clock."""
    shortest_deadline_s: float = field(init=False)
    """Shortest deadline of `requests`, in seconds from the receipt of the request."""

    def __post_init__(self) -> None:
        self.update_order()

    def update_order(self) -> None:
        """Recompute class, app and deadlines from `requests`."""
        best = max(self.requests, key=lambda w: (w.qos.rank, -w.due_s))
        self.qos, self.app = best.qos, best.request.app
        self.due_s = min(w.due_s for w in self.requests)
        self.shortest_deadline_s = min(w.request.deadline_s for w in self.requests)


class Batcher(Generic[PayloadT]):
    """Queue of jobs, from which batches are taken. Thread-safe."""

    def __init__(
        self,
        *,
        max_items: int,
        max_tokens: int,
        clock: Callable[[], float],
        on_late: Callable[[PendingRequest], None],
        batch_token_limit: Callable[[object, float], float] = lambda tower, deadline_s: math.inf,
        has_urgent_lane: bool = False,
        is_long: Callable[[RunningBatch, float], bool] = lambda batch, deadline_s: True,
    ) -> None:
        """Create an empty queue.

        Args:
            max_items: Maximum number of jobs with distinct features in a batch.
            max_tokens: Maximum number of tokens in a batch, unless its first job has more.
            clock: Function that returns the time in seconds.
            on_late: Function that is called, outside the lock, with each request that is dropped because its
                deadline passed.
            batch_token_limit: Function that takes a tower and a job's deadline in seconds, and returns the
                maximum number of tokens of a batch with this job.
            has_urgent_lane: Whether a thread calls `take_urgent_job`, so that running batches do not delay
                jobs of classes with a higher priority.
            is_long: Function that returns whether a running batch delays a job with this deadline (s) for too
                long.
        """
        self._has_urgent_lane = has_urgent_lane
        self._is_long = is_long
        self._max_items = max_items
        self._max_tokens = max_tokens
        self._clock = clock
        self._on_late = on_late
        self._batch_token_limit = batch_token_limit
        self._changed = threading.Condition()
        self._fair_queue = WeightedFairQueue()
        self._queue: list[EncodeJob[PayloadT]] = []
        self._skipped_job: EncodeJob[PayloadT] | None = None
        self._in_flight: dict[tuple[bytes, bytes], EncodeJob[PayloadT]] = {}
        self._running: dict[EncodeJob[PayloadT], RunningBatch] = {}
        self._urgent: set[EncodeJob[PayloadT]] = set()
        """Running jobs that `take_urgent_job` returned."""
        self._closed = False

    def has_job(self, key: tuple[bytes, bytes]) -> bool:
        """Return whether a job with this key is queued or running."""
        with self._changed:
            return key in self._in_flight

    def join_or_add(self, job: EncodeJob[PayloadT]) -> bool:
        """Add the job's requests to the queued or running job with the same key and return True. If there is
        no such job, queue this job and return False."""
        with self._changed:
            other = self._in_flight.get(job.key)
            if other is not None:
                other.requests.extend(job.requests)
                other.update_order()
                return True
            self._in_flight[job.key] = job
            self._queue.append(job)
            self._changed.notify_all()
            return False

    def take_batch(self) -> list[EncodeJob[PayloadT]]:
        """Wait for jobs, and return the next batch in fair order. Return [] if the queue is closed and
        empty."""
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                late = self._drop_late()
                batch = self._form_next_batch() if self._queue else []
                if batch and self._has_urgent_lane:
                    self._changed.notify_all()
                finished = self._closed and not batch
            for pending in late:
                self._on_late(pending)
            if batch or finished:
                return batch

    def take_urgent_job(self, lanes: int) -> EncodeJob[PayloadT] | None:
        """Wait until all `lanes` (threads that run batches) run long batches of worse classes than a queued
        job. Return this job, or None when the queue is closed.

        One additional lane calls this, so that a long job of a worse class never delays a better class.
        """
        while True:
            with self._changed:
                while (urgent := self._find_urgent_job(lanes)) is None and not self._closed:
                    # Poll, because a running batch becomes long as time passes, without any event.
                    self._changed.wait(_POLL_S if self._queue else None)
                if urgent is None:
                    return None
                late = self._drop_late()
                found = urgent if urgent in self._queue else None
                if found is not None:
                    self._fair_queue.set_backlogged(self._apps_by_class())
                    self._fair_queue.charge(found.qos, found.app, found.tokens)
                    self._queue.remove(found)
                    self._fair_queue.set_backlogged(self._apps_by_class())
                    begun = RunningBatch(tower=found.tower, tokens=found.tokens, started_s=self._clock())
                    self._running[found] = begun
                    self._urgent.add(found)
            for pending in late:
                self._on_late(pending)
            if found is not None:
                return found

    def remove(self, job: EncodeJob[PayloadT]) -> bool:
        """Remove a queued job for which no request waits. Returns False if the job is no longer in the
        queue."""
        with self._changed:
            if job not in self._queue:
                return False
            self._queue.remove(job)
            self._in_flight.pop(job.key, None)
            return True

    def raise_cost(self, job: EncodeJob[PayloadT], tokens: int) -> None:
        """Increase the cost of a running job to `tokens`. The actual cost is known only after the header of
        its media item was read."""
        with self._changed:
            if (begun := self._running.get(job)) is None or tokens <= job.tokens:
                return
            self._fair_queue.charge(job.qos, job.app, tokens - job.tokens)
            job.tokens = tokens
            self._running[job] = RunningBatch(tower=begun.tower, tokens=tokens, started_s=begun.started_s)

    def finish(self, job: EncodeJob[PayloadT]) -> Sequence[PendingRequest]:
        """Remove a finished job, and return its requests. Later requests with the same key start a new
        job."""
        with self._changed:
            self._in_flight.pop(job.key, None)
            self._running.pop(job, None)
            self._urgent.discard(job)
            return tuple(job.requests)

    def close(self) -> None:
        """Close the queue. `take_batch` first returns the jobs that are still queued, and then []."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def count_queued(self) -> int:
        """Return the number of jobs that wait for a batch."""
        with self._changed:
            return len(self._queue)

    def queue_by_class(self) -> dict[str, tuple[int, int]]:
        """Return (number of requests, number of tokens) that wait for a batch, by class."""
        with self._changed:
            waiting: dict[str, tuple[int, int]] = {}
            for job in self._queue:
                requests, tokens = waiting.get(job.qos.name, (0, 0))
                waiting[job.qos.name] = (requests + len(job.requests), tokens + job.tokens)
            return waiting

    def estimate_backlog(self, new: QueuedJob, demand: Mapping[ServiceClass, float]) -> Backlog:
        """Return the backlog ahead of `new` if this job arrived now. For `demand`, see
        `WeightedFairQueue.tokens_until_served`."""
        with self._changed:
            queue, running = self._queue, list(self._running.values())
            if self._has_urgent_lane:
                ahead = {j: b for j, b in self._running.items() if not self._overtakes(new, j, b)}
                running = list(ahead.values())
                if len(ahead) < len(self._running) and ahead.keys() <= self._urgent:
                    # All usual lanes run batches that this job overtakes. The urgent lane takes it before the
                    # queued jobs of worse classes.
                    queue = [job for job in queue if not _outranks(new.qos, job.qos)]
            return backlog_ahead(queue, running, self._fair_queue, new, demand)

    def current_load(self) -> ServiceLoad:
        """Return the load of queued jobs and running batches."""
        with self._changed:
            return ServiceLoad.from_queue(self._queue, self._running.values())

    def _find_urgent_job(self, lanes: int) -> EncodeJob[PayloadT] | None:
        if len(set(self._running.values())) < lanes or not self._queue:
            return None
        first = min(self._queue, key=lambda f: (*(-part for part in f.qos.rank[:2]), f.due_s))
        overtakes = all(self._overtakes(first, job, batch) for job, batch in self._running.items())
        return first if overtakes else None

    def _overtakes(self, new: QueuedJob, job: EncodeJob[PayloadT], batch: RunningBatch) -> bool:
        return _outranks(new.qos, job.qos) and self._is_long(batch, new.due_s - self._clock())

    def _apps_by_class(self) -> dict[ServiceClass, set[str]]:
        apps: dict[ServiceClass, set[str]] = {}
        for job in self._queue:
            apps.setdefault(job.qos, set()).add(job.app)
        return apps

    def _drop_late(self) -> list[PendingRequest]:
        now = self._clock()
        late: list[PendingRequest] = []
        kept: list[EncodeJob[PayloadT]] = []
        for job in self._queue:
            late += [w for w in job.requests if w.due_s < now]
            # A cancelled request needs no reply and no computation.
            staying = [w for w in job.requests if w.due_s >= now and not w.future.cancelled()]
            if not staying:
                del self._in_flight[job.key]
                continue
            if len(staying) != len(job.requests):
                job.requests = staying
                job.update_order()
            kept.append(job)
        self._queue = kept
        return late

    def _form_next_batch(self) -> list[EncodeJob[PayloadT]]:
        packed = form_batch(
            self._queue,
            self._fair_queue,
            max_items=self._max_items,
            max_tokens_for=self._max_batch_tokens,
            first_job=self._skipped_job if self._skipped_job in self._queue else None,
        )
        self._skipped_job = packed.skipped
        taken = set(packed.batch)
        self._queue = [job for job in self._queue if job not in taken]
        begun = RunningBatch(tower=packed.batch[0].tower, tokens=packed.tokens, started_s=self._clock())
        self._running.update(dict.fromkeys(packed.batch, begun))
        return packed.batch

    def _max_batch_tokens(self, job: EncodeJob[PayloadT]) -> float:
        return min(self._max_tokens, self._batch_token_limit(job.tower, job.shortest_deadline_s))


def _outranks(candidate: ServiceClass, other: ServiceClass) -> bool:
    return candidate.rank[:2] > other.rank[:2]
