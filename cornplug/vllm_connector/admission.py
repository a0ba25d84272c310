"""Admission control for vLLM's API server: requests that would miss their deadline are rejected.

    CORNPLUG_CONFIG=qos.toml vllm serve MODEL --middleware cornplug.vllm_connector.admission.Admission

Classes of service are those of the encoder service ([qos], see `cornplug.qos`). `deadline_s` is the time to
the first token. A rejection has status 429 (the class exceeds its share, and the rest is reserved for other
classes) or 503 (the deadline cannot be met), with Retry-After and OpenAI's error format. Without [qos] every
request is admitted. If vLLM's metrics are missing (`--disable-log-stats`), every request is admitted and
counted as "blind".

Each API server process (`--api-server-count`) reads the metrics of all processes, and counts the requests
that it has admitted itself. Between two readings, at most half a second, it does not see requests that other
processes admit.

vLLM's request priority is not set, because it is a field of the body, which is passed on unread.

`TtftForecast` predicts a request's time to first token (TTFT) from vLLM's queue metrics. vLLM serves its
queue in order of arrival. The wait of a request is therefore the number of requests ahead, divided by the
rate of first tokens while requests wait (Little's law: J. Little, "A proof for the queuing formula L = λW",
1961). A class keeps its share because the number of requests in the queue is limited, not because of their
order:

    size of the queue = requests that the rate serves inside the shortest deadline of a class with a share
    ├ premium's share of it     kept free for premium, used or not
    ├ standard's share
    └ the rest                  requests of any class, in the order of arrival

A class without a share has no guarantee. Its deadline only limits its own requests.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, multiprocess
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cornplug.config import Config, load
from cornplug.qos import LEAST_SHARE, QosClasses, ServiceClass

Outcome = Literal["admitted", "blind", "over_share", "overloaded"]

_MEMORY_S: Final = 60.0
"""Seconds of saturation after which the weight of a measurement has dropped to a third."""
_LEAST_FIRST_TOKENS: Final = 3
"""Number of first tokens to measure under saturation before the rate is used."""
_LONGEST_RETRY_S: Final = 60.0
PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_STATUS: Final = {"over_share": (429, "RateLimitError"), "overloaded": (503, "ServiceUnavailableError")}
_PERIOD_S: Final = 0.5
_READ_S: Final = 0.25
"""Maximum time that a request waits for a reading. After it, the previous reading is used."""
_WAITING: Final = "vllm:num_requests_waiting"
_FIRST_TOKENS: Final = "vllm:time_to_first_token_seconds_count"
_PREFILL_SUM: Final = "vllm:request_prefill_time_seconds_sum"
_PREFILLS: Final = "vllm:request_prefill_time_seconds_count"
_NAMES: Final = (_WAITING, _FIRST_TOKENS, _PREFILL_SUM, _PREFILLS)


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
            self._believed = self._believed or self._first_tokens >= _LEAST_FIRST_TOKENS

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
        """Return the number of requests ahead: the queue of the last reading, plus requests sent since, minus
        requests begun since.
        """
        since = min(self._since_reading, sum(self._pending.values()))
        return last.waiting + since - rate * max(now_s - last.at_s, 0.0)


def _likely(requests: float) -> float:
    """Return the queue length that covers nearly every wait after `requests`: their number and three standard
    deviations. Times between first tokens have a standard deviation close to their mean, so that of a sum of
    n grows with the root of n.
    """
    return requests + 3 * math.sqrt(requests)


def _served(requests: float) -> float:
    """Return the inverse of `_likely`."""
    return (math.sqrt(2.25 + requests) - 1.5) ** 2


def _refused(outcome: Outcome, wait_s: float, retry_after_s: float) -> TtftVerdict:
    return TtftVerdict(
        outcome=outcome, wait_s=wait_s, retry_after_s=min(max(retry_after_s, 0.0), _LONGEST_RETRY_S)
    )


class Admission:
    """ASGI middleware. vLLM constructs it with only the application. The other arguments are for tests."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: Config | None = None,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        qos = (config or load()).qos
        self._app = app
        self._on = bool(qos.classes)
        self._classes = QosClasses(qos)
        self._forecast = TtftForecast(self._classes.all())
        self._registry = registry
        self._clock = clock
        self._outcomes, self._predicted = _meters(registry or REGISTRY)
        self._read_at_s = -math.inf
        self._reading: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._on or scope["type"] != "http" or scope["method"] != "POST" or _path(scope) not in PATHS:
            await self._app(scope, receive, send)
            return
        qos = self._classes.of_headers(Headers(scope=scope)).qos
        await self._fresh()
        verdict = self._forecast.decide(qos, self._clock())
        self._outcomes.labels(qos.name, verdict.outcome).inc()
        self._predicted.set(verdict.wait_s or 0.0)
        if verdict.admitted:
            await self._pass(qos, scope, receive, send)
        else:
            await _refusal(qos, verdict)(scope, receive, send)

    async def _pass(self, qos: ServiceClass, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, which counts as queued until its first bytes: the first token of a stream."""
        waits = True

        def first() -> None:
            nonlocal waits
            if waits:
                waits = False
                self._forecast.leaves(qos)

        async def seen(message: Message) -> None:
            if message["type"] == "http.response.body" and message.get("body"):
                first()
            await send(message)

        self._forecast.enters(qos)
        try:
            await self._app(scope, receive, seen)
        finally:
            first()

    async def _fresh(self) -> None:
        """Refresh a reading that is older than a period. Waits at most `_READ_S`."""
        if self._clock() - self._read_at_s < _PERIOD_S:
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait({self._reading}, timeout=_READ_S)

    async def _read(self) -> None:
        # With several API servers the metrics are in files, which take milliseconds to read.
        self._forecast.read(await asyncio.to_thread(_figures, self._registry, self._clock))
        self._read_at_s = self._clock()


def _figures(registry: CollectorRegistry | None, clock: Callable[[], float]) -> QueueReading | None:
    """Return vLLM's metrics, summed over its engines, or None if vLLM has none."""
    found: dict[str, float] = {}
    try:
        for sample in (s for family in _families(registry) for s in family.samples if s.name in _NAMES):
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except (OSError, ValueError):
        # Another API server's file was removed while it was read.
        return None
    if _WAITING not in found or _FIRST_TOKENS not in found:
        return None
    return QueueReading(
        at_s=clock(),
        waiting=found[_WAITING],
        first_tokens=found[_FIRST_TOKENS],
        prefill_s=found.get(_PREFILL_SUM, 0.0),
        prefills=found.get(_PREFILLS, 0.0),
    )


def _families(registry: CollectorRegistry | None) -> Iterable[Any]:
    if registry is None and "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        together = CollectorRegistry()
        multiprocess.MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return together.collect()
    # Only these of about sixty metrics.
    return (registry or REGISTRY).restricted_registry(_NAMES).collect()


def _refusal(qos: ServiceClass, verdict: TtftVerdict) -> JSONResponse:
    status, kind = _STATUS[verdict.outcome]
    wait_s = verdict.wait_s or 0.0
    why = (
        f"the predicted time to the first token is {wait_s:.1f} s, and the deadline of class {qos.name!r} is "
        f"{qos.deadline_s:g} s"
        if verdict.outcome == "overloaded"
        else f"class {qos.name!r} has used its share, and other classes reserve the rest"
    )
    retry_s = max(1, math.ceil(verdict.retry_after_s or 0.0))
    error = {"message": f"{why}; try again in {retry_s} s", "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status, headers={"retry-after": str(retry_s)})


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


@functools.lru_cache
def _meters(registry: CollectorRegistry) -> tuple[Counter, Gauge]:
    outcomes = Counter(
        "cornplug_admission_total",
        "Generation requests by class and outcome: admitted, blind (admitted because vLLM's metrics were "
        "not available), over_share (status 429), overloaded (status 503).",
        ("qos", "outcome"),
        registry=registry,
    )
    predicted = Gauge(
        "cornplug_admission_predicted_seconds",
        "Predicted time to the first token of the last request, 0 if there was no queue.",
        multiprocess_mode="mostrecent",
        registry=registry,
    )
    return outcomes, predicted
