"""Events of a request: counted by `ServiceMetrics` and traced by `RequestTracing` in one call.

preprocessing ─> received ─> stage("prepare") ─> queued ─> computing(batch) ─> stage("publish") ─> answered
                          └───────────────────────── refused, or gone ──────────────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from opentelemetry.trace import Span, SpanKind, StatusCode, get_current_span

from cornplug.encoder_service.models.registry import LoadedModel
from cornplug.encoder_service.scheduling.batcher import EncodeJob, PendingRequest
from cornplug.encoder_service.telemetry.service_metrics import ServiceMetrics, Stage
from cornplug.encoder_service.telemetry.tracing import OFF, RequestTracing


class RequestObserver:
    """Receives the events. Thread-safe; never blocks, never raises into its caller."""

    def __init__(self, meters: ServiceMetrics, tracing: RequestTracing = OFF) -> None:
        self.meters = meters
        self.tracing = tracing

    def received(self, wait: PendingRequest, model: LoadedModel | None) -> None:
        """A request was received: its span begins."""
        request = wait.request
        wait.span = self.tracing.request(request.trace, SpanKind.INTERNAL, "cornplug.encode")
        wait.span.set_attributes({"cornplug.app": request.app, "cornplug.class": wait.qos.name})
        if model is not None:
            wait.span.set_attributes(
                {
                    "cornplug.model": model.served.name,
                    "cornplug.family": model.served.family,
                    "cornplug.modality": _modality(model, wait),
                }
            )

    def preprocessing(self) -> AbstractContextManager[None]:
        """Context manager around a medium's preprocessing, a child of the current span."""
        return self._stage("preprocess", get_current_span())

    def stage(self, stage: Stage, wait: PendingRequest) -> AbstractContextManager[None]:
        """Context manager around one stage of a request."""
        return self._stage(stage, wait.span)

    @contextmanager
    def _stage(self, stage: Stage, parent: Span) -> Iterator[None]:
        began = time.monotonic()
        with self.tracing.child(parent, f"cornplug.{stage}"):
            try:
                yield
            finally:
                self.meters.stages.labels(stage).observe(time.monotonic() - began)

    def queued(self, wait: PendingRequest, tokens: int) -> None:
        """The request waits for a batch from now on."""
        wait.queued_s = time.monotonic()
        wait.span.set_attribute("cornplug.tokens", tokens)

    @contextmanager
    def computing(self, flights: Sequence[EncodeJob[Any]], tokens: Sequence[int]) -> Iterator[None]:
        """Around a batch: its requests' waiting is over. `tokens` of each medium that the tower runs for."""
        waits = [wait for flight in flights for wait in tuple(flight.waits)]
        for wait in waits:
            self._waited(wait)
        began = time.monotonic()
        first, *others = (wait.span for wait in waits)
        # Where every medium's features were kept, only projectors run.
        name = "cornplug.tower" if tokens else "cornplug.project"
        with self.tracing.child(first, name, also=others) as span:
            span.set_attributes(
                {
                    "cornplug.batch.requests": len(waits),
                    "cornplug.batch.media": len(tokens),
                    "cornplug.batch.tokens": sum(tokens),
                }
            )
            yield
        seconds = time.monotonic() - began
        self.meters.stages.labels("compute").observe(seconds)
        if tokens:
            self.meters.passed(len(tokens), sum(tokens), seconds)

    def answered(self, wait: PendingRequest, origin: str, *, stored: bool, seconds: float) -> None:
        """The request's answer is about to be sent."""
        self.meters.answered(wait.request.app, wait.qos.name, origin, seconds)
        wait.span.set_attributes({"cornplug.origin": origin, "cornplug.stored": stored})
        wait.span.end()

    def refused(self, wait: PendingRequest, reason: str) -> None:
        """The request is about to be refused."""
        self.meters.refused(reason, wait.qos.name)
        wait.span.set_attribute("cornplug.reason", reason)
        wait.span.set_status(StatusCode.ERROR, reason)
        wait.span.end()

    def gone(self, wait: PendingRequest) -> None:
        """The request ended without an answer, as its client has gone; no effect after an answer."""
        if wait.span.is_recording():
            wait.span.set_attribute("cornplug.cancelled", True)
            wait.span.end()

    def _waited(self, wait: PendingRequest) -> None:
        # None: an earlier batch had it, which failed.
        queued_s, wait.queued_s = wait.queued_s, None
        if queued_s is None:
            return
        seconds = time.monotonic() - queued_s
        now_ns = time.time_ns()
        self.meters.stages.labels("queue").observe(seconds)
        self.tracing.past(wait.span, "cornplug.queue", began_ns=now_ns - int(seconds * 1e9), ended_ns=now_ns)


def _modality(model: LoadedModel, wait: PendingRequest) -> str:
    for modality, names in model.checkpoint.family.inputs.items():
        if set(names) <= wait.request.inputs.keys():
            return modality
    return "unknown"
