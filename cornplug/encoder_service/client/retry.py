"""Which service next, how long to wait, when to give up: decisions only, no clock and no socket.

    Attempts.next(now) ──> Try(url, timeout_s) ──> the shell sends, then tells `CircuitBreakers`
                       ├─> Wait(seconds)       ──> the shell sleeps
                       └─> None                ──> the shell raises what it saw last

An embedding is named by what it is made of, so asking again can only find or make the same one:
every attempt may be repeated, at any service.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

ROUNDS: Final = 4
"""How often one request goes through its services before it gives up early."""
BASE_S: Final = 0.1
CAP_S: Final = 2.0
"""Back-off after the n-th failure in a row: uniform below min(CAP_S, BASE_S * 2^n), "full jitter"."""
BUSY_S: Final = 0.5
"""How long a service that refuses without a Retry-After is left alone, about."""
RETRY_AFTER_CAP_S: Final = 60.0
_LEAST_S: Final = 0.005
"""With less time than this left nothing is begun."""

Random = Callable[[], float]
"""Uniform in [0, 1)."""


@dataclass(frozen=True, slots=True)
class SendAttempt:
    """Send to `url`; without an answer after `timeout_s` it has failed."""

    url: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class RetryPause:
    """No service may be asked for so long."""

    seconds: float


@dataclass(slots=True)
class _Circuit:
    failures: int = 0
    failed_at: float = -math.inf
    down_until: float = 0.0
    """Of a service that gave no answer. Any answer clears it."""
    busy_until: float = 0.0
    """Of one that answers, and asked to be left alone. Only time clears it."""

    @property
    def opens_at(self) -> float:
        return max(self.down_until, self.busy_until)


class CircuitBreakers:
    """What one client has seen of each service. Times are the caller's, in seconds.

    A service that fails gets one attempt per back-off, whoever makes it, not one per request.
    """

    def __init__(self, urls: Iterable[str], random: Random) -> None:
        self._circuits = {url: _Circuit() for url in urls}
        self._random = random

    def is_open(self, url: str, now: float) -> bool:
        """Whether nobody may ask this service now."""
        return now < self._circuits[url].opens_at

    def opens_at(self, url: str) -> float:
        """When it may be asked again."""
        return self._circuits[url].opens_at

    def take(self, url: str, now: float) -> bool:
        """Whether to ask this service now. Of one that has failed, the first to take it is its probe."""
        if self.is_open(url, now):
            return False
        circuit = self._circuits[url]
        if circuit.failures:
            # Until the probe is answered the others go elsewhere. It may die unheard: hence a time.
            circuit.down_until = now + _ceiling(circuit.failures)
        return True

    def answered(self, url: str) -> None:
        """It gave an answer, whichever."""
        circuit = self._circuits[url]
        circuit.failures, circuit.down_until = 0, 0.0

    def failed(self, url: str, now: float, *, sent: float) -> None:
        """It gave none, or garbage, to what was sent at `sent`."""
        circuit = self._circuits[url]
        if sent < circuit.failed_at:
            # Of one burst the first failure tells all.
            return
        circuit.failed_at = now
        # At least a half: a jitter of nothing would let each request of a burst try a dead service.
        circuit.down_until = now + _ceiling(circuit.failures) * (0.5 + self._random() / 2)
        circuit.failures += 1

    def refused(self, url: str, now: float, retry_after_s: float | None) -> None:
        """It is alive, and too busy or draining; `retry_after_s` as it said, None: it did not."""
        self.answered(url)
        pause = BUSY_S * (0.5 + self._random()) if retry_after_s is None else retry_after_s
        circuit = self._circuits[url]
        circuit.busy_until = max(circuit.busy_until, now + min(max(pause, 0.0), RETRY_AFTER_CAP_S))


class RetrySequence:
    """One request's way through its services.

    With several services an attempt gets half of the time that is left, as long as another one
    could still be asked: what has stopped without closing its connections costs no request.
    """

    def __init__(
        self,
        order: Sequence[str],
        circuits: CircuitBreakers,
        *,
        now: float,
        deadline_s: float,
        random: Random,
    ) -> None:
        self._order = order
        self._circuits = circuits
        self._end = now + deadline_s
        self._random = random
        self._round = 0
        self._position = 0
        # Where all were down before, one wait and one try is enough: the caller learns it soon.
        down = all(circuits.is_open(url, now) for url in order)
        self._rounds = min(2, ROUNDS) if down else ROUNDS

    def next(self, now: float) -> SendAttempt | RetryPause | None:
        """What to do now; None: give up."""
        left = self._end - now
        if left < _LEAST_S:
            return None
        while self._position < len(self._order):
            url = self._order[self._position]
            self._position += 1
            if self._circuits.take(url, now):
                others = self._order[self._position :]
                spare = any(not self._circuits.is_open(other, now) for other in others)
                return SendAttempt(url, left / 2 if spare else left)
        self._position = 0
        self._round += 1
        if self._round >= self._rounds:
            return None
        reopening = max(0.0, min(map(self._circuits.opens_at, self._order)) - now)
        pause = reopening + self._random() * _ceiling(self._round - 1)
        return RetryPause(pause) if pause + _LEAST_S < left else None


def _ceiling(failures: int) -> float:
    return min(CAP_S, BASE_S * 2.0 ** min(failures, 16))
