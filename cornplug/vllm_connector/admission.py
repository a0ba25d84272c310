"""Admission control for vLLM's API server. It rejects requests that would miss their deadline.

    CORNPLUG_CONFIG=qos.toml vllm serve MODEL --middleware cornplug.vllm_connector.admission.Admission

The service classes are the same as the encoder service's ([qos], see `cornplug.qos`). A class's
`deadline_s` limits the time to the first token. A rejected request gets status 429 or 503, with Retry-After
and OpenAI's error format. Status 429 means that its class exceeds its share while the remaining capacity is
reserved for other classes. Status 503 means that its deadline cannot be met. Without [qos], every request is
admitted. Without vLLM's metrics (`--disable-log-stats`), every request is admitted and counted as "blind".

Each API server process (`--api-server-count`) reads the metrics of all processes, and also counts the
requests that it has admitted itself. Requests that other processes admit become visible at the next reading
of the metrics, at most half a second later.

vLLM's request priority is not set, because it is a field of the request's body, which the middleware does
not read.

`TtftForecast` predicts a request's time to first token (TTFT) from vLLM's queue metrics. vLLM serves its
queue in order of arrival. The wait of a request is therefore the number of requests ahead of it, divided by
the rate of first tokens while requests wait (Little's law: J. Little, "A proof for the queuing formula L =
λW", 1961). Classes keep their shares because the number of queued requests is limited per class, not because
of the order in which requests are served:

    size of the queue = requests served at this rate within the shortest deadline of a class with a share
    ├ premium's share           kept free for premium, used or not
    ├ standard's share
    └ the rest                  requests of any class, in the order of arrival

A class without a share has no guaranteed capacity. Its deadline only limits the class's own requests.
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
from cornplug.qos import MIN_SHARE, QosClasses, ServiceClass

Outcome = Literal["admitted", "blind", "over_share", "overloaded"]

_RATE_TIME_CONSTANT_S: Final = 60.0
"""Time constant of the measured rate, in seconds of time during which requests are queued. After one time
constant, the weight of a measurement has dropped to about a third."""
_MIN_FIRST_TOKENS: Final = 3
"""Minimum number of first tokens for a prediction. Only tokens that arrive while requests are queued
count."""
_MAX_RETRY_S: Final = 60.0
PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_STATUS: Final = {"over_share": (429, "RateLimitError"), "overloaded": (503, "ServiceUnavailableError")}
_READ_INTERVAL_S: Final = 0.5
_READ_TIMEOUT_S: Final = 0.25
"""Maximum seconds that a request waits for a new reading of vLLM's metrics. After this time, the previous
reading is used."""
_WAITING: Final = "vllm:num_requests_waiting"
_FIRST_TOKENS: Final = "vllm:time_to_first_token_seconds_count"
_PREFILL_SUM: Final = "vllm:request_prefill_time_seconds_sum"
_PREFILLS: Final = "vllm:request_prefill_time_seconds_count"
_METRIC_NAMES: Final = (_WAITING, _FIRST_TOKENS, _PREFILL_SUM, _PREFILLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReading:
    """vLLM's queue metrics at one time, summed over its engines."""

    time_s: float
    waiting: float
    """Number of requests in the engines' queues."""
    first_tokens: float
    """Number of requests that have produced their first token since the engines started."""
    prefill_s: float = 0.0
    """Total prefill time in seconds of all finished requests."""
    prefills: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftVerdict:
    """Admission decision for one request."""

    outcome: Outcome
    wait_s: float | None = None
    """Predicted seconds from the request's arrival to its first token, or None if no request is queued or no
    rate was measured."""
    retry_after_s: float | None = None
    """Seconds after which a rejected request would be admitted if no other request arrived, or None if the
    request is admitted."""

    @property
    def is_admitted(self) -> bool:
        return self.outcome in ("admitted", "blind")


class TtftForecast:
    """Predicts the time to first token for requests that pass through one API server process. Used by one
    event loop."""

    def __init__(self, classes: Sequence[ServiceClass]) -> None:
        self._shares: Final[Mapping[str, float]] = {c.name: c.share for c in classes}
        promised = [c.deadline_s for c in classes if c.deadline_s is not None and c.share > MIN_SHARE]
        self._class_deadlines_s: Final = sorted(promised)
        self._pending = dict.fromkeys(self._shares, 0)
        self._sent_since_reading = 0
        self._last_reading: QueueReading | None = None
        self._saturated_s = 0.0
        self._first_tokens = 0.0
        self._prefill_s = 0.0
        self._prefills = 0.0
        self._has_rate = False

    def update(self, reading: QueueReading | None) -> None:
        """Update the forecast with a new reading of vLLM's metrics, or with None if the metrics cannot be
        read."""
        last, self._last_reading = self._last_reading, reading
        self._sent_since_reading = 0
        if (
            last is None
            or reading is None
            or reading.time_s <= last.time_s
            or reading.first_tokens < last.first_tokens
        ):
            return
        if reading.prefills > last.prefills:
            self._prefill_s, self._prefills = reading.prefill_s, reading.prefills
        # While requests wait, the rate of first tokens shows the engine's speed. Otherwise it shows the
        # arrival rate.
        if last.waiting > 0 and reading.waiting > 0:
            seconds = reading.time_s - last.time_s
            kept = math.exp(-seconds / _RATE_TIME_CONSTANT_S)
            self._saturated_s = self._saturated_s * kept + seconds
            self._first_tokens = self._first_tokens * kept + reading.first_tokens - last.first_tokens
            self._has_rate = self._has_rate or self._first_tokens >= _MIN_FIRST_TOKENS

    def record_sent(self, qos: ServiceClass) -> None:
        """Record that a request of this service class was sent to the engine."""
        self._pending[qos.name] += 1
        self._sent_since_reading += 1

    def record_first_token(self, qos: ServiceClass) -> None:
        """Record that a request of this service class has received its first token, or has ended without
        one."""
        self._pending[qos.name] -= 1

    def decide(self, qos: ServiceClass, now_s: float) -> TtftVerdict:
        """Decide whether to admit a request of this service class now."""
        if self._last_reading is None:
            return TtftVerdict(outcome="blind")
        if not self._has_rate:
            return TtftVerdict(outcome="admitted")
        rate = max(self._first_tokens / self._saturated_s, 1e-6)
        queue = self._estimate_queue(self._last_reading, now_s, rate)
        if queue <= 0:
            return TtftVerdict(outcome="admitted")
        prefill_s = self._prefill_s / self._prefills if self._prefills else 0.0
        wait_s = _upper_queue_length(queue + 1) / rate + prefill_s
        if qos.deadline_s is not None and wait_s > qos.deadline_s:
            return _rejected_verdict("overloaded", wait_s, wait_s - qos.deadline_s)
        max_queues = (
            _queue_length_for(rate * max(deadline_s - prefill_s, 0.0))
            for deadline_s in self._class_deadlines_s
        )
        # Do not reserve capacity for a deadline that would be missed even with an empty queue.
        max_queue = next((max_queue for max_queue in max_queues if max_queue >= 1), math.inf)
        in_queue = min(queue / max(sum(self._pending.values()), 1), 1.0)
        if (
            math.isfinite(max_queue)
            and self._pending[qos.name] * in_queue + 1 > self._shares[qos.name] * max_queue
        ):
            kept_free = sum(
                max(share * max_queue - self._pending[name] * in_queue, 0.0)
                for name, share in self._shares.items()
                if name != qos.name
            )
            over = queue + 1 + kept_free - max_queue
            if over > 0:
                return _rejected_verdict("over_share", wait_s, over / rate)
        return TtftVerdict(outcome="admitted", wait_s=wait_s)

    def _estimate_queue(self, last: QueueReading, now_s: float, rate: float) -> float:
        """Estimate the number of requests ahead of a new request: requests queued at the last reading of the
        metrics, plus requests sent since, minus requests that the engine has started since."""
        since = min(self._sent_since_reading, sum(self._pending.values()))
        return last.waiting + since - rate * max(now_s - last.time_s, 0.0)


def _upper_queue_length(requests: float) -> float:
    """Return an upper estimate of a queue's length: `requests` plus three standard deviations. Nearly all
    real queues are shorter.

    The standard deviation of the time between first tokens is close to its mean, so the standard deviation of
    a sum of n such times grows with the square root of n.
    """
    return requests + 3 * math.sqrt(requests)


def _queue_length_for(requests: float) -> float:
    """Return the queue length for which `_upper_queue_length` returns `requests`."""
    return (math.sqrt(2.25 + requests) - 1.5) ** 2


def _rejected_verdict(outcome: Outcome, wait_s: float, retry_after_s: float) -> TtftVerdict:
    return TtftVerdict(
        outcome=outcome, wait_s=wait_s, retry_after_s=min(max(retry_after_s, 0.0), _MAX_RETRY_S)
    )


class Admission:
    """ASGI middleware that rejects generation requests which would miss their deadline. vLLM constructs it
    with only the application. The other arguments are for tests."""

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
        self._enabled = bool(qos.classes)
        self._classes = QosClasses(qos)
        self._forecast = TtftForecast(self._classes.ranked_classes())
        self._registry = registry
        self._clock = clock
        self._outcomes, self._predicted = _create_metrics(registry or REGISTRY)
        self._read_at_s = -math.inf
        self._read_task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            not self._enabled
            or scope["type"] != "http"
            or scope["method"] != "POST"
            or _request_path(scope) not in PATHS
        ):
            await self._app(scope, receive, send)
            return
        qos = self._classes.identify_caller(Headers(scope=scope)).qos
        await self._refresh_metrics()
        verdict = self._forecast.decide(qos, self._clock())
        self._outcomes.labels(qos.name, verdict.outcome).inc()
        self._predicted.set(verdict.wait_s or 0.0)
        if verdict.is_admitted:
            await self._forward(qos, scope, receive, send)
        else:
            await _rejection_response(qos, verdict)(scope, receive, send)

    async def _forward(self, qos: ServiceClass, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an admitted request to the application.

        The request counts as queued until the first bytes of its response body are sent. In a stream, this is
        the first token.
        """
        waits = True

        def first() -> None:
            nonlocal waits
            if waits:
                waits = False
                self._forecast.record_first_token(qos)

        async def seen(message: Message) -> None:
            if message["type"] == "http.response.body" and message.get("body"):
                first()
            await send(message)

        self._forecast.record_sent(qos)
        try:
            await self._app(scope, receive, seen)
        finally:
            first()

    async def _refresh_metrics(self) -> None:
        """Read vLLM's metrics again if the last reading is older than `_READ_INTERVAL_S`. Waits at most
        `_READ_TIMEOUT_S` for the result."""
        if self._clock() - self._read_at_s < _READ_INTERVAL_S:
            return
        if self._read_task is None or self._read_task.done():
            self._read_task = asyncio.create_task(self._read_metrics())
        await asyncio.wait({self._read_task}, timeout=_READ_TIMEOUT_S)

    async def _read_metrics(self) -> None:
        # With several API servers, the metrics are in files, and reading these takes milliseconds.
        self._forecast.update(await asyncio.to_thread(_read_queue_metrics, self._registry, self._clock))
        self._read_at_s = self._clock()


def _read_queue_metrics(
    registry: CollectorRegistry | None, clock: Callable[[], float]
) -> QueueReading | None:
    """Read vLLM's queue metrics, summed over its engines. Returns None if vLLM does not export them."""
    found: dict[str, float] = {}
    try:
        for sample in (
            s for family in _metric_families(registry) for s in family.samples if s.name in _METRIC_NAMES
        ):
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except (OSError, ValueError):
        # Another API server's metrics file was removed while it was read.
        return None
    if _WAITING not in found or _FIRST_TOKENS not in found:
        return None
    return QueueReading(
        time_s=clock(),
        waiting=found[_WAITING],
        first_tokens=found[_FIRST_TOKENS],
        prefill_s=found.get(_PREFILL_SUM, 0.0),
        prefills=found.get(_PREFILLS, 0.0),
    )


def _metric_families(registry: CollectorRegistry | None) -> Iterable[Any]:
    if registry is None and "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        together = CollectorRegistry()
        multiprocess.MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return together.collect()
    # vLLM has about sixty metrics. Collect only the metrics that the forecast uses.
    return (registry or REGISTRY).restricted_registry(_METRIC_NAMES).collect()


def _rejection_response(qos: ServiceClass, verdict: TtftVerdict) -> JSONResponse:
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


def _request_path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


@functools.lru_cache
def _create_metrics(registry: CollectorRegistry) -> tuple[Counter, Gauge]:
    outcomes = Counter(
        "cornplug_admission_total",
        "Generation requests: admitted, blind (admitted without vLLM's metrics), over_share (status 429), "
        "overloaded (status 503).",
        ("qos", "outcome"),
        registry=registry,
    )
    predicted = Gauge(
        "cornplug_admission_predicted_seconds",
        "Predicted seconds to the first token of the last request, 0 without a queue.",
        multiprocess_mode="mostrecent",
        registry=registry,
    )
    return outcomes, predicted
