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
from cornplug.qos import LEAST_SHARE, QosClasses, ServiceClass

Outcome = Literal["admitted", "blind", "over_share", "overloaded"]

_MEMORY_S: Final = 60.0
"""Time constant of the measured rate, in seconds of time during which requests are queued. After one time
constant, the weight of a measurement has dropped to about a third."""
_LEAST_FIRST_TOKENS: Final = 3
"""Minimum number of first tokens for a prediction. Only tokens that arrive while requests are queued
count."""
_LONGEST_RETRY_S: Final = 60.0
PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_STATUS: Final = {"over_share": (429, "RateLimitError"), "overloaded": (503, "ServiceUnavailableError")}
_PERIOD_S: Final = 0.5
_READ_S: Final = 0.25
"""Maximum seconds that a request waits for a new reading of vLLM's metrics. After this time, the previous
reading is used."""
_WAITING: Final = "vllm:num_requests_waiting"
_FIRST_TOKENS: Final = "vllm:time_to_first_token_seconds_count"
_PREFILL_SUM: Final = "vllm:request_prefill_time_seconds_sum"
_PREFILLS: Final = "vllm:request_prefill_time_seconds_count"
_NAMES: Final = (_WAITING, _FIRST_TOKENS, _PREFILL_SUM, _PREFILLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReading:
    """vLLM's queue metrics at one time, summed over its engines."""

    at_s: float
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
    def admitted(self) -> bool:
        return self.outcome in ("admitted", "blind")


class TtftForecast:
    """Predicts the time to first token for requests that pass through one API server process. Used by one
    event loop."""

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
        """Update the forecast with a new reading of vLLM's metrics, or with None if the metrics cannot be
        read."""
        last, self._last = self._last, now
        self._since_reading = 0
        if last is None or now is None or now.at_s <= last.at_s or now.first_tokens < last.first_tokens:
            return
        if now.prefills > last.prefills:
            self._prefill_s, self._prefills = now.prefill_s, now.prefills
        # While requests wait, the rate of first tokens shows the engine's speed. Otherwise it shows the
        # arrival rate.
        if last.waiting > 0 and now.waiting > 0:
            seconds = now.at_s - last.at_s
            kept = math.exp(-seconds / _MEMORY_S)
            self._saturated_s = self._saturated_s * kept + seconds
            self._first_tokens = self._first_tokens * kept + now.first_tokens - last.first_tokens
            self._believed = self._believed or self._first_tokens >= _LEAST_FIRST_TOKENS

    def enters(self, qos: ServiceClass) -> None:
        """Record that a request of this service class was sent to the engine."""
        self._pending[qos.name] += 1
        self._since_reading += 1

    def leaves(self, qos: ServiceClass) -> None:
        """Record that a request of this service class has received its first token, or has ended without
        one."""
        self._pending[qos.name] -= 1

    def decide(self, qos: ServiceClass, now_s: float) -> TtftVerdict:
        """Decide whether to admit a request of this service class now."""
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
        # Do not reserve capacity for a deadline that would be missed even with an empty queue.
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
        """Estimate the number of requests ahead of a new request: requests queued at the last reading of the
        metrics, plus requests sent since, minus requests that the engine has started since."""
        since = min(self._since_reading, sum(self._pending.values()))
        return last.waiting + since - rate * max(now_s - last.at_s, 0.0)


def _likely(requests: float) -> float:
    """Return an upper estimate of a queue's length: `requests` plus three standard deviations. Nearly all
    real queues are shorter.

    The standard deviation of the time between first tokens is close to its mean, so the standard deviation of
    a sum of n such times grows with the square root of n.
    """
    return requests + 3 * math.sqrt(requests)


def _served(requests: float) -> float:
    """Return the queue length for which `_likely` returns `requests`."""
    return (math.sqrt(2.25 + requests) - 1.5) ** 2


def _refused(outcome: Outcome, wait_s: float, retry_after_s: float) -> TtftVerdict:
    return TtftVerdict(
        outcome=outcome, wait_s=wait_s, retry_after_s=min(max(retry_after_s, 0.0), _LONGEST_RETRY_S)
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
        """Pass an admitted request to the application.

        The request counts as queued until the first bytes of its response body are sent. In a stream, this is
        the first token.
        """
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
        """Read vLLM's metrics again if the last reading is older than `_PERIOD_S`. Waits at most `_READ_S`
        for the result."""
        if self._clock() - self._read_at_s < _PERIOD_S:
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        await asyncio.wait({self._reading}, timeout=_READ_S)

    async def _read(self) -> None:
        # With several API servers, the metrics are in files, and reading these takes milliseconds.
        self._forecast.read(await asyncio.to_thread(_figures, self._registry, self._clock))
        self._read_at_s = self._clock()


def _figures(registry: CollectorRegistry | None, clock: Callable[[], float]) -> QueueReading | None:
    """Read vLLM's queue metrics, summed over its engines. Returns None if vLLM does not export them."""
    found: dict[str, float] = {}
    try:
        for sample in (s for family in _families(registry) for s in family.samples if s.name in _NAMES):
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except (OSError, ValueError):
        # Another API server's metrics file was removed while it was read.
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
    # vLLM has about sixty metrics. Collect only the metrics that the forecast uses.
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
