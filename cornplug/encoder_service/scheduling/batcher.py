"""Queue before the towers: joins duplicates, forms batches, drops late requests. No torch, no I/O.

submit ──join_or_add──> queue of EncodeJobs ──take──> a batch for one tower ──finish──> replies
                            │ same key: one job, several requests (also while it runs)
                            └ same features: several jobs, computed once, free in a batch

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

from cornplug.encoder_service.scheduling.batch_former import QueuedJob, form_batch
from cornplug.encoder_service.scheduling.fair_queue import WeightedFairQueue
from cornplug.encoder_service.wire.messages import EncodeRefusal, EncodeReply, EncodeRequest
from cornplug.qos import ONE_CLASS, ServiceClass

Answer = EncodeReply | EncodeRefusal
PayloadT = TypeVar("PayloadT")
_LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunningBatch:
    """Batch that a tower is computing."""

    tower: object
    tokens: int
    begun_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """Queue and running batches of a service. Media with equal features count once."""

    waiting: Mapping[object, tuple[int, int]]
    """Tokens and media in the queue, by tower."""
    running: Sequence[RunningBatch]

    @classmethod
    def of(cls, queue: Iterable[QueuedJob], running: Iterable[RunningBatch]) -> Self:
        """Return the load. `running` may contain a batch several times."""
        waiting: dict[object, tuple[int, int]] = {}
        for job in _distinct(queue):
            tokens, items = waiting.get(job.tower, (0, 0))
            waiting[job.tower] = tokens + job.tokens, items + 1
        return cls(waiting=waiting, running=tuple(dict.fromkeys(running)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Load with one more job in the queue, and the position of that job."""

    load: ServiceLoad
    tokens_until_served: float
    """Tokens served until the job is done, including its own."""
    tokens_by_class: Mapping[ServiceClass, int]
    """Tokens in the queue by class, without the job's own."""


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
    for job in _distinct(queue):
        tokens_by_class[job.qos] = tokens_by_class.get(job.qos, 0) + job.tokens
        if job.qos == new.qos and job.app != new.app:
            apps[job.app] = apps.get(job.app, 0) + job.tokens
        elif job.qos == new.qos and job.due_s <= new.due_s:
            own += job.tokens
    # Apps take turns: while one is served, every other app is served as much.
    own += sum(min(own, tokens) for tokens in apps.values())
    return Backlog(
        load=ServiceLoad.of((*queue, new), running),
        tokens_until_served=fair_queue.tokens_until_served(new.qos, own, tokens_by_class, demand),
        tokens_by_class=tokens_by_class,
    )


def _distinct(queue: Iterable[QueuedJob]) -> Iterable[QueuedJob]:
    return {job.feature_key: job for job in queue}.values()


@dataclass(slots=True, eq=False, kw_only=True)
class PendingRequest:
    """One request until its reply. Times are on the batcher's clock, in seconds."""

    request: EncodeRequest
    received_s: float
    qos: ServiceClass = ONE_CLASS
    inline: bool = False
    """Whether the reply contains the tensor even if the store has it."""
    account: str | None = None
    """Account whose store quota the result counts against (`StoreQuota`)."""
    future: Future[Answer] = field(default_factory=Future)
    span: Span = INVALID_SPAN
    queued_s: float | None = None
    """Time when it joined the queue, by `time.monotonic`. Set by the observer."""

    predicted_answer_s: float | None = None
    """Seconds from receipt to reply, as predicted at admission."""

    @property
    def due_s(self) -> float:
        return self.received_s + self.request.deadline_s

    def answer(self, answer: Answer) -> bool:
        """Set the reply. Returns False if the caller has disconnected or already has a reply."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return False
        self.future.set_result(answer)
        return True


@dataclass(slots=True, eq=False, kw_only=True)
class EncodeJob(Generic[PayloadT]):
    """One embedding to compute, for all requests that wait for it."""

    key: tuple[bytes, bytes]
    """(embedding key, model identity). Requests that agree in both share a job, even if their inputs
    differ: two engines' processors may round one image differently, and a later request takes the entry
    published under the key anyway."""
    feature_key: bytes
    """Key of the features. Jobs with the same key share one tower output."""
    tower: object
    """Tower. Jobs with the same tower object may share a batch."""
    tokens: int
    payload: PayloadT
    requests: list[PendingRequest]
    qos: ServiceClass = field(init=False)
    """Best class among its requests. A duplicate of a better class raises the job."""
    app: str = field(init=False)
    due_s: float = field(init=False)
    """Earliest deadline of its requests, on the batcher's clock."""
    shortest_deadline_s: float = field(init=False)
    """Shortest relative deadline of its requests."""

    def __post_init__(self) -> None:
        self.update_order()

    def update_order(self) -> None:
        """Recompute class, app and deadlines from `requests`."""
        best = max(self.requests, key=lambda w: (w.qos.rank, -w.due_s))
        self.qos, self.app = best.qos, best.request.app
        self.due_s = min(w.due_s for w in self.requests)
        self.shortest_deadline_s = min(w.request.deadline_s for w in self.requests)


class Batcher(Generic[PayloadT]):
    """Queue and its batches. Thread-safe. `on_late` is called, outside the lock, for each request dropped as
    late.

    `batch_token_limit(tower, deadline_s)` limits a batch that contains a job with that deadline.
    """

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
            has_urgent_lane: Whether a thread calls `take_urgent`, so that running jobs delay no better class.
            is_long: Returns whether a running batch takes too long for a waiting job of that deadline (s).
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
        self._passed_over: EncodeJob[PayloadT] | None = None
        self._in_flight: dict[tuple[bytes, bytes], EncodeJob[PayloadT]] = {}
        self._running: dict[EncodeJob[PayloadT], RunningBatch] = {}
        self._closed = False

    def has(self, key: tuple[bytes, bytes]) -> bool:
        """Return whether a job with this key is queued or running."""
        with self._changed:
            return key in self._in_flight

    def join_or_add(self, job: EncodeJob[PayloadT]) -> bool:
        """Return True if its requests joined a queued or running job, False if the job was queued."""
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

    def take(self) -> list[EncodeJob[PayloadT]]:
        """Return the next batch in fair order. Blocks until there is one. Returns [] when closed and
        empty."""
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                late = self._drop_late()
                batch = self._form() if self._queue else []
                if batch and self._has_urgent_lane:
                    self._changed.notify_all()
                finished = self._closed and not batch
            for pending in late:
                self._on_late(pending)
            if batch or finished:
                return batch

    def take_urgent(self, lanes: int) -> EncodeJob[PayloadT] | None:
        """Return the best queued job when all `lanes` run long batches of worse classes. Blocks. Returns None
        when closed.

        It is for one lane in addition to `lanes`, so that a long job of a worse class never delays a better
        class.
        """
        while True:
            with self._changed:
                while (urgent := self._most_urgent(lanes)) is None and not self._closed:
                    # A running batch becomes long as time passes, without an event.
                    self._changed.wait(_LOOK_S if self._queue else None)
                if urgent is None:
                    return None
                late = self._drop_late()
                found = urgent if urgent in self._queue else None
                if found is not None:
                    self._fair_queue.set_backlogged(self._apps())
                    self._fair_queue.charge(found.qos, found.app, found.tokens)
                    self._queue.remove(found)
                    self._fair_queue.set_backlogged(self._apps())
                    begun = RunningBatch(tower=found.tower, tokens=found.tokens, begun_s=self._clock())
                    self._running[found] = begun
            for pending in late:
                self._on_late(pending)
            if found is not None:
                return found

    def remove(self, job: EncodeJob[PayloadT]) -> bool:
        """Drop a queued job that no request waits for. Returns False if a batch already took it."""
        with self._changed:
            if job not in self._queue:
                return False
            self._queue.remove(job)
            self._in_flight.pop(job.key, None)
            return True

    def raise_cost(self, job: EncodeJob[PayloadT], tokens: int) -> None:
        """Charge a running job for more tokens. Its true cost is known only after its header is read."""
        with self._changed:
            if (begun := self._running.get(job)) is None or tokens <= job.tokens:
                return
            self._fair_queue.charge(job.qos, job.app, tokens - job.tokens)
            job.tokens = tokens
            self._running[job] = RunningBatch(tower=begun.tower, tokens=tokens, begun_s=begun.begun_s)

    def finish(self, job: EncodeJob[PayloadT]) -> Sequence[PendingRequest]:
        """Return the requests of a job that is done. Later requests with its key start a new job."""
        with self._changed:
            self._in_flight.pop(job.key, None)
            self._running.pop(job, None)
            return tuple(job.requests)

    def close(self) -> None:
        """Accept no more work. `take` empties the queue and then returns []."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def queued(self) -> int:
        """Return the number of jobs waiting for a batch."""
        with self._changed:
            return len(self._queue)

    def queue(self) -> dict[str, tuple[int, int]]:
        """Return (requests, tokens) waiting for a batch, by class."""
        with self._changed:
            waiting: dict[str, tuple[int, int]] = {}
            for job in self._queue:
                requests, tokens = waiting.get(job.qos.name, (0, 0))
                waiting[job.qos.name] = (requests + len(job.requests), tokens + job.tokens)
            return waiting

    def ahead(self, new: QueuedJob, demand: Mapping[ServiceClass, float]) -> Backlog:
        """Return the backlog ahead of `new` if it arrived now. For `demand`, see
        `WeightedFairQueue.tokens_until_served`."""
        with self._changed:
            queue, running = self._queue, list(self._running.values())
            if self._has_urgent_lane:
                running = [b for job, b in self._running.items() if not self._overtakes(new, job, b)]
                if len(running) < len(self._running):
                    # The urgent lane takes it before the queued jobs of worse classes.
                    queue = [job for job in queue if not _better(new.qos, job.qos)]
            return backlog_ahead(queue, running, self._fair_queue, new, demand)

    def load(self) -> ServiceLoad:
        """Return the queue and the running batches."""
        with self._changed:
            return ServiceLoad.of(self._queue, self._running.values())

    def _most_urgent(self, lanes: int) -> EncodeJob[PayloadT] | None:
        if len(set(self._running.values())) < lanes or not self._queue:
            return None
        first = min(self._queue, key=lambda f: (*(-part for part in f.qos.rank[:2]), f.due_s))
        overtakes = all(self._overtakes(first, job, batch) for job, batch in self._running.items())
        return first if overtakes else None

    def _overtakes(self, new: QueuedJob, job: EncodeJob[PayloadT], batch: RunningBatch) -> bool:
        return _better(new.qos, job.qos) and self._is_long(batch, new.due_s - self._clock())

    def _apps(self) -> dict[ServiceClass, set[str]]:
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

    def _form(self) -> list[EncodeJob[PayloadT]]:
        packed = form_batch(
            self._queue,
            self._fair_queue,
            max_items=self._max_items,
            limit=self._limit,
            first=self._passed_over if self._passed_over in self._queue else None,
        )
        self._passed_over = packed.passed_over
        taken = set(packed.batch)
        self._queue = [job for job in self._queue if job not in taken]
        begun = RunningBatch(tower=packed.batch[0].tower, tokens=packed.tokens, begun_s=self._clock())
        self._running.update(dict.fromkeys(packed.batch, begun))
        return packed.batch

    def _limit(self, job: EncodeJob[PayloadT]) -> float:
        return min(self._max_tokens, self._batch_token_limit(job.tower, job.shortest_deadline_s))


def _better(one: ServiceClass, other: ServiceClass) -> bool:
    return one.rank[:2] > other.rank[:2]
