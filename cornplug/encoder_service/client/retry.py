"""Retry policy: which service is next, how long to pause, and when to give up. The module also parses a
service's responses: an embedding, a list of models, or an error to raise. It uses neither a clock nor
sockets.

    RetrySequence.next_step(now) ──> SendAttempt(url, timeout_s) ──> the client sends, and records the result
                                 ├─> RetryPause(seconds)         ──> the client sleeps
                                 └─> None                        ──> the client raises its last error

The key of an embedding is a digest of the media item's content, so a retry returns the same embedding. Every
attempt may be repeated at any service.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import msgspec

from cornplug.encoder_service.client.embedding_ref import EmbeddingRef, from_store
from cornplug.encoder_service.formats import engine_seal
from cornplug.errors import EncoderRefused, EncoderUnavailable
from cornplug.store.base import Store

MAX_ROUNDS: Final = 4
"""Maximum number of passes of one request through its services."""
BACKOFF_BASE_S: Final = 0.1
BACKOFF_CAP_S: Final = 2.0
"""Maximum backoff in seconds. After the n-th consecutive failure, the backoff is uniform in [c/2, c), where
c = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2^(n-1)). The random part of a pause between rounds is uniform in
[0, c)."""
BUSY_PAUSE_S: Final = 0.5
"""Mean pause in seconds after a refusal without a requested delay."""
MAX_RETRY_AFTER_S: Final = 60.0
MIN_ATTEMPT_S: Final = 0.005
"""Minimum remaining seconds for another attempt."""
Random = Callable[[], float]
"""Function that returns a uniform value in [0, 1)."""
_BUSY_STATUSES: Final = frozenset({429, 503})
"""Statuses for an overloaded or draining service, or for a class that exceeds its share. Another service may
accept the request now, or the same service may accept it later."""
_FAILED_STATUSES: Final = frozenset({500, 504})
"""Statuses for a request that failed or was too late. Another service may succeed."""


def retry_after_s(value: object, *, now_s: float | None = None) -> float | None:
    """Return the seconds until the server accepts a retry, at least 0, from a Retry-After header (RFC 9110,
    section 10.2.3).

    Returns None if `value` is neither a number of seconds nor an HTTP date.

    Args:
        value: The header's text, or a number of seconds from an error's body.
        now_s: Unix time to compare a date with. By default the current time.
    """
    if not isinstance(value, int | float | str):
        return None
    try:
        seconds = float(value)
    except ValueError:
        return _seconds_until(str(value), time.time() if now_s is None else now_s)
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _seconds_until(date: str, now_s: float) -> float | None:
    try:
        return max(0.0, parsedate_to_datetime(date).timestamp() - now_s)
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class SendAttempt:
    """Instruction to send the request to `url`. The attempt fails after `timeout_s` without a response."""

    url: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class RetryPause:
    """Instruction to send nothing for `seconds`."""

    seconds: float


@dataclass(slots=True)
class _Circuit:
    failures: int = 0
    failed_at: float = -math.inf
    down_until: float = 0.0
    """End of the pause after a failed attempt. Any response ends this pause early."""
    busy_until: float = 0.0
    """End of the pause that the service requested. Responses do not end this pause early."""

    @property
    def retry_at(self) -> float:
        return max(self.down_until, self.busy_until)


class CircuitBreakers:
    """Health of each service, as observed by one client. Times are on the caller's clock, in seconds.

    All requests together send at most one attempt per backoff interval to a failed service.
    """

    def __init__(self, urls: Iterable[str], random: Random) -> None:
        self._circuits = {url: _Circuit() for url in urls}
        self._random = random

    def add_services(self, urls: Iterable[str]) -> None:
        """Add services. Services that were added earlier keep their state."""
        for url in urls:
            self._circuits.setdefault(url, _Circuit())

    def is_open(self, url: str, now: float) -> bool:
        """Return whether this service must not be used now."""
        return now < self._circuits[url].retry_at

    def retry_at(self, url: str) -> float:
        """Return the time from which requests may be sent to the service again."""
        return self._circuits[url].retry_at

    def try_use(self, url: str, now: float) -> bool:
        """Return whether to use this service now. After a failure, only one request probes the service."""
        if self.is_open(url, now):
            return False
        circuit = self._circuits[url]
        if circuit.failures:
            # Other requests use other services until the probe returns, or until this time if the probe is
            # lost.
            circuit.down_until = now + _max_backoff_s(circuit.failures)
        return True

    def record_response(self, url: str) -> None:
        """Record that the service responded with any status."""
        circuit = self._circuits[url]
        circuit.failures, circuit.down_until = 0, 0.0

    def record_failure(self, url: str, now: float, *, sent_at: float) -> None:
        """Record that the service sent no valid response to a request that was sent at `sent_at`."""
        circuit = self._circuits[url]
        if sent_at < circuit.failed_at:
            # Only the first failure in a burst of requests counts.
            return
        circuit.failed_at = now
        # Use at least half of the backoff. With a jitter of 0, each request of a burst would try a dead
        # service.
        circuit.down_until = now + _max_backoff_s(circuit.failures) * (0.5 + self._random() / 2)
        circuit.failures += 1

    def record_refusal(self, url: str, now: float, retry_after_s: float | None) -> None:
        """Record that the service is busy or draining. `retry_after_s` is the delay that it requested, or
        None if it requested none."""
        self.record_response(url)
        pause = BUSY_PAUSE_S * (0.5 + self._random()) if retry_after_s is None else retry_after_s
        circuit = self._circuits[url]
        circuit.busy_until = max(circuit.busy_until, now + min(max(pause, 0.0), MAX_RETRY_AFTER_S))


class RetrySequence:
    """Sequence of attempts and pauses for one request.

    If another service is available, the timeout of an attempt is half of the remaining time. Requests thus do
    not fail if one service accepts connections but hangs.
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
        # If all services are already down, wait and try only once, so that the caller soon gets the error.
        down = all(circuits.is_open(url, now) for url in order)
        self._rounds = min(2, MAX_ROUNDS) if down else MAX_ROUNDS

    def next_step(self, now: float) -> SendAttempt | RetryPause | None:
        """Return the next step, or None to give up."""
        left = self._end - now
        if left < MIN_ATTEMPT_S:
            return None
        while self._position < len(self._order):
            url = self._order[self._position]
            self._position += 1
            if self._circuits.try_use(url, now):
                others = self._order[self._position :]
                spare = any(not self._circuits.is_open(other, now) for other in others)
                return SendAttempt(url, left / 2 if spare else left)
        self._position = 0
        self._round += 1
        if self._round >= self._rounds:
            return None
        reopening = max(0.0, min(map(self._circuits.retry_at, self._order)) - now)
        pause = reopening + self._random() * _max_backoff_s(self._round - 1)
        return RetryPause(pause) if pause + MIN_ATTEMPT_S < left else None


def _max_backoff_s(failures: int) -> float:
    return min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** min(failures, 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """HTTP response with its complete body. Header names are in lower case."""

    url: str
    status: int
    headers: dict[str, str]
    body: bytes


class RetryLater(Exception):
    """Raised if the service is running but requests a pause. `refusal` is the error to raise to the
    caller."""

    def __init__(self, refusal: EncoderRefused, retry_after_s: float | None) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
        self.retry_after_s = retry_after_s


class RemoteFailure(Exception):
    """Raised if the service is running but failed on this request. `refusal` is the error to raise to the
    caller."""

    def __init__(self, refusal: EncoderRefused) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def parse_embedding(response: HttpResponse, store: Store | None) -> EmbeddingRef | None:
    """Return the embedding, or None if its bytes are neither in the response nor in the store.

    Raises EncoderUnavailable("encoder_bad_response"), and the same errors as `raise_for_status`.
    """
    raise_for_status(response)
    try:
        if response.headers.get("content-type", "").startswith(engine_seal.EMBEDDING_MEDIA_TYPE):
            meta, data = engine_seal.unpack_embedding(response.body)
            return EmbeddingRef.from_response(
                key=bytes.fromhex(meta["key"]),
                shape=tuple(meta["shape"]),
                dtype=str(meta["dtype"]),
                origin=str(meta["origin"]),
                service_time_s=float(meta["service_time_s"]),
                data=data,
                handle=meta["handle"],
            )
        meta = msgspec.json.decode(response.body)
        if store is None:
            return None
        return from_store(
            store,
            bytes.fromhex(meta["key"]),
            origin=str(meta["origin"]),
            service_time_s=float(meta["service_time_s"]),
            handle=meta.get("handle"),
        )
    except (KeyError, ValueError, TypeError) as e:
        raise _bad_response(response, repr(e)) from e


def parse_models(response: HttpResponse) -> list[dict[str, Any]]:
    """Return the models in a reply to `GET /v1/models`. Raises the same errors as
    `parse_embedding`."""
    raise_for_status(response)
    try:
        return list(msgspec.json.decode(response.body)["models"])
    except (KeyError, ValueError, TypeError) as e:
        raise _bad_response(response, repr(e)) from e


def raise_for_status(response: HttpResponse) -> None:
    """Raise an exception unless the status is 200.

    Raises EncoderUnavailable("encoder_bad_response") if the body is invalid. Otherwise raises RetryLater for
    429 and 503, and for 500 and 504 with a retry delay (in the body or the Retry-After header), RemoteFailure
    for other 500 and 504 responses, and EncoderRefused with the service's reason for all other statuses.
    """
    if response.status == 200:
        return
    try:
        error = msgspec.json.decode(response.body)["error"]
        refusal = EncoderRefused(str(error["message"]), reason=str(error["reason"]))
        precise = error.get("retry_after_s")
    except (KeyError, ValueError, TypeError, AttributeError) as e:
        raise _bad_response(response, f"HTTP {response.status}") from e
    pause_s = retry_after_s(precise)
    if pause_s is None:
        pause_s = retry_after_s(response.headers.get("retry-after"))
    if response.status in _BUSY_STATUSES or (response.status in _FAILED_STATUSES and pause_s is not None):
        raise RetryLater(refusal, pause_s)
    if response.status in _FAILED_STATUSES:
        raise RemoteFailure(refusal)
    raise refusal


def _bad_response(response: HttpResponse, why: str) -> EncoderUnavailable:
    return EncoderUnavailable(
        f"{response.url} is not an encoder service: {why}", reason="encoder_bad_response"
    )
