"""Engines' metrics become rates, lengths and hit rates."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path

import pytest
from expected_errors import expect_error
from hypothesis import given, settings
from hypothesis import strategies as st

from cornplug.errors import ConfigError
from cornplug.planner import observed_load
from cornplug.planner.observed_load import HistogramCounts, MetricsSnapshot

from ..metrics_text import VLLM, SGLang


def snapshot(text: str, at_s: float) -> MetricsSnapshot:
    return observed_load.parse(text, at_s, "engine")


def test_between_vllm_snapshots_gives_load() -> None:
    engine = VLLM()
    engine.serve(50, 3000, 10, seed=1)
    engine.running.set(8)
    before = snapshot(engine.text, 100)
    engine.serve(300, 400, 60, cached=0.25, seed=2)
    engine.running.set(4)
    engine.waiting.set(14)
    window = observed_load.window_between(before, snapshot(engine.text, 160))
    # 300 finished, and 10 more are in the engine than before: they came in this minute, too.
    assert window.rate == pytest.approx(310 / 60)
    assert window.waiting == 14
    assert window.prompt is not None
    assert window.prompt.mean == pytest.approx(400, rel=0.02), "the 3000-token prompts are of before"
    assert window.output is not None
    assert 50 < window.output.quantile(0.95) <= 100, "the bucket of most"
    assert window.cached_share == pytest.approx(0.25)


def test_between_sglang_snapshots_gives_load() -> None:
    engine = SGLang()
    before = snapshot(engine.text, 0)
    engine.serve(120, 250, 90, cached=0.4)
    engine.queue.set(3)
    window = observed_load.window_between(before, snapshot(engine.text, 60))
    assert (window.rate, window.waiting) == (pytest.approx(123 / 60), 3)
    assert window.prompt is not None
    assert (window.prompt.mean, window.prompt.value_count) == (250, 120)
    assert window.cached_share == pytest.approx(0.4)


def test_engines_with_other_buckets_add_up() -> None:
    one, two = VLLM(), SGLang()
    before = snapshot(one.text + two.text, 0)
    one.serve(10, 400, 10)
    two.serve(30, 250, 10)
    window = observed_load.window_between(before, snapshot(one.text + two.text, 10))
    assert window.prompt is not None
    assert window.prompt.value_count == 40
    assert window.rate == pytest.approx(4)


def test_between_restarted_engine_counts_from_zero() -> None:
    engine = VLLM()
    engine.serve(500, 100, 10)
    before = snapshot(engine.text, 0)
    after = VLLM()
    after.serve(40, 100, 10)
    assert observed_load.window_between(before, snapshot(after.text, 10)).requests == 40


def test_between_encoder_snapshots_gives_embedding_hits() -> None:
    def text(computed: int, coalesced: int, cached: int) -> str:
        lines = ["# TYPE cornplug_encoder_answers_total counter"]
        for origin, n in (("computed", computed), ("coalesced", coalesced), ("cached", cached)):
            lines.append(f'cornplug_encoder_answers_total{{app="chat",origin="{origin}",qos="default"}} {n}')
        return "\n".join(lines) + "\n"

    window = observed_load.window_between(snapshot(text(10, 0, 0), 0), snapshot(text(30, 5, 55), 10))
    assert window.embedding_hits == {"chat": pytest.approx(0.75)}


def test_read_prometheus_answer_equals_engine_metrics(tmp_path: Path) -> None:
    engine = VLLM()
    engine.serve(20, 400, 10)
    result = [
        {"metric": {"__name__": name, **dict(labels)}, "value": [7.0, str(value)]}
        for (name, labels), value in snapshot(engine.text, 0).values.items()
    ]
    body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}})
    file = tmp_path / "answer.json"
    file.write_text(body)
    os.utime(file, (50, 50))
    assert observed_load.read_metrics(str(file)) == snapshot(engine.text, 50)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("<html>not found</html>", "is neither Prometheus text nor JSON"),
        ('{"status": "error"}', "is neither Prometheus text nor JSON"),
        ("# TYPE up gauge\nup 1\n", "has no metric of vLLM"),
    ],
)
def test_read_bad_metrics_are_refused(tmp_path: Path, body: str, says: str) -> None:
    file = tmp_path / "m"
    file.write_text(body)
    with expect_error(ConfigError, field=f"--metrics {file}", match=says):
        observed_load.read_metrics(str(file))


def test_read_absent_source_is_refused(tmp_path: Path) -> None:
    with expect_error(ConfigError, field=f"--metrics {tmp_path / 'none'}"):
        observed_load.read_metrics(str(tmp_path / "none"))
    with expect_error(ConfigError, field="--metrics http://127.0.0.1:9/metrics"):
        observed_load.read_metrics("http://127.0.0.1:9/metrics")
    with expect_error(ConfigError, field="--metrics"):
        observed_load.window_between(MetricsSnapshot(2, {}), MetricsSnapshot(1, {}))


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 999), min_size=1, max_size=40), st.floats(0.01, 1))
def test_histogram_counts_quantile_lies_in_true_bucket(values: list[float], q: float) -> None:
    bounds = (1.0, 10.0, 100.0, 1000.0)
    inside = [
        sum(1 for v in values if low < v <= high) for low, high in zip((0, *bounds), bounds, strict=False)
    ]
    found = HistogramCounts(bounds, tuple(map(float, inside)), sum(values)).quantile(q)
    real = sorted(values)[max(math.ceil(q * len(values) - 1e-9) - 1, 0)]
    bucket = next(i for i, b in enumerate(bounds) if real <= b)
    assert (0, *bounds)[bucket] <= found <= bounds[bucket] * 1.0001 or found == pytest.approx(
        (0, *bounds)[bucket]
    )


def test_vllm_still_has_these_names() -> None:
    """Read in its source: importing it takes 10 s."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.origin).with_name("v1") / "metrics" / "loggers.py"
    assert_names(source.read_text(), "vllm:")


def assert_names(source: str, prefix: str) -> None:
    names = {
        n
        for group in (
            observed_load.FINISHED_METRICS,
            observed_load.REJECTED_METRICS,
            observed_load.PRESENT_METRICS,
            observed_load.PROMPT_METRICS,
            observed_load.OUTPUT_METRICS,
        )
        for n in group
    } | {*observed_load.TTFT_METRICS, *observed_load.CACHED_METRICS, *observed_load.LOOKUP_METRICS}
    missing = [
        n
        for n in names
        if n.startswith(prefix) and f'"{n}"' not in source and f'"{n.removesuffix("_total")}"' not in source
    ]
    assert missing == []
