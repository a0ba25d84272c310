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
from weakref import WeakKeyDictionary

from cornplug.encoder_service.ahead import Ahead, Batch, Load
from cornplug.encoder_service.batcher import Batcher, Flight
from cornplug.encoder_service.pass_time import PassTime
from cornplug.qos import ServiceClass

_HEADROOM: Final = 1.1
"""A prediction has to fit this often into the deadline: publishing, the way back, other threads."""
_DEMAND_S: Final = 3.0
"""What came in over about so many seconds is expected to go on coming."""
_LEAST_RETRY_S: Final = 0.05
_UNMEASURED_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a request is not let in."""

    reason: Literal["overloaded", "over_share"]
    message: str
    retry_after_s: float
    """When it would be let in, if nobody else came."""


class Admission:
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
        self._come: dict[ServiceClass, tuple[float, float]] = {}
        """By class: tokens let in of late, fading, and when that was counted."""

    def computed(self, batch: Sequence[Flight[Any]], seconds: float) -> None:
        """A batch has left its executor. Features that were kept make it quick, and their share of
        the traffic is thereby in the price."""
        tokens = sum({flight.feature_key: flight.tokens for flight in batch}.values())
        with self._lock:
            self._passes.setdefault(batch[0].tower, PassTime()).observe(tokens, seconds)

    def tokens_within(self, tower: object, seconds: float) -> float:
        """As `PassTime.tokens_within`."""
        with self._lock:
            return self._pass(tower).tokens_within(seconds)

    def refusal(self, flight: Flight[Any], batcher: Batcher[Any]) -> Verdict | None:
        """Why `flight` cannot be done in time, or None: then it counts as let in."""
        now = self._clock()
        ahead = batcher.ahead(flight, self._demand(flight.tower, now))
        busy = ahead.load.running or len(ahead.of_class) > 0
        done_s = _HEADROOM * self._done_s(ahead, flight, now)
        if not (busy and done_s > flight.due_s - now and self._measured(flight.tower)):
            self._let_in(flight, now)
            return None
        mine, all_waiting = ahead.of_class.get(flight.qos, 0), sum(ahead.of_class.values())
        over = mine + flight.tokens > flight.qos.share * (all_waiting + flight.tokens)
        return Verdict(
            reason="over_share" if over and mine < all_waiting else "overloaded",
            message=f"it would take {done_s:.3g} s, and its deadline is {flight.patience_s:g} s",
            # While one waits a second, what is predicted shrinks by one and the headroom.
            retry_after_s=max(_LEAST_RETRY_S, (done_s - flight.patience_s) / _HEADROOM),
        )

    def done_s(self, flight: Flight[Any], batcher: Batcher[Any]) -> float:
        """Predicted seconds until `flight` would be done if it came now."""
        now = self._clock()
        return self._done_s(batcher.ahead(flight, self._demand(flight.tower, now)), flight, now)

    def half_done_s(self, batcher: Batcher[Any]) -> float:
        """Predicted seconds until half of what waits is done; 1 s before anything was measured."""
        load = batcher.load()
        with self._lock:
            if not any(p.measured for p in self._passes.values()):
                return _UNMEASURED_S
            all_s = self._running_s(load.running, self._clock()) + self._waiting_s(load)
        return max(_LEAST_RETRY_S, all_s / max(1, self._lanes()) / 2)

    def _done_s(self, ahead: Ahead, flight: Flight[Any], now: float) -> float:
        with self._lock:
            running = self._running_s(ahead.load.running, now)
            whole = self._waiting_s(ahead.load)
            own = self._pass(flight.tower).seconds(self._fill(*ahead.load.waiting[flight.tower]))
        before = whole * ahead.until / sum(tokens for tokens, _ in ahead.load.waiting.values())
        # It is done when its batch is, which may have others after it; but no later than all of them.
        queue = min(before + own, max(whole, before))
        lanes = max(1, self._lanes())
        return (running + queue) / lanes + own * (1 - 1 / lanes)

    def _running_s(self, running: Sequence[Batch], now: float) -> float:
        left = (self._pass(b.tower).seconds(b.tokens) - (now - b.begun_s) for b in running)
        return math.fsum(max(0.0, seconds) for seconds in left)

    def _waiting_s(self, load: Load) -> float:
        seconds = 0.0
        for tower, (tokens, items) in load.waiting.items():
            one = self._pass(tower)
            seconds += one.a_s * max(1.0, tokens / self._fill(tokens, items)) + one.b_s * tokens
        return seconds

    def _fill(self, tokens: int, items: int) -> float:
        """Tokens of a batch out of a queue of so many."""
        return max(1.0, min(tokens, self._max_tokens, self._max_items * tokens / items))

    def _measured(self, tower: object) -> bool:
        with self._lock:
            return self._pass(tower).measured

    def _pass(self, tower: object) -> PassTime:
        return self._passes.get(tower) or PassTime()

    def _let_in(self, flight: Flight[Any], now: float) -> None:
        with self._lock:
            self._come[flight.qos] = self._faded(flight.qos, now) + flight.tokens, now

    def _faded(self, qos: ServiceClass, now: float) -> float:
        tokens, then = self._come.get(qos, (0.0, now))
        return tokens * math.exp((then - now) / _DEMAND_S)

    def _demand(self, tower: object, now: float) -> Mapping[ServiceClass, float]:
        with self._lock:
            b_s = self._pass(tower).seconds(self._max_tokens) / self._max_tokens
            return {
                qos: self._faded(qos, now) / _DEMAND_S * b_s / max(1, self._lanes()) for qos in self._come
            }
