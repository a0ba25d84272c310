"""Observer of a request's events, which updates `ServiceMetrics` and `RequestTracing` in one call.

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
    """Observer of request events. Thread-safe. Methods never block and never raise."""

    def __init__(self, meters: ServiceMetrics, tracing: RequestTracing = OFF) -> None:
        self.meters = meters
        self.tracing = tracing

    def received(self, pending: PendingRequest, model: LoadedModel | None) -> None:
        """Record that a request was received, and start its span."""
        request = pending.request
        pending.span = self.tracing.request(request.trace, SpanKind.INTERNAL, "cornplug.encode")
        pending.span.set_attributes({"cornplug.app": request.app, "cornplug.class": pending.qos.name})
        if model is not None:
            pending.span.set_attributes(
                {
                    "cornplug.model": model.served.name,
                    "cornplug.family": model.served.family,
                    "cornplug.modality": _modality(model, pending),
                }
            )

    def preprocessing(self) -> AbstractContextManager[None]:
        """Return a context manager that records a medium's preprocessing, as a child of the current span."""
        return self._stage("preprocess", get_current_span())

    def stage(self, stage: Stage, pending: PendingRequest) -> AbstractContextManager[None]:
        """Return a context manager that records one stage of a request."""
        return self._stage(stage, pending.span)

    @contextmanager
    def _stage(self, stage: Stage, parent: Span) -> Iterator[None]:
        began = time.monotonic()
        with self.tracing.child(parent, f"cornplug.{stage}"):
            try:
                yield
            finally:
                self.meters.stages.labels(stage).observe(time.monotonic() - began)

    def queued(self, pending: PendingRequest, tokens: int) -> None:
        """Record that the request now waits for a batch. `tokens` is the number of tokens of its medium."""
        pending.queued_s = time.monotonic()
        pending.span.set_attribute("cornplug.tokens", tokens)

    @contextmanager
    def computing(self, jobs: Sequence[EncodeJob[Any]], tokens: Sequence[int]) -> Iterator[None]:
        """Record a batch for the duration of the context, and end the queue stage of its requests.

        `tokens` has the number of tokens of each medium for which the tower runs.
        """
        requests = [pending for job in jobs for pending in tuple(job.requests)]
        for pending in requests:
            self._waited(pending)
        began = time.monotonic()
        first, *others = (pending.span for pending in requests)
        # If the features of every medium are cached, only projectors run.
        name = "cornplug.tower" if tokens else "cornplug.project"
        with self.tracing.child(first, name, also=others) as span:
            span.set_attributes(
                {
                    "cornplug.batch.requests": len(requests),
                    "cornplug.batch.media": len(tokens),
                    "cornplug.batch.tokens": sum(tokens),
                }
            )
            yield
        seconds = time.monotonic() - began
        self.meters.stages.labels("compute").observe(seconds)
        if tokens:
            self.meters.passed(len(tokens), sum(tokens), seconds)

    def answered(self, pending: PendingRequest, origin: str, *, stored: bool, seconds: float) -> None:
        """Record that the reply is about to be sent."""
        self.meters.answered(pending.request.app, pending.qos.name, origin, seconds)
        pending.span.set_attributes({"cornplug.origin": origin, "cornplug.stored": stored})
        pending.span.end()

    def refused(self, pending: PendingRequest, reason: str) -> None:
        """Record that the request is about to be refused."""
        self.meters.refused(reason, pending.qos.name)
        pending.span.set_attribute("cornplug.reason", reason)
        pending.span.set_status(StatusCode.ERROR, reason)
        pending.span.end()

    def gone(self, pending: PendingRequest) -> None:
        """Record that the client disconnected before a reply. Has no effect after a reply."""
        if pending.span.is_recording():
            pending.span.set_attribute("cornplug.cancelled", True)
            pending.span.end()

    def _waited(self, pending: PendingRequest) -> None:
        # `queued_s` is None if the queue stage has already ended, in an earlier batch that failed.
        queued_s, pending.queued_s = pending.queued_s, None
        if queued_s is None:
            return
        seconds = time.monotonic() - queued_s
        now_ns = time.time_ns()
        self.meters.stages.labels("queue").observe(seconds)
        self.tracing.past(
            pending.span, "cornplug.queue", began_ns=now_ns - int(seconds * 1e9), ended_ns=now_ns
        )


def _modality(model: LoadedModel, pending: PendingRequest) -> str:
    of = {modality.identity: modality.name for modality in model.served.modalities}
    return of.get(pending.request.identity, "unknown")
