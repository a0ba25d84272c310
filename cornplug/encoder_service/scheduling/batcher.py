"""Who waits for what: joins duplicates, forms batches, drops the late. No torch, no clock of its own.

submit ──join_or_add──> queue of Flights ──take──> a batch for one tower ──land──> answers
                            │ same key: one Flight, several Waits (also while it runs)
                            └ same features: several Flights, one tower pass, free in a batch
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from opentelemetry.trace import INVALID_SPAN, Span

from cornplug.encoder_service.scheduling.backlog import BacklogAhead, RunningBatch, ServiceLoad, look
from cornplug.encoder_service.scheduling.batch_former import QueuedJob, pack
from cornplug.encoder_service.scheduling.fair_queue import FairOrder
from cornplug.encoder_service.wire.messages import EncodeRefusal, EncodeReply, EncodeRequest
from cornplug.qos import ONE_CLASS, ServiceClass

Answer = EncodeReply | EncodeRefusal
WorkT = TypeVar("WorkT")


@dataclass(slots=True, eq=False, kw_only=True)
class PendingRequest:
    """One request that somebody waits for. Times are of the batcher's clock, in seconds."""

    request: EncodeRequest
    received_s: float
    qos: ServiceClass = ONE_CLASS
    inline: bool = False
    """The caller wants the tensor itself, stored or not."""
    account: str | None = None
    """Whose part of the store it fills (`quota`)."""
    future: Future[Answer] = field(default_factory=Future)
    span: Span = INVALID_SPAN
    queued_s: float | None = None
    """When it began to wait for a batch; of the observer, by `time.monotonic`."""

    foreseen_s: float | None = None
    """Of the admission: seconds from receipt to answer, as predicted."""

    @property
    def due_s(self) -> float:
        return self.received_s + self.request.deadline_s

    def answer(self, answer: Answer) -> bool:
        """Give the answer. False when the caller has gone, or has an answer already."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return False
        self.future.set_result(answer)
        return True


@dataclass(slots=True, eq=False, kw_only=True)
class EncodeJob(Generic[WorkT]):
    """One embedding to make, for all who wait for it."""

    key: tuple[bytes, bytes]
    """(embedding key, model identity): what agrees in both is one flight. Not the inputs: two
    engines' processors may round the same image in other last bits, and who comes a moment
    later takes what is published under the key anyway."""
    feature_key: bytes
    """Flights that agree in it need one tower pass."""
    tower: object
    """Flights of the same tower object may share a batch."""
    tokens: int
    work: WorkT
    waits: list[PendingRequest]
    qos: ServiceClass = field(init=False)
    """The best of those who wait: a joined duplicate lifts the flight."""
    app: str = field(init=False)
    due_s: float = field(init=False)
    """The earliest deadline of those who wait, by the batcher's clock."""
    shortest_deadline_s: float = field(init=False)
    """The shortest deadline that any of them came with."""

    def __post_init__(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Who waits has changed."""
        best = max(self.waits, key=lambda w: (w.qos.rank, -w.due_s))
        self.qos, self.app = best.qos, best.request.app
        self.due_s = min(w.due_s for w in self.waits)
        self.shortest_deadline_s = min(w.request.deadline_s for w in self.waits)


class Batcher(Generic[WorkT]):
    """Thread-safe. `on_late` is called, outside the lock, for each wait dropped as too late.

    `most_tokens(tower, deadline_s)` bounds a pass that has someone of that deadline in it.
    """

    def __init__(
        self,
        *,
        max_items: int,
        max_tokens: int,
        clock: Callable[[], float],
        on_late: Callable[[PendingRequest], None],
        most_tokens: Callable[[object, float], float] = lambda tower, deadline_s: math.inf,
        overtakes: bool = False,
    ) -> None:
        """`overtakes`: somebody calls `take_urgent`, so that what runs holds up no better class."""
        self._overtakes = overtakes
        self._max_items = max_items
        self._max_tokens = max_tokens
        self._clock = clock
        self._on_late = on_late
        self._most_tokens = most_tokens
        self._changed = threading.Condition()
        self._order = FairOrder()
        self._queue: list[EncodeJob[WorkT]] = []
        self._next: EncodeJob[WorkT] | None = None
        self._flying: dict[tuple[bytes, bytes], EncodeJob[WorkT]] = {}
        self._running: dict[EncodeJob[WorkT], RunningBatch] = {}
        self._closed = False

    def has(self, key: tuple[bytes, bytes]) -> bool:
        """Whether a flight of it is under way."""
        with self._changed:
            return key in self._flying

    def join_or_add(self, flight: EncodeJob[WorkT]) -> bool:
        """True when its waits joined a flight that is under way; else it queues (False)."""
        with self._changed:
            other = self._flying.get(flight.key)
            if other is not None:
                other.waits.extend(flight.waits)
                other.settle()
                return True
            self._flying[flight.key] = flight
            self._queue.append(flight)
            self._changed.notify_all()
            return False

    def take(self) -> list[EncodeJob[WorkT]]:
        """Wait for work; whose turn it is and what fits beside it. Empty once closed and dry."""
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                late = self._drop_late()
                batch = self._form() if self._queue else []
                if batch and self._overtakes:
                    self._changed.notify_all()
                finished = self._closed and not batch
            for wait in late:
                self._on_late(wait)
            if batch or finished:
                return batch

    def take_urgent(self, lanes: int) -> EncodeJob[WorkT] | None:
        """One that waits while all `lanes` run flights of worse classes. Blocks; None once closed.

        For who can do one more at a time, so that a long one of a worse class holds up nobody of a better.
        """
        while True:
            with self._changed:
                while (urgent := self._most_urgent(lanes)) is None and not self._closed:
                    self._changed.wait()
                if urgent is None:
                    return None
                late = self._drop_late()
                found = urgent if urgent in self._queue else None
                if found is not None:
                    self._order.waiting(self._apps())
                    self._order.charge(found.qos, found.app, found.tokens)
                    self._queue.remove(found)
                    self._order.waiting(self._apps())
                    begun = RunningBatch(tower=found.tower, tokens=found.tokens, begun_s=self._clock())
                    self._running[found] = begun
            for wait in late:
                self._on_late(wait)
            if found is not None:
                return found

    def remove(self, flight: EncodeJob[WorkT]) -> bool:
        """Nobody waits for it any more. False where it has been taken already."""
        with self._changed:
            if flight not in self._queue:
                return False
            self._queue.remove(flight)
            self._flying.pop(flight.key, None)
            return True

    def costs(self, flight: EncodeJob[WorkT], tokens: int) -> None:
        """A flight that was taken turns out to cost that much: what is more is charged now."""
        with self._changed:
            if (begun := self._running.get(flight)) is None or tokens <= flight.tokens:
                return
            self._order.charge(flight.qos, flight.app, tokens - flight.tokens)
            flight.tokens = tokens
            self._running[flight] = RunningBatch(tower=begun.tower, tokens=tokens, begun_s=begun.begun_s)

    def land(self, flight: EncodeJob[WorkT]) -> Sequence[PendingRequest]:
        """The flight is done: who waited for it. Later requests of its key start anew."""
        with self._changed:
            self._flying.pop(flight.key, None)
            self._running.pop(flight, None)
            return tuple(flight.waits)

    def close(self) -> None:
        """No more work will come: `take` empties the queue and then returns nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def queued(self) -> int:
        """Flights that no batch has taken yet."""
        with self._changed:
            return len(self._queue)

    def queue(self) -> dict[str, tuple[int, int]]:
        """By class: (requests, tokens) that no batch has taken yet."""
        with self._changed:
            waiting: dict[str, tuple[int, int]] = {}
            for flight in self._queue:
                requests, tokens = waiting.get(flight.qos.name, (0, 0))
                waiting[flight.qos.name] = (requests + len(flight.waits), tokens + flight.tokens)
            return waiting

    def ahead(self, new: QueuedJob, demand: Mapping[ServiceClass, float]) -> BacklogAhead:
        """What `new` would find if it came now. `demand` as `FairOrder.until` takes it."""
        with self._changed:
            running = self._running.items()
            if self._overtakes:
                running = {f: b for f, b in running if not _better(new.qos, f.qos)}.items()
            return look(self._queue, [batch for _, batch in running], self._order, new, demand)

    def load(self) -> ServiceLoad:
        """What waits and what runs."""
        with self._changed:
            return ServiceLoad.of(self._queue, self._running.values())

    def _most_urgent(self, lanes: int) -> EncodeJob[WorkT] | None:
        if len(self._running) < lanes or not self._queue:
            return None
        first = min(self._queue, key=lambda f: (*(-part for part in f.qos.rank[:2]), f.due_s))
        return first if all(_better(first.qos, other.qos) for other in self._running) else None

    def _apps(self) -> dict[ServiceClass, set[str]]:
        apps: dict[ServiceClass, set[str]] = {}
        for flight in self._queue:
            apps.setdefault(flight.qos, set()).add(flight.app)
        return apps

    def _drop_late(self) -> list[PendingRequest]:
        now = self._clock()
        late: list[PendingRequest] = []
        kept: list[EncodeJob[WorkT]] = []
        for flight in self._queue:
            late += [w for w in flight.waits if w.due_s < now]
            # Who has gone (cancelled) needs no answer, and no tower pass either.
            staying = [w for w in flight.waits if w.due_s >= now and not w.future.cancelled()]
            if not staying:
                del self._flying[flight.key]
                continue
            if len(staying) != len(flight.waits):
                flight.waits = staying
                flight.settle()
            kept.append(flight)
        self._queue = kept
        return late

    def _form(self) -> list[EncodeJob[WorkT]]:
        packed = pack(
            self._queue,
            self._order,
            max_items=self._max_items,
            limit=self._limit,
            first=self._next if self._next in self._queue else None,
        )
        self._next = packed.passed_over
        taken = set(packed.batch)
        self._queue = [flight for flight in self._queue if flight not in taken]
        begun = RunningBatch(tower=packed.batch[0].tower, tokens=packed.tokens, begun_s=self._clock())
        self._running.update(dict.fromkeys(packed.batch, begun))
        return packed.batch

    def _limit(self, flight: EncodeJob[WorkT]) -> float:
        return min(self._max_tokens, self._most_tokens(flight.tower, flight.shortest_deadline_s))


def _better(one: ServiceClass, other: ServiceClass) -> bool:
    return one.rank[:2] > other.rank[:2]
