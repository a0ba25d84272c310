"""The ring of samples, `/v1/status`, and the files of the status page (in Chromium: tests/promises)."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornplug import __version__
from cornplug.config import Config
from cornplug.encoder_service.http.dashboard import POLICY
from cornplug.encoder_service.telemetry.history import ServiceHistory, quantile
from cornplug.encoder_service.telemetry.service_metrics import ServiceGauges, ServiceMetrics

from ..conftest import MakeEncoder, png, sample_image
from ..http_service import Service


@pytest.fixture
def service(make_encoder: MakeEncoder, config: Config) -> Service:
    return Service(make_encoder(), config)


def test_service_history_samples_hold_differences() -> None:
    now = [100.0]
    meters = ServiceMetrics(ServiceGauges(lambda: 2, queue=lambda: {"default": (3, 99)}))
    history = ServiceHistory(meters, kept=3, clock=lambda: now[0])
    for n in (1, 2, 0):
        for _ in range(n):
            meters.answered("a", "default", "computed", 0.25)
            meters.passed(2, 10, 0.5)
        meters.answered("b", "default", "cached", 0.01)
        meters.refused("bad_input")
        now[0] += 2.0
        history.sample()
    samples = history.since(0)
    assert [s.answers for s in samples] == [
        {"computed": 1, "cached": 1},
        {"computed": 2, "cached": 1},
        {"cached": 1},
    ]
    assert [(s.batches, s.media, s.tokens, s.busy_s) for s in samples] == [
        (1, 2, 10, 0.5),
        (2, 4, 20, 1.0),
        (0, 0, 0, 0.0),
    ]
    assert [(s.seq, s.at_s, s.seconds) for s in samples] == [
        (1, 102.0, 2.0),
        (2, 104.0, 2.0),
        (3, 106.0, 2.0),
    ]
    assert samples[0].refusals == {"default": 1}
    assert samples[0].queue == {"default": 3}
    assert samples[0].waiting == 2
    assert (samples[1].p50_s, samples[1].p95_s) == (0.25, 0.25)
    quiet = history.sample()
    assert (quiet.answers, quiet.p50_s) == ({}, None)
    assert [s.seq for s in history.since(0)] == [2, 3, 4], "the ring is bounded"
    assert [s.seq for s in history.since(3)] == [4]


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 1))
def test_quantile_of_any_values_is_nearest_rank(values: list[float], part: float) -> None:
    ordered = sorted(values)
    found = quantile(ordered, part)
    assert found in [round(value, 6) for value in ordered]
    below = sum(round(value, 6) <= found for value in ordered)
    assert below >= part * len(ordered)


def test_dashboard_status_lists_models_and_counts(service: Service, llava_pair: tuple[Path, Path]) -> None:
    first = service.call("GET", "/v1/status").json()
    assert (first["state"], first["version"], first["store"]) == ("serving", __version__, False)
    assert first["executors"] == {"alive": 1, "total": 1}
    a, b, qwen = first["models"]
    assert a["tower_fp"] == b["tower_fp"] != qwen["tower_fp"]
    assert (
        service.post(data={"model": str(llava_pair[0])}, files={"image": png(sample_image(1))}).status_code
        == 200
    )
    assert service.post(data={"model": "nope"}, files={"image": png(sample_image(1))}).status_code == 404
    now = service.call("GET", "/v1/status").json()
    assert now["instance"] == first["instance"]
    assert now["answers"] == {"computed": 1, "coalesced": 0, "cached": 0}
    assert now["apps"] == [{"app": "http", "answers": 1}]
    assert now["refusals"] == [{"qos": "default", "reason": "unknown_model", "refusals": 1}]
    assert service.call("GET", "/v1/status?since=-1").status_code == 422
    service.gate.close()
    assert service.call("GET", "/v1/status").json()["state"] == "draining"


def test_dashboard_status_matches_openapi_schema(service: Service) -> None:
    spec = service.call("GET", "/openapi.json").json()
    schemas = spec["components"]["schemas"]
    assert set(service.call("GET", "/v1/status").json()) == set(schemas["Overview"]["required"])
    history = ServiceHistory(service.encoder.meters)
    assert set(history.sample().__struct_fields__) == set(schemas["SampleRow"]["required"])


def test_dashboard_page_loads_no_foreign_scripts(service: Service) -> None:
    page = service.call("GET", "/")
    assert page.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    names = ("status.js", "plots.js", "status.css", "icon.svg")
    for answer in (page, *(service.call("GET", f"/page/{name}") for name in names)):
        assert answer.status_code == 200
        text = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", "").replace("//\n", ""), "an address"
        assert "innerHTML" not in text
        assert "insertAdjacentHTML" not in text
    assert service.call("GET", "/page/..%2Fserver.py").status_code == 404
    assert service.call("GET", "/page/nothing.js").status_code == 404


def test_dashboard_page_files_are_in_package() -> None:
    shipped = {file.name for file in (files("cornplug.encoder_service.http") / "static").iterdir()}
    assert shipped >= {"index.html", "status.js", "plots.js", "status.css", "icon.svg"}
