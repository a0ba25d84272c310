"""The committed plans of examples/plan_and_launch belong to its inputs and keep their bounds."""

import hashlib
import importlib.util
import io
from pathlib import Path

import pytest
from rich.console import Console

from cornplug.planner.plan import Plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan_and_launch"


@pytest.mark.parametrize("name", ["plan", "hand-made"])
def test_plan_of_example_matches_its_input(name):
    plan = Plan.load(EXAMPLE / name / "plan.json")

    assert plan.input_digest == hashlib.sha256((EXAMPLE / f"{name}.toml").read_bytes()).hexdigest()
    assert plan.proof.status == ("optimal" if name == "hand-made" else "feasible")


def test_plan_of_example_keeps_every_bound():
    for name in ("plan", "hand-made"):
        for latency_forecasts in Plan.load(EXAMPLE / name / "plan.json").latency_forecasts:
            for bound, times in (
                (latency_forecasts.slo_ttft_s, latency_forecasts.ttft),
                (latency_forecasts.slo_tpot_s, latency_forecasts.tpot),
                (latency_forecasts.slo_e2e_s, latency_forecasts.e2e),
            ):
                assert bound is None or (times.p95 is not None and times.p95 <= bound)


def test_compare_example_plans_shows_savings():
    spec = importlib.util.spec_from_file_location("compare", EXAMPLE / "compare.py")
    compare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compare)
    out = io.StringIO()
    compare.show(
        *(Plan.load(EXAMPLE / name / "plan.json") for name in ("plan", "hand-made")),
        Console(file=out, width=200),
    )

    assert "saves $" in out.getvalue()
