"""Classes in front of vLLM's API server: who is refused, when, how, and what it is counted as."""

from __future__ import annotations

import asyncio
import heapq
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram

from cornplug.config import Config, QosConfig
from cornplug.qos import ServiceClass
from cornplug.vllm_connector.admission import Admission, QueueReading, TtftForecast

PREMIUM = ServiceClass(name="premium", share=0.5, priority=10, deadline_s=2.0)
BATCH = ServiceClass(name="batch", share=0.1, deadline_s=30.0)


# -- the forecast, in virtual time ----------------------------------------------------------------


def saturated(*classes: ServiceClass, rate: float = 10.0, waiting: float = 5.0) -> TtftForecast:
    """One that has seen an engine with a queue give `rate` first tokens a second for ten seconds."""
    forecast = TtftForecast(classes)
    for second in range(11):
        forecast.update(QueueReading(time_s=float(second), waiting=waiting, first_tokens=rate * second))
    return forecast


def likely(requests: float) -> float:
    return requests + 3 * math.sqrt(requests)


def test_ttft_forecast_refuses_requests_past_deadline() -> None:
    forecast = saturated(PREMIUM, waiting=8)
    verdict = forecast.decide(PREMIUM, 10.0)
    assert verdict.is_admitted
    assert verdict.wait_s == pytest.approx(likely(9) / 10)
    forecast = saturated(PREMIUM, waiting=15)
    verdict = forecast.decide(PREMIUM, 10.0)
    assert verdict.outcome == "overloaded"
    assert verdict.retry_after_s == pytest.approx(likely(16) / 10 - 2.0)
    assert forecast.decide(PREMIUM, 10.0 + verdict.retry_after_s).is_admitted


def test_ttft_forecast_keeps_reserved_share_free() -> None:
    max_queue = (math.sqrt(2.25 + 10 * 2.0) - 1.5) ** 2
    forecast = saturated(PREMIUM, BATCH, waiting=3)
    for _ in range(3):
        forecast.record_sent(BATCH)
    forecast.update(QueueReading(time_s=11.0, waiting=3, first_tokens=110))
    # Beside premium's half of the room, which nobody uses, there is place for the fourth.
    assert 3 + 1 + max_queue / 2 < max_queue < 5 + 1 + max_queue / 2
    assert forecast.decide(BATCH, 11.0).is_admitted
    for _ in range(2):
        forecast.record_sent(BATCH)
    refused = forecast.decide(BATCH, 11.0)
    assert refused.outcome == "over_share"
    assert refused.retry_after_s == pytest.approx((5 + 1 + max_queue / 2 - max_queue) / 10)
    assert forecast.decide(PREMIUM, 11.0).is_admitted


def test_ttft_forecast_impossible_deadline_takes_no_room() -> None:
    hasty = ServiceClass(name="hasty", share=0.02, deadline_s=0.05)
    absurd = ServiceClass(name="absurd", share=0.4, deadline_s=0.05)
    for other in (hasty, absurd):
        forecast = saturated(PREMIUM, other, waiting=4)
        assert forecast.decide(PREMIUM, 10.0).is_admitted
        assert forecast.decide(other, 10.0).outcome == "overloaded"


def test_ttft_forecast_burst_between_readings_counts() -> None:
    forecast = saturated(PREMIUM, waiting=1)
    forecast.update(QueueReading(time_s=11.0, waiting=0, first_tokens=110))
    admitted = 0
    while forecast.decide(PREMIUM, 11.0).is_admitted:
        forecast.record_sent(PREMIUM)
        admitted += 1
        assert likely(admitted) <= 20
    assert likely(admitted + 1) > 20


def test_ttft_forecast_without_data_or_deadline_admits() -> None:
    assert TtftForecast([PREMIUM]).decide(PREMIUM, 0.0).outcome == "blind"
    fresh = TtftForecast([PREMIUM])
    fresh.update(QueueReading(time_s=0.0, waiting=1000, first_tokens=0))
    assert fresh.decide(PREMIUM, 0.0).outcome == "admitted"
    promised_nothing = ServiceClass(name="free")
    assert saturated(promised_nothing, waiting=1000).decide(promised_nothing, 10.0).is_admitted


def test_ttft_forecast_idle_engine_keeps_measured_rate() -> None:
    forecast = saturated(PREMIUM, waiting=10)
    for second in range(11, 60):
        forecast.update(QueueReading(time_s=float(second), waiting=0, first_tokens=100 + 0.1 * (second - 10)))
    forecast.update(QueueReading(time_s=60.0, waiting=5, first_tokens=106))
    verdict = forecast.decide(PREMIUM, 60.0)
    assert verdict.is_admitted
    assert verdict.wait_s == pytest.approx(likely(6) / 10)


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.floats(0, 1e6), st.floats(0, 1e9), st.sampled_from([0, 1, 2])),
        max_size=40,
    )
)
def test_ttft_forecast_any_readings_bound_retry_after(
    steps: list[tuple[float, float, float, int]],
) -> None:
    forecast, now = TtftForecast([PREMIUM, BATCH]), 0.0
    for passed, waiting, first_tokens, act in steps:
        now += passed
        if act == 0:
            forecast.update(QueueReading(time_s=now, waiting=waiting, first_tokens=first_tokens))
        elif act == 1:
            forecast.update(None)
        for qos in (PREMIUM, BATCH):
            verdict = forecast.decide(qos, now)
            if verdict.is_admitted:
                forecast.record_sent(qos)
            else:
                assert verdict.retry_after_s is not None
                assert 0 <= verdict.retry_after_s <= 60


def overload(
    premium: float, batch: float, *, seconds: float = 125.0, warm_up: float = 5.0
) -> dict[str, dict[str, float]]:
    """An engine that serves 20 requests a second in order of arrival, asked for so many times
    that by each class."""
    rate, chance = 20.0, random.Random(4)
    arrivals = {PREMIUM.name: rate * premium, BATCH.name: rate * batch}
    forecast = TtftForecast([PREMIUM, BATCH])
    tally = {c.name: dict.fromkeys(("offered", "admitted", "in_time"), 0.0) for c in (PREMIUM, BATCH)}
    events: list[tuple[float, int, str, Any]] = [(0.0, 0, "read", None)]
    count = 1

    def at(when: float, what: str, value: Any = None) -> None:
        nonlocal count
        heapq.heappush(events, (when, count, what, value))
        count += 1

    for qos in (PREMIUM, BATCH):
        at(chance.expovariate(arrivals[qos.name]), "arrive", qos)
    queue: list[tuple[ServiceClass, float]] = []
    busy, first_tokens = False, 0
    while events:
        now, _, what, value = heapq.heappop(events)
        if now > seconds:
            break
        if what == "read":
            forecast.update(QueueReading(time_s=now, waiting=len(queue), first_tokens=first_tokens))
            at(now + 0.5, "read")
        elif what == "arrive":
            at(now + chance.expovariate(arrivals[value.name]), "arrive", value)
            counts = now >= warm_up
            tally[value.name]["offered"] += counts
            if forecast.decide(value, now).is_admitted:
                tally[value.name]["admitted"] += counts
                forecast.record_sent(value)
                queue.append((value, now))
        else:
            qos, came = value
            busy = False
            first_tokens += 1
            forecast.record_first_token(qos)
            tally[qos.name]["in_time"] += warm_up <= came >= now - qos.deadline_s
        if queue and not busy:
            busy = True
            at(now + chance.expovariate(rate), "first_token", queue.pop(0))
    return tally


@pytest.mark.parametrize("wanted", [0.3, 1.5])
def test_ttft_forecast_at_3x_capacity_keeps_deadlines(wanted: float) -> None:
    tally = overload(wanted, 3.0 - wanted)
    premium, batch = tally["premium"], tally["batch"]
    assert premium["in_time"] / premium["admitted"] >= 0.95
    assert batch["in_time"] / batch["admitted"] >= 0.95
    assert (premium["in_time"] + batch["in_time"]) / 120 >= 0.9 * 20, "the engine is not left idle"
    if wanted < 0.5:
        assert premium["in_time"] >= 0.95 * premium["offered"], "well inside its share it is hardly refused"
    else:
        assert premium["in_time"] >= 0.5 * 0.95 * 20 * 120


def test_ttft_forecast_below_capacity_admits_97_percent() -> None:
    for counts in overload(0.35, 0.35).values():
        assert counts["admitted"] >= 0.97 * counts["offered"]


# -- the middleware, over ASGI, with a real registry ------------------------------------------------


class Engine:
    """What vLLM has in its registry, and an application behind the middleware."""

    def __init__(self, qos: dict[str, Any], *, figures: bool = True) -> None:
        self.registry = CollectorRegistry()
        self.now = 0.0
        self.paths: list[str] = []
        self.hold: asyncio.Event | None = None
        if figures:
            names = ("model_name", "engine")
            self.waiting = Gauge("vllm:num_requests_waiting", "w", names, registry=self.registry).labels(
                "m", "0"
            )
            ttft = Histogram("vllm:time_to_first_token_seconds", "t", names, registry=self.registry)
            self.ttft = ttft.labels("m", "0")
        config = Config(qos=QosConfig.model_validate(qos))
        self.app = Admission(self.answer, config=config, registry=self.registry, clock=lambda: self.now)

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if self.hold is not None:
            await self.hold.wait()
        await send({"type": "http.response.body", "body": b"data: token", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def post(self, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://v") as client:
            return await client.post(
                path, json={"model": "m"}, headers={k.replace("_", "-"): v for k, v in headers.items()}
            )

    async def saturate(self, waiting: int, rate: int = 10) -> None:
        """Ten seconds in which requests wait."""
        for _ in range(10):
            self.waiting.set(waiting)
            for _ in range(rate):
                self.ttft.observe(0.1)
            self.now += 1
            await self.post("/v1/completions", authorization="Bearer k")

    def counted(self, qos: str, outcome: str) -> float:
        labels = {"qos": qos, "outcome": outcome}
        return self.registry.get_sample_value("cornplug_admission_total", labels) or 0.0


QOS: dict[str, Any] = {
    "default": "standard",
    "classes": {
        "premium": {"share": 0.5, "deadline_s": 2.0, "api_keys": ["k"]},
        "standard": {"deadline_s": 3.0},
    },
}


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


def test_admission_refusals_are_openai_errors() -> None:
    async def test() -> None:
        engine = Engine(QOS)
        await engine.saturate(waiting=8)
        assert (await engine.post(authorization="Bearer k")).status_code == 200
        over = await engine.post(authorization="Bearer wrong")
        assert over.status_code == 429
        assert int(over.headers["retry-after"]) >= 1
        error = over.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("RateLimitError", None, 429)
        assert "'standard'" in error["message"]
        engine.waiting.set(60)
        engine.now += 1
        full = await engine.post(authorization="Bearer k")
        assert full.status_code == 503
        assert 6 <= int(full.headers["retry-after"]) <= 9
        assert full.json()["error"]["code"] == 503
        assert engine.counted("standard", "over_share") == 1
        assert engine.counted("premium", "overloaded") == 1
        assert engine.registry.get_sample_value("cornplug_admission_predicted_seconds") > 4  # type: ignore[operator]

    run(test)


def test_admission_other_paths_are_never_refused() -> None:
    async def test() -> None:
        engine = Engine(QOS)
        await engine.saturate(waiting=1000)
        assert (await engine.post()).status_code == 503
        for path in ("/v1/embeddings", "/tokenize", "/health"):
            assert (await engine.post(path)).status_code == 200
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(engine.app), base_url="http://v"
        ) as client:
            assert (await client.get("/metrics")).status_code == 200
            assert (await client.get("/v1/chat/completions")).status_code == 200

    run(test)


def test_admission_without_classes_is_inactive() -> None:
    async def test() -> None:
        engine = Engine({})
        await engine.saturate(waiting=1000)
        assert (await engine.post()).status_code == 200
        assert b"vllm:" not in b"".join(name.encode() for name in engine.paths)
        assert "cornplug_admission_total{" not in str(list(engine.registry.collect()))

    run(test)


def test_admission_without_vllm_metrics_admits_and_counts() -> None:
    async def test() -> None:
        engine = Engine(QOS, figures=False)
        for _ in range(3):
            assert (await engine.post()).status_code == 200
        assert engine.counted("standard", "blind") == 3

    run(test)


def pending(engine: Engine) -> int:
    """Requests whose first token has not come."""
    return sum(engine.app._forecast._pending.values())


def test_admission_request_leaves_queue_at_first_token() -> None:
    async def test() -> None:
        engine = Engine(QOS)
        engine.hold = asyncio.Event()
        waiting = [asyncio.create_task(engine.post()) for _ in range(5)]
        for _ in range(2000):
            if pending(engine) == 5:
                break
            await asyncio.sleep(0.01)
        assert pending(engine) == 5
        waiting[0].cancel()
        engine.hold.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert pending(engine) == 0

    run(test)


def test_admission_hanging_reading_delays_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from cornplug.vllm_connector import admission

    free = threading.Event()
    monkeypatch.setattr(admission, "_READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(admission, "_read_queue_metrics", lambda *_: free.wait(60) and None)

    async def test() -> None:
        engine = Engine(QOS)
        try:
            assert (await asyncio.wait_for(engine.post(), 30)).status_code == 200
        finally:
            free.set()

    run(test)


def test_admission_metrics_of_api_servers_are_combined(tmp_path: Path) -> None:
    """As with `--api-server-count 2`: each server's figures are in a file of its own."""
    script = tmp_path / "server.py"
    script.write_text(
        "import sys\n"
        "from prometheus_client import Gauge, Histogram\n"
        "from cornplug.vllm_connector.admission import _create_metrics, _read_queue_metrics\n"
        "from prometheus_client import REGISTRY\n"
        "waiting = Gauge('vllm:num_requests_waiting', 'w', ['engine'], multiprocess_mode='mostrecent')\n"
        "ttft = Histogram('vllm:time_to_first_token_seconds', 't', ['engine'])\n"
        "waiting.labels('0').set(float(sys.argv[1]))\n"
        "for _ in range(int(sys.argv[2])):\n"
        "    ttft.labels('0').observe(0.1)\n"
        "_create_metrics(REGISTRY)[0].labels('premium', 'admitted').inc()\n"
        "figures = _read_queue_metrics(None, lambda: 1.0)\n"
        "from prometheus_client import CollectorRegistry, multiprocess\n"
        "together = CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(together)\n"
        "labels = {'qos': 'premium', 'outcome': 'admitted'}\n"
        "ours = together.get_sample_value('cornplug_admission_total', labels)\n"
        "print(figures.waiting, figures.first_tokens, ours)\n"
    )
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    outs = [
        subprocess.run(
            [sys.executable, script, *args], env=env, capture_output=True, text=True, check=True
        ).stdout
        for args in (("7", "3"), ("5", "2"))
    ]
    assert [out.split()[-3:] for out in outs] == [["7.0", "3.0", "1.0"], ["5.0", "5.0", "2.0"]]


def test_admission_loads_as_vllm_middleware() -> None:
    """By the code that `--middleware` runs, in front of a FastAPI application."""
    from argparse import Namespace

    from fastapi import FastAPI
    from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

    app = FastAPI()
    args = Namespace(
        allowed_origins=["*"],
        allow_credentials=False,
        allowed_methods=["*"],
        allowed_headers=["*"],
        api_key=None,
        enable_request_id_headers=False,
        middleware=["cornplug.vllm_connector.admission.Admission"],
    )
    init_entrypoints_middleware(args, app, ())

    @app.post("/v1/completions")
    async def complete() -> dict[str, str]:
        return {"text": "hi"}

    async def test() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://v") as client:
            assert (await client.post("/v1/completions")).json() == {"text": "hi"}

    run(test)
    assert any(m.cls is Admission for m in app.user_middleware)
