"""Retry policy: the next service, the pause, the end. Decisions only, without clock and sockets.

    RetrySequence.next(now) ──> SendAttempt(url, timeout_s) ──> the client sends, informs `CircuitBreakers`
                            ├─> RetryPause(seconds)         ──> the client sleeps
                            └─> None                        ──> the client raises its last error

An embedding's key is a digest of its content, so a retry yields the same embedding: every attempt may be
repeated, at any service.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

ROUNDS: Final = 4
"""Largest number of passes of one request through its services."""
BASE_S: Final = 0.1
CAP_S: Final = 2.0
"""Back-off after the n-th failure in a row: uniform below min(CAP_S, BASE_S * 2^n), "full jitter"."""
BUSY_S: Final = 0.5
"""Mean pause after a refusal without a Retry-After."""
RETRY_AFTER_CAP_S: Final = 60.0
_LEAST_S: Final = 0.005
"""No attempt is made with less time left."""

Random = Callable[[], float]
"""Uniform in [0, 1)."""


@dataclass(frozen=True, slots=True)
class SendAttempt:
    """Send to `url`; the attempt fails without an answer after `timeout_s`."""

    url: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class RetryPause:
    """Send nothing for `seconds`."""

    seconds: float


@dataclass(slots=True)
class _Circuit:
    failures: int = 0
    failed_at: float = -math.inf
    down_until: float = 0.0
    """End of the pause after a missing answer. Any answer clears it."""
    busy_until: float = 0.0
    """End of the pause that the service asked for. Only time clears it."""

    @property
    def opens_at(self) -> float:
        return max(self.down_until, self.busy_until)


class CircuitBreakers:
    """Health of each service, as one client sees it. Times are of the caller's clock, in seconds.

    A service that fails gets one attempt per back-off from all requests together.
    """

    def __init__(self, urls: Iterable[str], random: Random) -> None:
        self._circuits = {url: _Circuit() for url in urls}
        self._random = random

    def watch(self, urls: Iterable[str]) -> None:
        """Add services that are not known yet; the others keep their state."""
        for url in urls:
            self._circuits.setdefault(url, _Circuit())

    def is_open(self, url: str, now: float) -> bool:
        """Whether this service may not be asked now."""
        return now < self._circuits[url].opens_at

    def opens_at(self, url: str) -> float:
        """Time from which the service may be asked again."""
        return self._circuits[url].opens_at

    def take(self, url: str, now: float) -> bool:
        """Whether to ask this service now. After a failure, the first attempt is the probe."""
        if self.is_open(url, now):
            return False
        circuit = self._circuits[url]
        if circuit.failures:
            # Until the probe is answered the others go elsewhere. It may die unheard: hence a time.
            circuit.down_until = now + _ceiling(circuit.failures)
        return True

    def answered(self, url: str) -> None:
        """The service gave an answer of any status."""
        circuit = self._circuits[url]
        circuit.failures, circuit.down_until = 0, 0.0

    def failed(self, url: str, now: float, *, sent: float) -> None:
        """The service gave no valid answer to the request sent at `sent`."""
        circuit = self._circuits[url]
        if sent < circuit.failed_at:
            # Only the first failure of a burst counts.
            return
        circuit.failed_at = now
        # At least a half: a jitter of nothing would let each request of a burst try a dead service.
        circuit.down_until = now + _ceiling(circuit.failures) * (0.5 + self._random() / 2)
        circuit.failures += 1

    def refused(self, url: str, now: float, retry_after_s: float | None) -> None:
        """The service is busy or draining; `retry_after_s` is its Retry-After, None without one."""
        self.answered(url)
        pause = BUSY_S * (0.5 + self._random()) if retry_after_s is None else retry_after_s
        circuit = self._circuits[url]
        circuit.busy_until = max(circuit.busy_until, now + min(max(pause, 0.0), RETRY_AFTER_CAP_S))


class RetrySequence:
    """The attempts of one request at its services.

    An attempt gets half of the time left while another service may still be asked, so that a service that
    hangs with open connections fails no request.
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
        """The next step; None: give up."""
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
