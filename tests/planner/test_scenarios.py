"""Plans of varied inputs: every class has its times, and no SLO is missed in the simulation of its plan."""

from __future__ import annotations

import pytest
from planner.scenarios import SCENARIOS

from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.pipeline.decide import decide

QUICK = {"one class, one model"}
TIMES = ("ttft", "tpot", "e2e")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.more) for name in SCENARIOS],
)
def test_decide_every_scenario_keeps_bounds(name: str) -> None:
    plan = decide(PlanInput.model_validate(SCENARIOS[name]), digest="0" * 64).plan
    assert len(plan.latency_forecasts) == sum(len(app["requests"]) for app in SCENARIOS[name]["applications"])
    for latency_forecasts in plan.latency_forecasts:
        who = f"{latency_forecasts.app}/{latency_forecasts.request}"
        assert latency_forecasts.e2e.p95 is not None, who
        for what in TIMES:
            bound = getattr(latency_forecasts, f"slo_{what}_s")
            if bound is not None:
                kept = getattr(getattr(latency_forecasts, what), latency_forecasts.slo_percentile)
                assert kept is None or kept <= 1.05 * bound, f"{who} {what}"


def test_scenarios_all_differ() -> None:
    assert len(SCENARIOS) >= 20
    assert len({str(tables) for tables in SCENARIOS.values()}) == len(SCENARIOS)
