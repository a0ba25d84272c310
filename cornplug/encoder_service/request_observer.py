"""Observes a request's events, to update `ServiceMetrics` and the spans of the client's trace.

record_preprocessing ─> on_received ─> record_stage ─> on_queued ─> record_batch ─> record_stage ─> on_reply
                                    └────────────── on_refusal, or on_disconnect ──────────────────────┘

Callers pass their trace context (OpenTelemetry) in W3C headers or in `EncodeRequest.trace`. Without an SDK,
the OpenTelemetry API's no-op tracer is used, which records nothing. Therefore no code has to check whether
tracing is enabled.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import entry_points
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.trace import Link, NoOpTracer, Span, SpanKind, StatusCode, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cornplug import __version__
from cornplug.encoder_service.batcher import EncodeJob, PendingRequest
from cornplug.encoder_service.formats.messages import trace_of
from cornplug.encoder_service.model_registry import LoadedModel
from cornplug.encoder_service.service_metrics import ServiceMetrics, Stage

_EXPORT_VARIABLES: Final = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_TRACES_EXPORTER",
)
_TRACED_PATHS: Final = re.compile(r"/v1/encode|(/sglang/.+)?/encode")
_FLUSH_S: Final = 5.0
_PROPAGATOR: Final = TraceContextTextMapPropagator()

log = logging.getLogger(__name__)


class RequestTracing:
    """Creates spans with one tracer. Thread-safe.

    POST /v1/encode (server span, if HTTP)
    ├ cornplug.preprocess        decode, resize
    └ cornplug.encode            one media item, from receipt to reply
        ├ cornplug.prepare       check the tower's inputs
        ├ cornplug.queue         wait for a batch
        ├ cornplug.tower         the batch: child of the first request, linked to all its requests
        │                        (cornplug.project if all features are cached)
        └ cornplug.publish       save in the store, reply
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def start_request_span(self, carrier: Mapping[str, str] | None, kind: SpanKind, name: str) -> Span:
        """Start a span in the trace of `carrier`. If `carrier` has no trace, use the current trace."""
        context = _PROPAGATOR.extract(carrier) if carrier else None
        return self._tracer.start_span(name, context=context, kind=kind)

    @contextmanager
    def child_span(self, parent: Span, name: str, linked: Sequence[Span] = ()) -> Iterator[Span]:
        """Yield a child span of `parent` for the duration of the context. It is linked with the spans in
        `linked`, in both directions."""
        links = [Link(span.get_span_context()) for span in (parent, *linked)] if linked else None
        context = trace.set_span_in_context(parent)
        with self._tracer.start_as_current_span(name, context=context, links=links) as span:
            for other in linked:
                other.add_link(span.get_span_context())
            yield span

    def record_past_span(self, parent: Span, name: str, *, began_ns: int, ended_ns: int) -> None:
        """Record a child span of `parent` that has already ended. Times are from `time.time_ns`."""
        context = trace.set_span_in_context(parent)
        self._tracer.start_span(name, context=context, start_time=began_ns).end(ended_ns)

    def close(self) -> None:
        """Send pending spans, which takes at most five seconds."""


NO_TRACING: Final = RequestTracing(NoOpTracer())


class _ExportedTracing(RequestTracing):
    """Tracing that sends spans to the collector that the standard OTEL_* variables configure."""

    def __init__(self, exporter: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        attributes = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in attributes
        resource = Resource.create() if named else Resource.create({"service.name": "cornplug-encoder"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_load_exporter(exporter)()))
        super().__init__(self._provider.get_tracer("cornplug", __version__))

    def close(self) -> None:
        # Use a thread, because the SDK waits 30 s for a collector that is down.
        ending = threading.Thread(target=self._provider.shutdown, name="cornplug-trace-end", daemon=True)
        ending.start()
        ending.join(_FLUSH_S)


def open_tracing(environ: Mapping[str, str] = os.environ) -> RequestTracing:
    """Return the tracing that the OTEL_* variables configure, or NO_TRACING if they are not set.

    If the SDK is not installed, logs a warning and returns NO_TRACING. Under `opentelemetry-instrument`, the
    tracer provider that this command has installed is used.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return NO_TRACING
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return RequestTracing(trace.get_tracer("cornplug", __version__))
    name = environ.get("OTEL_TRACES_EXPORTER", "otlp").partition(",")[0].strip()
    if name == "none" or not any(environ.get(switch) for switch in _EXPORT_VARIABLES):
        return NO_TRACING
    if name == "otlp":
        protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL"
        )
        name = "otlp_proto_http" if protocol == "http/protobuf" else "otlp_proto_grpc"
    try:
        return _ExportedTracing(name)
    except ImportError as e:
        log.warning(
            "OTEL_* variables enable tracing, but %s. No traces are sent. Run: "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp",
            e,
        )
        return NO_TRACING


class TracingMiddleware:
    """ASGI middleware that records a server span for each encode request, in the caller's trace."""

    def __init__(self, app: ASGIApp, tracing: RequestTracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _TRACED_PATHS.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        # Do not use the path, because it may contain a model's name and span names need low cardinality.
        route = "/v1/encode" if scope["path"] == "/v1/encode" else "/encode"
        span = self._tracing.start_request_span(
            trace_of(carrier), SpanKind.SERVER, f"{scope['method']} {route}"
        )

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(StatusCode.ERROR)
            await send(message)

        with trace.use_span(span, end_on_exit=True):
            await self._app(scope, receive, marked)


def _load_exporter(name: str) -> type:
    for found in entry_points(group="opentelemetry_traces_exporter", name=name):
        return found.load()
    raise ImportError(f"no exporter {name!r} is installed")


class RequestObserver:
    """Observes request events. Thread-safe. Methods never block and never raise exceptions."""

    def __init__(self, metrics: ServiceMetrics, tracing: RequestTracing = NO_TRACING) -> None:
        self.metrics = metrics
        self.tracing = tracing

    def on_received(self, pending: PendingRequest, model: LoadedModel | None) -> None:
        """Record that a request was received, and start its span."""
        request = pending.request
        pending.span = self.tracing.start_request_span(request.trace, SpanKind.INTERNAL, "cornplug.encode")
        pending.span.set_attributes({"cornplug.app": request.app, "cornplug.class": pending.qos.name})
        if model is not None:
            pending.span.set_attributes(
                {
                    "cornplug.model": model.served.name,
                    "cornplug.family": model.served.family,
                    "cornplug.modality": _modality_name(model, pending),
                }
            )

    def record_preprocessing(self) -> AbstractContextManager[None]:
        """Return a context manager that records the preprocessing of an item, as a child of the current
        span."""
        return self._record_stage("preprocess", get_current_span())

    def record_stage(self, stage: Stage, pending: PendingRequest) -> AbstractContextManager[None]:
        """Return a context manager that records one stage of a request."""
        return self._record_stage(stage, pending.span)

    @contextmanager
    def _record_stage(self, stage: Stage, parent: Span) -> Iterator[None]:
        began = time.monotonic()
        with self.tracing.child_span(parent, f"cornplug.{stage}"):
            try:
                yield
            finally:
                self.metrics.stages.labels(stage).observe(time.monotonic() - began)

    def on_queued(self, pending: PendingRequest, tokens: int) -> None:
        """Record that the request now waits for a batch. `tokens` is the number of tokens of its media
        item."""
        pending.queued_s = time.monotonic()
        pending.span.set_attribute("cornplug.tokens", tokens)

    @contextmanager
    def record_batch(self, jobs: Sequence[EncodeJob[Any]], tokens: Sequence[int]) -> Iterator[None]:
        """Record a batch for the duration of the context, and end the queue stage of its requests.

        `tokens` has the number of tokens of each item for which the tower runs.
        """
        requests = [pending for job in jobs for pending in tuple(job.requests)]
        for pending in requests:
            self._end_queue_stage(pending)
        began = time.monotonic()
        first, *others = (pending.span for pending in requests)
        # If the features of all items are cached, only projectors run.
        name = "cornplug.tower" if tokens else "cornplug.project"
        with self.tracing.child_span(first, name, linked=others) as span:
            span.set_attributes(
                {
                    "cornplug.batch.requests": len(requests),
                    "cornplug.batch.media": len(tokens),
                    "cornplug.batch.tokens": sum(tokens),
                }
            )
            yield
        seconds = time.monotonic() - began
        self.metrics.stages.labels("compute").observe(seconds)
        if tokens:
            self.metrics.count_batch(len(tokens), sum(tokens), seconds)

    def on_reply(self, pending: PendingRequest, origin: str, *, stored: bool, seconds: float) -> None:
        """Record that the reply is about to be sent."""
        self.metrics.count_reply(pending.request.app, pending.qos.name, origin, seconds)
        pending.span.set_attributes({"cornplug.origin": origin, "cornplug.stored": stored})
        pending.span.end()

    def on_refusal(self, pending: PendingRequest, reason: str) -> None:
        """Record that the request is about to be refused."""
        self.metrics.count_refusal(reason, pending.qos.name)
        pending.span.set_attribute("cornplug.reason", reason)
        pending.span.set_status(StatusCode.ERROR, reason)
        pending.span.end()

    def on_disconnect(self, pending: PendingRequest) -> None:
        """Record that the client disconnected before the reply. Has no effect after a reply."""
        if pending.span.is_recording():
            pending.span.set_attribute("cornplug.cancelled", True)
            pending.span.end()

    def _end_queue_stage(self, pending: PendingRequest) -> None:
        # `queued_s` is None if the queue stage has already ended, in an earlier batch that failed.
        queued_s, pending.queued_s = pending.queued_s, None
        if queued_s is None:
            return
        seconds = time.monotonic() - queued_s
        now_ns = time.time_ns()
        self.metrics.stages.labels("queue").observe(seconds)
        self.tracing.record_past_span(
            pending.span, "cornplug.queue", began_ns=now_ns - int(seconds * 1e9), ended_ns=now_ns
        )


def _modality_name(model: LoadedModel, pending: PendingRequest) -> str:
    of = {modality.identity: modality.name for modality in model.served.modalities}
    return of.get(pending.request.identity, "unknown")
