"""Names decide nothing: an input under other names has the same plan."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner.made_inputs import QWEN_7B, plan_input

from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.pipeline.decide import decide
from cornplug.planner.plan import Plan

REFERENCES = frozenset({"name", "llm", "encoder", "generator", "tower_of", "qos"})
LENGTHS = ({"prompt": 900, "output": 60}, {"prompt": {"mean": 500, "cv": 0.8}, "output": {"mean": 150}})


def small(rates: list[float]) -> PlanInput:
    """A chat and a batch application, one model, two GPU types; closed forms only."""
    requests = [{"name": f"r{i}", "rate": rate} | LENGTHS[i % len(LENGTHS)] for i, rate in enumerate(rates)]
    return plan_input(
        components=[{"name": "qwen", "kind": "llm", "shape": QWEN_7B, "tp": [1], "engines": ["vllm"]}],
        applications=[
            {"name": "chat", "llm": "qwen", "slo": {"ttft_s": 2, "tpot_s": 0.1}, "requests": requests},
            {"name": "batch", "llm": "qwen", "workload": "offline", "requests": requests[:1]},
        ],
        pool=[{"name": "a100", "gpu": "A100-80"}, {"name": "h100", "gpu": "H100"}],
        rules={"simulate": False, "n_plus_one": False},
    )


def renamed(tables: Any, names: dict[str, str], prefix: str) -> Any:
    """The tables with another name for each that refers to something of the input."""
    if isinstance(tables, list):
        return [renamed(one, names, prefix) for one in tables]
    if not isinstance(tables, dict):
        return tables
    return {
        key: names.setdefault(value, f"{prefix}{-len(names) % 10}")
        if key in REFERENCES and isinstance(value, str)
        else renamed(value, names, prefix)
        for key, value in tables.items()
    }


def decided(of: PlanInput) -> dict[str, Any]:
    """The decisions, with groups by their place instead of their name."""
    plan: Plan = decide(of, digest="").plan
    place = {g.name: i for i, g in enumerate(plan.groups)}
    return {
        "dollars": plan.cost_per_hour,
        "nodes": [(n.gpu, n.count) for n in plan.nodes],
        "groups": [(g.gpu, g.replicas, g.placement, list(g.capacity.values())) for g in plan.groups],
        "routes": [
            (r.rate, [[(place[name], weight) for name, weight in s.groups.items()] for s in r.stages])
            for r in plan.routes
        ],
    }


@given(st.lists(st.floats(0.5, 40), min_size=1, max_size=2), st.sampled_from(["a", "Z", "m-"]))
@settings(max_examples=4, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_decide_renamed_input_has_same_plan(rates: list[float], prefix: str) -> None:
    before = small(rates)
    other = PlanInput.model_validate(renamed(before.model_dump(exclude_unset=True), {}, prefix))
    assert {app.name for app in other.applications}.isdisjoint(app.name for app in before.applications)
    assert decided(other) == decided(before)
