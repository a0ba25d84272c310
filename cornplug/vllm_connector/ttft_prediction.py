"""Predicts a request's time to first token (TTFT) from vLLM's queue metrics. No I/O, no clock.

vLLM serves its queue in order of arrival. The wait of a request is therefore the number of requests ahead,
divided by the rate of first tokens while requests wait (Little's law: J. Little, "A proof for the queuing
formula L = λW", 1961). A class keeps its share because the number of requests in the queue is limited, not
because of their order:

    room of the queue = requests that the rate serves inside the shortest deadline of a class with a share
    ├ premium's share of it     kept free for premium, used or not
    ├ standard's share
    └ the rest                  requests of any class, in the order of arrival

A class without a share has no guarantee. Its deadline only limits its own requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cornplug.qos import LEAST_SHARE, ServiceClass

Outcome = Literal["admitted", "blind", "over_share", "overloaded"]

_MEMORY_S: Final = 60.0
"""Seconds of saturation after which the weight of a measurement has dropped to a third."""
_FIRST_TOKENS: Final = 3
"""Number of first tokens to measure under saturation before the rate is used."""
_LONGEST_RETRY_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReading:
    """vLLM's counters at one time, summed over its engines."""

    at_s: float
    waiting: float
    """Requests in the engine's queue."""
    first_tokens: float
    """Requests that have had their first token, since the start."""
    prefill_s: float = 0.0
    """Seconds of prefill of all finished requests."""
    prefills: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftVerdict:
    """Decision about one request."""

    outcome: Outcome
    wait_s: float | None = None
    """Predicted time to the first token, or None if there is no queue or no measurement."""
    retry_after_s: float | None = None
    """Seconds after which the request would be admitted if no other request arrived. Set only for
    rejections."""

    @property
    def admitted(self) -> bool:
        return self.outcome in ("admitted", "blind")


class TtftForecast:
    """Forecast of one engine's queue from one API server's point of view. Used by one event loop."""

    def __init__(self, classes: Sequence[ServiceClass]) -> None:
        self._shares: Final[Mapping[str, float]] = {c.name: c.share for c in classes}
        promised = [c.deadline_s for c in classes if c.deadline_s is not None and c.share > LEAST_SHARE]
        self._promised_s: Final = sorted(promised)
        self._pending = dict.fromkeys(self._shares, 0)
        self._since_reading = 0
        self._last: QueueReading | None = None
        self._saturated_s = 0.0
        self._first_tokens = 0.0
        self._prefill_s = 0.0
        self._prefills = 0.0
        self._believed = False

    def read(self, now: QueueReading | None) -> None:
        """Update with a new reading, or None if vLLM's metrics cannot be read."""
        last, self._last = self._last, now
        self._since_reading = 0
        if last is None or now is None or now.at_s <= last.at_s or now.first_tokens < last.first_tokens:
            return
        if now.prefills > last.prefills:
            self._prefill_s, self._prefills = now.prefill_s, now.prefills
        # Only while requests wait does the rate show the engine's speed, and not the arrival rate.
        if last.waiting > 0 and now.waiting > 0:
            seconds = now.at_s - last.at_s
            kept = math.exp(-seconds / _MEMORY_S)
            self._saturated_s = self._saturated_s * kept + seconds
            self._first_tokens = self._first_tokens * kept + now.first_tokens - last.first_tokens
            self._believed = self._believed or self._first_tokens >= _FIRST_TOKENS

    def enters(self, qos: ServiceClass) -> None:
        """Record that a request of this class was sent to the engine."""
        self._pending[qos.name] += 1
        self._since_reading += 1

    def leaves(self, qos: ServiceClass) -> None:
        """Record that the request has its first token, or has ended without one."""
        self._pending[qos.name] -= 1

    def decide(self, qos: ServiceClass, now_s: float) -> TtftVerdict:
        """Decide whether a request of this class may go to the engine now."""
        if self._last is None:
            return TtftVerdict(outcome="blind")
        if not self._believed:
            return TtftVerdict(outcome="admitted")
        rate = max(self._first_tokens / self._saturated_s, 1e-6)
        queue = self._queue(self._last, now_s, rate)
        if queue <= 0:
            return TtftVerdict(outcome="admitted")
        prefill_s = self._prefill_s / self._prefills if self._prefills else 0.0
        wait_s = _likely(queue + 1) / rate + prefill_s
        if qos.deadline_s is not None and wait_s > qos.deadline_s:
            return _refused("overloaded", wait_s, wait_s - qos.deadline_s)
        rooms = (_served(rate * max(deadline_s - prefill_s, 0.0)) for deadline_s in self._promised_s)
        # Nothing is reserved for a deadline that would be missed even with an empty queue.
        room = next((room for room in rooms if room >= 1), math.inf)
        in_queue = min(queue / max(sum(self._pending.values()), 1), 1.0)
        if math.isfinite(room) and self._pending[qos.name] * in_queue + 1 > self._shares[qos.name] * room:
            kept_free = sum(
                max(share * room - self._pending[name] * in_queue, 0.0)
                for name, share in self._shares.items()
                if name != qos.name
            )
            over = queue + 1 + kept_free - room
            if over > 0:
                return _refused("over_share", wait_s, over / rate)
        return TtftVerdict(outcome="admitted", wait_s=wait_s)

    def _queue(self, last: QueueReading, now_s: float, rate: float) -> float:
        """Requests ahead: the queue of the last reading, plus requests sent since, minus requests begun
        since."""
        since = min(self._since_reading, sum(self._pending.values()))
        return last.waiting + since - rate * max(now_s - last.at_s, 0.0)


def _likely(requests: float) -> float:
    """Queue length that covers nearly every wait after `requests`: their number and three standard
    deviations. Times between first tokens have a standard deviation close to their mean, so that of a sum of
    n grows with the root of n."""
    return requests + 3 * math.sqrt(requests)


def _served(requests: float) -> float:
    """Inverse of `_likely`."""
    return (math.sqrt(2.25 + requests) - 1.5) ** 2


def _refused(outcome: Outcome, wait_s: float, retry_after_s: float) -> TtftVerdict:
    return TtftVerdict(
        outcome=outcome, wait_s=wait_s, retry_after_s=min(max(retry_after_s, 0.0), _LONGEST_RETRY_S)
    )
