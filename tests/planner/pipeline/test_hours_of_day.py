"""Rates by hour: the plan carries the highest, and names the machines that other hours do without."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from cornplug.planner import plan_command
from cornplug.planner.inputs.schema import PlanInput, RequestSpec
from cornplug.planner.pipeline.decide import decide, with_hours
from cornplug.planner.plan import Plan
from cornplug.planner.report import formatting, plan_folder

from ..made_inputs import QWEN_7B

NIGHT_AND_DAY = [1.0] * 8 + [8.0] * 12 + [3.0] * 4
TEN_A_GPU = {"kind": "throughput", "gpu": "H100", "requests_per_s": 1.0}


def planned(*requests: dict[str, Any], simulate: bool = False, **rules: Any) -> Plan:
    """On machines of one H100 for a dollar, each of which carries a request a second."""
    llm: dict[str, Any] = {"name": "llm", "kind": "llm", "tp": [1], "profiles": [TEN_A_GPU]}
    if simulate:
        llm = {"name": "llm", "kind": "llm", "tp": [1], "shape": QWEN_7B}
    workload: dict[str, Any] = {"workload": "offline"} if not simulate else {"slo": {"ttft_s": 1.0}}
    given = {
        "components": [llm],
        "applications": [{"name": "chat", "llm": "llm", "requests": list(requests), **workload}],
        "pool": [{"name": "h", "gpu": "H100", "gpus": 1, "price_per_hour": 1.0, "stock": 99}],
        "rules": {
            "simulate": simulate, "n_plus_one": False, "max_utilisation": 1.0, "online_share": 1.0, **rules
        },
    }  # fmt: skip
    return with_hours(decide(PlanInput.model_validate(given), digest="0" * 64))


def test_with_hours_plan_carries_highest_and_gives_back_the_rest() -> None:
    plan = planned({"name": "text", "rate_by_hour": NIGHT_AND_DAY})
    assert plan.cost_per_hour == 8.0
    assert [h.nodes["h"] for h in plan.hours] == [1] * 8 + [8] * 12 + [3] * 4
    assert [h.cost_per_hour for h in plan.hours] == NIGHT_AND_DAY
    assert [(p.hours, p.needed, p.releasable) for p in formatting.day_parts(plan)] == [
        ("00 to 08 h", "1 × h", "7 × h"),
        ("08 to 20 h", "8 × h", "–"),
        ("20 to 24 h", "3 × h", "5 × h"),
    ]
    assert "$116.00" in formatting.day_cost(plan)
    assert "$192.00" in formatting.day_cost(plan)


def test_with_hours_classes_have_their_own_highest_hour() -> None:
    """The plan has room for both at once; hours have what both need then."""
    day, night = [0.0] * 12 + [4.0] * 12, [2.0] * 12 + [0.0] * 12
    plan = planned({"name": "day", "rate_by_hour": day}, {"name": "night", "rate_by_hour": night})
    assert plan.cost_per_hour == 6.0
    assert [h.nodes["h"] for h in plan.hours] == [2] * 12 + [4] * 12


def test_with_hours_class_without_them_is_there_all_day() -> None:
    plan = planned({"name": "text", "rate_by_hour": [0.0] * 23 + [4.0]}, {"name": "steady", "rate": 2.0})
    assert [h.nodes["h"] for h in plan.hours] == [2] * 23 + [6]
    assert planned({"name": "steady", "rate": 2.0}).hours == []


def test_with_hours_rounds_loads_up_to_eighths() -> None:
    plan = planned({"name": "text", "rate_by_hour": [4.01] + [8.0] * 23, "peak": 2.0})
    assert plan.cost_per_hour == 16.0
    assert plan.hours[0].nodes == {"h": 10}, "five eighths of 16"


@pytest.mark.more
def test_with_hours_reserve_for_a_lost_replica_stays() -> None:
    hours = [0.5] * 12 + [3.0] * 12
    spare = planned({"name": "text", "rate_by_hour": hours, "prompt": 4000}, simulate=True, n_plus_one=True)
    assert min(h.nodes["h"] for h in spare.hours) == 2
    assert spare.model_validate_json(spare.model_dump_json()) == spare


def test_plan_of_hours_is_shown_in_both_reports() -> None:
    plan = planned({"name": "text", "rate_by_hour": NIGHT_AND_DAY})
    console = Console(record=True, width=120)
    plan_command.show(plan, console)
    for text in (console.export_text(), plan_folder.html_report(plan)):
        assert "00 to 08 h" in text
        assert "7 × h" in text
        assert "$116.00" in text


@pytest.mark.parametrize("rate", [None, 8.0])
def test_request_spec_hours_give_its_rate(rate: float | None) -> None:
    fields = {"name": "text", "rate_by_hour": NIGHT_AND_DAY} | ({} if rate is None else {"rate": rate})
    assert RequestSpec.model_validate(fields).rate == 8.0
