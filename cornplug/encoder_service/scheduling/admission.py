"""Who is let in: predicts when a request would be done, and says no at once where that is too late.

    seconds until done = what runs now + what the fair order serves before it, in passes + its own pass

Passes are priced by `PassTime`, the queue ahead is `FairOrder`'s. Before a tower was measured, and while
nothing waits or runs, everybody is let in: a wrong measurement cannot keep a service empty.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary, ref

from cornplug.encoder_service.scheduling.arrival_rate import ArrivalRate
from cornplug.encoder_service.scheduling.backlog import BacklogAhead, RunningBatch, ServiceLoad
from cornplug.encoder_service.scheduling.batch_former import QueuedJob
from cornplug.encoder_service.scheduling.batcher import Batcher, EncodeJob, PendingRequest
from cornplug.encoder_service.scheduling.latency_model import PassTime
from cornplug.qos import ServiceClass

_HEADROOM: Final = 1.5
_LEAST_HEADROOM: Final = 1.05
_MOST_HEADROOM: Final = 2.0
_MISSED_STEP: Final = 0.15
_KEPT_STEP: Final = 0.004
"""Steps in balance when one prediction of 38 is too short."""
_MANY_FREE: Final = 0.2
_FREE_STEP: Final = 0.05
_LEAST_RETRY_S: Final = 0.05
_PART_OF_DEADLINE: Final = 0.25
"""A pass may last so much of the shortest deadline about: who comes next must not wait longer."""
_REMEMBER_S: Final = 10.0
"""So long a deadline counts as being about."""
_UNMEASURED_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRefusal:
    """Why a request is not let in."""

    reason: Literal["overloaded", "over_share"]
    message: str
    retry_after_s: float
    """When it would be let in, if nobody else came."""


@dataclass(slots=True, kw_only=True)
class _Probe:
    """Nothing that will come, to ask what if."""

    qos: ServiceClass
    tower: object
    tokens: int
    app: str
    due_s: float = math.inf
    feature_key: bytes = b""


class EncodeAdmission:
    """Thread-safe."""

    def __init__(
        self,
        *,
        max_items: int,
        max_tokens: int,
        clock: Callable[[], float],
        lanes: Callable[[], int] = lambda: 1,
    ) -> None:
        self._max_items = max_items
        self._max_tokens = max_tokens
        self._clock = clock
        self._lanes = lanes
        self._lock = threading.Lock()
        self._passes: WeakKeyDictionary[object, PassTime] = WeakKeyDictionary()
        self._arrivals = ArrivalRate()
        self._last: tuple[Callable[[], object | None], int, str] = (lambda: None), 0, ""
        """Tower, tokens and app of what was let in last."""
        self._free = 0.0
        """Part of the latest requests that needed no pass."""
        self._headroom: dict[ServiceClass, float] = {}
        """By class: how often a prediction has to fit into a deadline, for better classes come in bursts and
        threads wait for each other. Learned from what came of earlier ones."""
        self._shortest_deadlines: dict[ServiceClass, tuple[float, float]] = {}
        """By class: the shortest deadline that anything let in had of late, and when that was."""

    def computed(self, batch: Sequence[EncodeJob[Any]], seconds: float) -> None:
        """A batch has left its executor. Features that were kept make it quick, and their share of
        the traffic is thereby in the price."""
        tokens = sum({flight.feature_key: flight.tokens for flight in batch}.values())
        with self._lock:
            self._passes.setdefault(batch[0].tower, PassTime()).observe(tokens, seconds)

    def answered(self, wait: PendingRequest, seconds: float) -> None:
        """A request that was let in has its answer, `seconds` after it came, or was dropped then."""
        if wait.foreseen_s is None:
            return
        with self._lock:
            # Only what was near its deadline tells anything of how near one may go.
            headroom = self._headroom.get(wait.qos, _HEADROOM)
            if headroom * wait.foreseen_s > wait.request.deadline_s / 2:
                moved = headroom + (_MISSED_STEP if seconds > headroom * wait.foreseen_s else -_KEPT_STEP)
                self._headroom[wait.qos] = min(max(moved, _LEAST_HEADROOM), _MOST_HEADROOM)

    def most_tokens(self, tower: object, deadline_s: float) -> float:
        """How long a pass may be that has someone of that deadline in it, and while others of shorter ones
        keep coming."""
        with self._lock:
            return self._most_tokens(tower, deadline_s)

    def refusal(self, flight: EncodeJob[Any], batcher: Batcher[Any]) -> AdmissionRefusal | None:
        """Why `flight` cannot be done in time, or None: then it counts as let in."""
        now = self._clock()
        no, expected_s = self._judged(flight, flight.shortest_deadline_s, batcher, now)
        if no is None:
            with self._lock:
                for wait in flight.waits:
                    wait.foreseen_s = now - wait.received_s + expected_s
                self._note_deadline(flight, now)
                self._last = ref(flight.tower), flight.tokens, flight.app
                self._arrivals.count(flight.qos, flight.tokens, now)
        return no

    def at_the_door(
        self, qos: ServiceClass, deadline_s: float, batcher: Batcher[Any]
    ) -> AdmissionRefusal | None:
        """The same of a medium like the last one, before anything was spent on it. None, too, while many
        requests turn out to need no pass: then only its content tells what this one needs."""
        now = self._clock()
        with self._lock:
            reference, tokens, app = self._last
            tower, many_free = reference(), self._free > _MANY_FREE
        if tower is None or many_free:
            return None
        probe = _Probe(qos=qos, tower=tower, tokens=tokens, app=app, due_s=now + deadline_s)
        return self._judged(probe, deadline_s, batcher, now)[0]

    def needs_pass(self, needed: bool) -> None:
        """Whether a request needed a tower pass of its own: else it was stored, or joined another."""
        with self._lock:
            self._free += _FREE_STEP * ((not needed) - self._free)

    def _judged(
        self, new: QueuedJob, deadline_s: float, batcher: Batcher[Any], now: float
    ) -> tuple[AdmissionRefusal | None, float]:
        """Why not, and the seconds expected until it would be done."""
        ahead = batcher.ahead(new, self._demand(new.tower, now))
        busy = ahead.load.running or len(ahead.of_class) > 0
        expected_s = self._done_s(ahead, new, now)
        with self._lock:
            done_s = self._headroom.get(new.qos, _HEADROOM) * expected_s
            measured = self._pass(new.tower).measured
        if not (busy and measured and done_s > new.due_s - now):
            return None, expected_s
        mine, all_waiting = ahead.of_class.get(new.qos, 0), sum(ahead.of_class.values())
        over = mine + new.tokens > new.qos.share * (all_waiting + new.tokens)
        no = AdmissionRefusal(
            reason="over_share" if over and mine < all_waiting else "overloaded",
            message=f"it would take {done_s:.3g} s, and its deadline is {deadline_s:.3g} s",
            # While one waits a second, what is predicted shrinks by one and the headroom.
            retry_after_s=max(_LEAST_RETRY_S, expected_s - deadline_s * expected_s / done_s),
        )
        return no, expected_s

    def done_s(self, new: QueuedJob, batcher: Batcher[Any]) -> float:
        """Predicted seconds until `new` would be done if it came now."""
        now = self._clock()
        return self._done_s(batcher.ahead(new, self._demand(new.tower, now)), new, now)

    def predicted_s(self, classes: Sequence[ServiceClass], batcher: Batcher[Any]) -> dict[str, float]:
        """For each class what `done_s` says of a medium like the last one; 0 before there was any."""
        with self._lock:
            reference, tokens, app = self._last
            tower = reference()
        if tower is None:
            return dict.fromkeys((qos.name for qos in classes), 0.0)
        probes = (_Probe(qos=qos, tower=tower, tokens=tokens, app=app) for qos in classes)
        return {probe.qos.name: self.done_s(probe, batcher) for probe in probes}

    def predicted_of(self, qos: ServiceClass, batcher: Batcher[Any]) -> float:
        """The same for one class."""
        return self.predicted_s([qos], batcher)[qos.name]

    def half_done_s(self, batcher: Batcher[Any]) -> float:
        """Predicted seconds until half of what waits is done; 1 s before anything was measured."""
        load = batcher.load()
        with self._lock:
            if not any(p.measured for p in self._passes.values()):
                return _UNMEASURED_S
            all_s = self._running_s(load.running, self._clock()) + self._waiting_s(load)
        return max(_LEAST_RETRY_S, all_s / max(1, self._lanes()) / 2)

    def _done_s(self, ahead: BacklogAhead, new: QueuedJob, now: float) -> float:
        with self._lock:
            running = self._running_s(ahead.load.running, now)
            whole = self._waiting_s(ahead.load)
            fill = min(
                self._fill(*ahead.load.waiting[new.tower]), self._most_tokens(new.tower, new.due_s - now)
            )
            own = self._pass(new.tower).seconds(max(new.tokens, fill))
        before = whole * ahead.until / sum(tokens for tokens, _ in ahead.load.waiting.values())
        # It is done when its batch is, which may have others after it; but no later than all of them.
        queue = min(before + own, max(whole, before))
        lanes = max(1, self._lanes())
        return (running + queue) / lanes + own * (1 - 1 / lanes)

    def _running_s(self, running: Sequence[RunningBatch], now: float) -> float:
        left = (self._pass(b.tower).seconds(b.tokens) - (now - b.begun_s) for b in running)
        return math.fsum(max(0.0, seconds) for seconds in left)

    def _waiting_s(self, load: ServiceLoad) -> float:
        seconds = 0.0
        for tower, (tokens, items) in load.waiting.items():
            one = self._pass(tower)
            seconds += one.a_s * max(1.0, tokens / self._fill(tokens, items)) + one.b_s * tokens
        return seconds

    def _fill(self, tokens: int, items: int) -> float:
        """Tokens of a batch out of a queue of so many."""
        return max(1.0, min(tokens, self._max_tokens, self._max_items * tokens / items))

    def _most_tokens(self, tower: object, deadline_s: float) -> float:
        oldest = self._clock() - _REMEMBER_S
        about = (short_s for short_s, then in self._shortest_deadlines.values() if then >= oldest)
        shortest_s = min((deadline_s, *about))
        return self._pass(tower).tokens_within(_PART_OF_DEADLINE * shortest_s)

    def _note_deadline(self, flight: EncodeJob[Any], now: float) -> None:
        short_s, then = self._shortest_deadlines.get(flight.qos, (math.inf, now))
        if flight.shortest_deadline_s <= short_s or now - then > _REMEMBER_S:
            self._shortest_deadlines[flight.qos] = flight.shortest_deadline_s, now

    def _pass(self, tower: object) -> PassTime:
        return self._passes.get(tower) or PassTime()

    def _demand(self, tower: object, now: float) -> Mapping[ServiceClass, float]:
        with self._lock:
            token_s = self._pass(tower).seconds(self._max_tokens) / self._max_tokens / max(1, self._lanes())
            return {qos: rate * token_s for qos, rate in self._arrivals.tokens_a_second(now).items()}
