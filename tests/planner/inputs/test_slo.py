"""Bounds on several percentiles, and the errors of tables that contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from cornplug.errors import ConfigError
from cornplug.planner.inputs import toml_reader
from cornplug.planner.inputs.request_tables import IdleReplica, IdleTimes, PercentileBounds, Slo

GOOD = Path(__file__).parents[1] / "good_input.toml"


def test_slo_first_seconds_are_of_first_table_that_bounds_them() -> None:
    slo = Slo(
        percentile="p50",
        ttft_s=1.0,
        also=[PercentileBounds(percentile="p99", ttft_s=3.0, e2e_s=20.0), PercentileBounds(e2e_s=9.0)],
    )
    assert slo.first_bound_s("ttft") == 1.0
    assert [(b.percentile, b.value) for b in slo.all_bounds("ttft")] == [("p50", 1.0), ("p99", 3.0)]
    assert slo.first_bound_s("e2e") == 20.0
    assert slo.first_bound_s("tpot") is None


def test_slo_slowdown_in_seconds_is_of_mean_idle_request() -> None:
    slo = Slo(percentile="p90", tpot_slowdown=1.5, idle=IdleReplica(gpu="H100"))
    assert slo.has_bounds
    assert slo.has_slowdowns
    assert slo.first_bound_s("tpot") is None
    assert slo.first_bound_s("tpot", IdleTimes(0.1, 0.02, 2.0)) == pytest.approx(0.03)


def test_slo_scaled_changes_bounds_of_all_percentiles() -> None:
    also = [PercentileBounds(percentile="p99", tpot_s=0.1, e2e_slowdown=2.0)]
    slo = Slo(ttft_s=1.0, also=also, idle=IdleReplica(gpu="H100")).scaled(2.0)
    assert slo.ttft_s == 2.0
    assert (slo.also[0].tpot_s, slo.also[0].e2e_slowdown) == (0.2, 4.0)
    assert slo.tpot_s is None


@pytest.mark.parametrize(
    ("also", "problem"),
    [
        ('[{ percentile = "p99" }]', "table 1 has no bound"),
        ('[{ percentile = "p95", ttft_s = 3.0 }]', "a second ttft_s for p95"),
        ('[{ percentile = "p98", ttft_s = 3.0 }]', '"p98" is not an allowed value'),
        ('[{ percentile = "p99", ttft = 3.0 }]', "unknown key"),
    ],
)
def test_slo_wrong_table_of_also_is_error_with_line(tmp_path: Path, also: str, problem: str) -> None:
    text = GOOD.read_text()
    bad = tmp_path / "plan.toml"
    first = next(line for line in text.splitlines() if line.startswith("slo = {"))
    bad.write_text(text.replace(first, f'slo = {{ percentile = "p95", ttft_s = 1.0, also = {also} }}', 1))
    with pytest.raises(ConfigError, match=r"slo\.also") as error:
        toml_reader.read(bad)
    assert problem in str(error.value)
    assert f"{bad}:{text.splitlines().index(first) + 1} applications[0].slo.also" in str(error.value)


@pytest.mark.parametrize(
    ("slo", "said"),
    [
        ("{ ttft_slowdown = 2.0 }", "slo.idle: missing, but the slowdowns need it. Add the reference"),
        ('{ ttft_slowdown = 0.9, idle = { gpu = "H100" } }', "slo.ttft_slowdown: 0.9 is not above 1"),
        (
            '{ ttft_slowdown = 2.0, idle = { gpu = "H10O" } }',
            "slo.idle.gpu: no GPU 'H10O' in the table. Did you",
        ),
    ],
)
def test_slo_wrong_slowdown_is_error_with_remedy(tmp_path: Path, slo: str, said: str) -> None:
    text = GOOD.read_text()
    bad = tmp_path / "plan.toml"
    first = next(line for line in text.splitlines() if line.startswith("slo = {"))
    bad.write_text(text.replace(first, f"slo = {slo}", 1))
    with pytest.raises(ConfigError) as error:
        toml_reader.read(bad)
    assert said in str(error.value)
