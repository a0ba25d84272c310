"""Plans of varied inputs: what they predict is what their simulation gives, and no SLO is missed there."""

from __future__ import annotations

import pytest

from cornplug.planner.deciding.decide import decide
from cornplug.planner.given.inputs import PlanInput
from cornplug.planner.plan import Outlook
from planner.scenarios import SCENARIOS

QUICK = {"one class, one model"}
TIMES = ("ttft", "tpot", "e2e")


def compared(outlook: Outlook) -> dict[str, tuple[float, float]]:
    """Predicted and simulated 95th percentiles, of the times that the class has."""
    found = {}
    for what in TIMES:
        predicted, simulated = getattr(outlook, what), getattr(outlook, f"simulated_{what}")
        if predicted.p95 is not None or simulated.p95 is not None:
            found[what] = (predicted.p95, simulated.p95)
    return found


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.integration) for name in SCENARIOS],
)
def test_a_plan_keeps_what_it_predicts(name: str) -> None:
    plan = decide(PlanInput.model_validate(SCENARIOS[name]), digest="0" * 64).plan
    assert len(plan.outlook) == sum(len(app["requests"]) for app in SCENARIOS[name]["applications"])
    for outlook in plan.outlook:
        who = f"{outlook.app}/{outlook.request}"
        times = compared(outlook)
        assert "e2e" in times, who
        for what, (predicted, simulated) in times.items():
            assert predicted == pytest.approx(simulated, rel=0.1), f"{who} {what}"
        for what in TIMES:
            bound = getattr(outlook, f"slo_{what}_s")
            if bound is not None:
                kept = getattr(getattr(outlook, f"simulated_{what}"), outlook.slo_percentile)
                assert kept is None or kept <= 1.05 * bound, f"{who} {what}"


def test_the_scenarios_are_many_and_differ() -> None:
    assert len(SCENARIOS) >= 20
    assert len({str(tables) for tables in SCENARIOS.values()}) == len(SCENARIOS)
