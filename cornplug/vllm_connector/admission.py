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
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, multiprocess
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cornplug.config import Config, load
from cornplug.qos import QosClasses, ServiceClass
from cornplug.vllm_connector.ttft_prediction import QueueReading, TtftForecast, TtftVerdict

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
    """vLLM's metrics, summed over its engines, or None if vLLM has none."""
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
