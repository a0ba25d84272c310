"""Spans as a collector gets them: one trace from the caller to the tower, and nothing when off."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import httpx
import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN, SpanKind, StatusCode
from time_limits import TimeLimits

from cornplug.config import Config
from cornplug.encoder_service.formats.messages import EncodeRequest, trace_of
from cornplug.encoder_service.http.app import create_app
from cornplug.encoder_service.request_observer import NO_TRACING, RequestTracing, open_tracing

from ..conftest import SECRET, MakeEncoder, Requests, eventually, png, sample_image
from ..execution.test_encoder import Gate, gate, hold, no, ok, queued  # noqa: F401

TRACE = "a" * 32
PARENT = "b" * 16
CALLER = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Collector:
    """What an SDK exports, by name."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = RequestTracing(self._provider.get_tracer("test"))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        eventually(lambda: bool(self.named(name)))
        (span,) = self.named(name)
        return span

    def names(self) -> list[str]:
        return sorted(span.name for span in self._exporter.get_finished_spans())


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made._provider.shutdown()


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def trace_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def parent_id(span: ReadableSpan) -> int:
    assert span.parent is not None, span.name
    return span.parent.span_id


def linked(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


def test_tracing_engine_request_spans_reach_tower(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], collector: Collector
) -> None:
    encoder = make_encoder(tracing=collector.tracing)
    ok(encoder.submit(request_for(llava_pair[0], 1, trace=CALLER, app="shop")))
    whole = collector.one("cornplug.encode")
    assert trace_id(whole) == TRACE
    assert f"{parent_id(whole):016x}" == PARENT
    for stage in ("prepare", "queue", "tower", "publish"):
        child = collector.one(f"cornplug.{stage}")
        assert trace_id(child) == TRACE
        assert parent_id(child) == span_id(whole)
        assert whole.start_time is not None
        assert child.start_time is not None
        assert child.start_time >= whole.start_time - 1_000_000
    attributes = dict(whole.attributes or {})
    assert attributes.pop("cornplug.tokens", 0)
    assert attributes == {
        "cornplug.app": "shop",
        "cornplug.class": "default",
        "cornplug.model": str(llava_pair[0]),
        "cornplug.family": "llava",
        "cornplug.modality": "image",
        "cornplug.origin": "computed",
        "cornplug.stored": False,
    }


def test_tracing_batch_and_requests_are_linked(
    make_encoder: MakeEncoder,
    request_for: Requests,
    llava_pair: tuple[Path, Path],
    gate: Gate,  # noqa: F811
    collector: Collector,
) -> None:
    encoder = make_encoder(tracing=collector.tracing)
    held = hold(encoder, gate, request_for(llava_pair[0], 1))
    waiting = [encoder.submit(request_for(llava_pair[0], seed)) for seed in (2, 2, 3)]
    queued(encoder, 3)
    gate.open.set()
    for future in (held, *waiting):
        ok(future)
    eventually(lambda: len(collector.named("cornplug.encode")) == 4)
    (batch,) = [
        s for s in collector.named("cornplug.tower") if (s.attributes or {})["cornplug.batch.requests"] == 3
    ]
    assert (batch.attributes or {})["cornplug.batch.media"] == 2
    first = parent_id(batch)
    requests = {span_id(s): s for s in collector.named("cornplug.encode")}
    assert linked(batch) - {first} == {i for i, s in requests.items() if span_id(batch) in linked(s)}
    assert len(linked(batch)) == 3
    assert {trace_id(s) for s in requests.values() if span_id(s) in linked(batch)} != {trace_id(batch)}


def test_tracing_refused_or_gone_request_ends_span(
    make_encoder: MakeEncoder,
    request_for: Requests,
    llava_pair: tuple[Path, Path],
    gate: Gate,  # noqa: F811
    collector: Collector,
) -> None:
    encoder = make_encoder(tracing=collector.tracing)
    no(encoder.submit(request_for(llava_pair[0], 1, identity=b"?" * 32)))
    refused = collector.one("cornplug.encode")
    assert refused.status.status_code is StatusCode.ERROR
    assert (refused.attributes or {})["cornplug.reason"] == "unknown_model"
    held = hold(encoder, gate, request_for(llava_pair[0], 1))
    gone = encoder.submit(request_for(llava_pair[0], 2))
    queued(encoder, 1)
    assert gone.cancel()
    eventually(lambda: len(collector.named("cornplug.encode")) == 2)
    assert (collector.named("cornplug.encode")[1].attributes or {})["cornplug.cancelled"] is True
    gate.open.set()
    ok(held)


def test_tracing_http_requests_join_by_headers(
    make_encoder: MakeEncoder, llava_pair: tuple[Path, Path], config: Config, collector: Collector
) -> None:
    encoder = make_encoder(tracing=collector.tracing)
    app = create_app(encoder, config.encoder, secret=SECRET)

    async def call() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://e") as client:
            await client.get("/health", headers=CALLER)
            form = {"data": {"model": str(llava_pair[0])}, "files": {"image": png(sample_image(1))}}
            return [
                await client.post("/v1/encode", **form, headers=headers)  # type: ignore[arg-type]
                for headers in (CALLER, {"traceparent": "nonsense"})
            ]

    assert [r.status_code for r in anyio.run(call)] == [200, 200]
    joined, alone = collector.named("POST /v1/encode")
    assert trace_id(joined) == TRACE
    assert (joined.attributes or {})["http.response.status_code"] == 200
    assert alone.parent is None
    encodes = collector.named("cornplug.encode")
    assert [parent_id(s) for s in encodes] == [span_id(joined), span_id(alone)]
    assert trace_id(collector.one("cornplug.tower")) == TRACE
    assert [parent_id(s) for s in collector.named("cornplug.preprocess")] == [span_id(joined), span_id(alone)]


def test_encode_request_trace_suits_older_peers(request_for: Requests, llava_pair: tuple[Path, Path]) -> None:
    class OldEncode(msgspec.Struct, frozen=True, tag="encode"):
        id: int
        identity: bytes
        app: str

    new = request_for(llava_pair[0], 1, trace=CALLER)
    packed = msgspec.msgpack.encode(new)
    assert msgspec.msgpack.decode(packed, type=OldEncode).app == new.app
    fields = msgspec.structs.asdict(new)
    del fields["trace"]
    assert msgspec.convert({"type": "encode", **fields}, EncodeRequest).trace is None


@pytest.mark.parametrize(
    ("headers", "kept"),
    [
        (None, None),
        ({"tracestate": "a=1"}, None),
        ({**CALLER, "baggage": "user=me"}, CALLER),
        ({**CALLER, "tracestate": "a" * 513}, CALLER),
        ({"traceparent": "a" * 513}, None),
    ],
)
def test_trace_of_keeps_trace_headers_only(
    headers: dict[str, str] | None, kept: dict[str, str] | None
) -> None:
    assert trace_of(headers) == kept


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"},
        {"OTEL_SERVICE_NAME": "mine"},
    ],
)
def test_open_tracing_without_endpoint_is_off(environ: dict[str, str]) -> None:
    assert open_tracing(environ) is NO_TRACING


def test_open_tracing_without_sdk_warns_once_and_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING):
        assert open_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}) is NO_TRACING
    assert re.findall("pip install opentelemetry-sdk", caplog.text) == ["pip install opentelemetry-sdk"]


def test_tracing_close_with_dead_collector_is_quick(
    monkeypatch: pytest.MonkeyPatch, unused_port: int, within: TimeLimits
) -> None:
    monkeypatch.setattr("cornplug.encoder_service.request_observer._FLUSH_S", 0.2)
    where = f"http://127.0.0.1:{unused_port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", where)
    tracing = open_tracing(
        {"OTEL_EXPORTER_OTLP_ENDPOINT": where, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    )
    assert tracing is not NO_TRACING
    with tracing.child_span(INVALID_SPAN, "a") as span:
        assert span.is_recording()
    with within(8):
        tracing.close()


@pytest.fixture
def unused_port() -> int:
    from cornplug.host import free_port

    return free_port()


def spans_of_a_request(tracing: RequestTracing) -> Callable[[], None]:
    def run() -> None:
        span = tracing.start_request_span(None, SpanKind.INTERNAL, "cornplug.encode")
        span.set_attributes({"cornplug.app": "a"})
        for name in ("prepare", "tower", "publish"):
            with tracing.child_span(span, name):
                pass
        tracing.record_past_span(span, "queue", began_ns=1, ended_ns=2)
        span.end()

    return run


def test_tracing_off_costs_microseconds(within: TimeLimits) -> None:
    run = spans_of_a_request(NO_TRACING)
    run()
    with within.cpu(200 * 0.001, clock=time.thread_time):
        for _ in range(200):
            run()
