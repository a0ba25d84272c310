"""Who waits for what: joins duplicates, forms batches, drops the late. No torch, no clock of its own.

submit ──join_or_add──> queue of Flights ──take──> a batch for one tower ──land──> answers
                            │ same key: one Flight, several Waits (also while it runs)
                            └ same features: several Flights, one tower pass, free in a batch
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from opentelemetry.trace import INVALID_SPAN, Span

from cornplug.encoder_service.protocol import Encode, Encoded, Refused
from cornplug.qos import ONE_CLASS, ServiceClass

Answer = Encoded | Refused
WorkT = TypeVar("WorkT")


@dataclass(slots=True, eq=False, kw_only=True)
class Wait:
    """One request that somebody waits for. Times are of the batcher's clock, in seconds."""

    request: Encode
    received_s: float
    qos: ServiceClass = ONE_CLASS
    inline: bool = False
    """The caller wants the tensor itself, stored or not."""
    future: Future[Answer] = field(default_factory=Future)
    span: Span = INVALID_SPAN
    queued_s: float | None = None
    """When it began to wait for a batch; of the observer, by `time.monotonic`."""

    def late(self, now_s: float) -> bool:
        return now_s - self.received_s > self.request.deadline_s

    def answer(self, answer: Answer) -> bool:
        """Give the answer. False when the caller has gone, or has an answer already."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return False
        self.future.set_result(answer)
        return True


@dataclass(slots=True, eq=False, kw_only=True)
class Flight(Generic[WorkT]):
    """One embedding to make, for all who wait for it."""

    key: tuple[bytes, bytes]
    """(embedding key, model identity): what agrees in both is one flight. Not the inputs: two
    engines' processors may round the same picture in other last bits, and who comes a moment
    later takes what is published under the key anyway."""
    feature_key: bytes
    """Flights that agree in it need one tower pass."""
    tower: object
    """Flights of the same tower object may share a batch."""
    tokens: int
    work: WorkT
    waits: list[Wait]


class Batcher(Generic[WorkT]):
    """Thread-safe. `on_late` is called, outside the lock, for each wait dropped as too late."""

    def __init__(
        self,
        *,
        max_items: int,
        max_tokens: int,
        clock: Callable[[], float],
        on_late: Callable[[Wait], None],
    ) -> None:
        self._max_items = max_items
        self._max_tokens = max_tokens
        self._clock = clock
        self._on_late = on_late
        self._changed = threading.Condition()
        self._queue: list[Flight[WorkT]] = []
        self._flying: dict[tuple[bytes, bytes], Flight[WorkT]] = {}
        self._closed = False

    def join_or_add(self, flight: Flight[WorkT]) -> bool:
        """True when its one wait joined a flight that is under way; else it queues (False)."""
        with self._changed:
            other = self._flying.get(flight.key)
            if other is not None:
                other.waits.extend(flight.waits)
                return True
            self._flying[flight.key] = flight
            self._queue.append(flight)
            self._changed.notify()
            return False

    def take(self) -> list[Flight[WorkT]]:
        """Wait for work; the oldest flight and what fits beside it. Empty once closed and dry."""
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                late = self._drop_late()
                batch = self._form() if self._queue else []
                finished = self._closed and not batch
            for wait in late:
                self._on_late(wait)
            if batch or finished:
                return batch

    def land(self, flight: Flight[WorkT]) -> Sequence[Wait]:
        """The flight is done: who waited for it. Later requests of its key start anew."""
        with self._changed:
            self._flying.pop(flight.key, None)
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
        """By class of the first who waits: (requests, tokens) that no batch has taken yet."""
        with self._changed:
            waiting: dict[str, tuple[int, int]] = {}
            for flight in self._queue:
                qos = flight.waits[0].qos.name
                requests, tokens = waiting.get(qos, (0, 0))
                waiting[qos] = (requests + len(flight.waits), tokens + flight.tokens)
            return waiting

    def _drop_late(self) -> list[Wait]:
        now = self._clock()
        late: list[Wait] = []
        kept: list[Flight[WorkT]] = []
        for flight in self._queue:
            late += [w for w in flight.waits if w.late(now)]
            # Who has gone (cancelled) needs no answer, and no tower pass either.
            flight.waits = [w for w in flight.waits if not w.late(now) and not w.future.cancelled()]
            if flight.waits:
                kept.append(flight)
            else:
                del self._flying[flight.key]
        self._queue = kept
        return late

    def _form(self) -> list[Flight[WorkT]]:
        first = self._queue[0]
        batch: list[Flight[WorkT]] = []
        seen: set[bytes] = set()
        tokens = 0
        left: list[Flight[WorkT]] = []
        for flight in self._queue:
            known = flight.feature_key in seen
            fits = len(seen) < self._max_items and tokens + flight.tokens <= self._max_tokens
            if flight.tower is first.tower and (flight is first or known or fits):
                batch.append(flight)
                if not known:
                    seen.add(flight.feature_key)
                    tokens += flight.tokens
            else:
                left.append(flight)
        self._queue = left
        return batch


class Pace:
    """How long one item takes, measured: what a refused client is told to wait."""

    def __init__(self) -> None:
        self._item_s: float | None = None
        self._lock = threading.Lock()

    def observe(self, items: int, seconds: float) -> None:
        """A batch of `items` took `seconds`."""
        with self._lock:
            sample = seconds / max(items, 1)
            # A fifth of each new sample: steady over a few batches, and soon true after a change.
            self._item_s = sample if self._item_s is None else 0.8 * self._item_s + 0.2 * sample

    def retry_after_s(self, waiting: int) -> float:
        """Seconds after which half of what waits is done; 1 s before anything was measured."""
        with self._lock:
            return 1.0 if self._item_s is None else max(0.05, 0.5 * waiting * self._item_s)
