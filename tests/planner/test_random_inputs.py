"""Random inputs through the public door: every plan is whole, for each objective."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cornplug.errors import PlanInfeasible
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.pipeline.decide import PlanDecision, decide

GPUS = ("L4", "A10G", "A100-80")
rates = st.floats(0.05, 40).map(lambda rate: round(rate, 6))


@st.composite
def inputs(draw: st.DrawFn, objective: str) -> PlanInput:
    """Two models on a few nodes of three types, each of known throughput, and up to four request classes."""
    components = [
        {
            "name": name,
            "kind": "llm",
            "tp": [1, 2],
            "engines": ["vllm"],
            "profiles": [
                {"kind": "throughput", "gpu": gpu, "tp": tp, "requests_per_s": draw(rates)}
                for gpu in GPUS
                for tp in (1, 2)
            ],
        }
        for name in ("small", "large")
    ]
    applications = [
        {
            "name": f"app{i}",
            "llm": draw(st.sampled_from(("small", "large"))),
            "workload": draw(st.sampled_from(("online", "offline"))),
            "slo": {"ttft_s": 1.0},
            "structures": ["monolith"],
            "requests": [{"name": "r", "rate": draw(rates)}],
        }
        for i in range(draw(st.integers(1, 4)))
    ]
    pool = [
        {
            "name": gpu,
            "gpu": gpu,
            "gpus": draw(st.sampled_from((1, 2, 4))),
            "stock": draw(st.integers(1, 3)),
            "price_per_hour": round(draw(st.floats(0.5, 5)), 3),
        }
        for gpu in GPUS
    ]
    tables: dict[str, Any] = {
        "components": components,
        "applications": applications,
        "pool": pool,
        "rules": {"objective": objective, "n_plus_one": draw(st.booleans()), "simulate": False},
        "solver": {"work": 1.0},
    }
    return PlanInput.model_validate(tables)


@pytest.mark.parametrize("objective", ["cost", "goodput", "max-min"])
def test_decide_random_input_has_whole_plan(objective: str) -> None:
    @given(inputs(objective))
    @settings(max_examples=12, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    def check(given_input: PlanInput) -> None:
        try:
            decision = decide(given_input, digest="")
        except PlanInfeasible:
            return
        whole(given_input, decision)

    check()


def whole(of: PlanInput, decision: PlanDecision) -> None:
    """All work is on replicas that exist, within their capacity; nothing is served twice."""
    plan, limit = decision.plan, of.rules.max_utilisation
    groups = {g.name: g for g in plan.groups}
    assert {f.cell for f in decision.solution.flows} <= decision.solution.replicas.keys()
    load: defaultdict[str, float] = defaultdict(float)
    for route in plan.routes:
        for stage in route.stages:
            assert sum(stage.groups.values()) == pytest.approx(1)
            for name, weight in stage.groups.items():
                load[name] += route.rate * weight / groups[name].capacity[f"{route.app}/{route.request}"]
    for name, replicas in load.items():
        assert replicas <= limit * groups[name].replicas * (1 + 1e-4)
    for forecast in plan.latency_forecasts:
        assert forecast.served <= forecast.rate * (1 + 1e-6)
        if of.rules.objective == "cost":
            assert forecast.served == pytest.approx(forecast.rate, rel=1e-4)
