"""Reserves that an input asks for: growth while weights load, machines that may be taken back, precision."""

from __future__ import annotations

from typing import Any

import pytest
from planner.made_inputs import QWEN_7B, plan_input

from cornplug.planner.inputs import component_shapes
from cornplug.planner.inputs.schema import LLMShape, PlanInput
from cornplug.planner.pipeline.decide import decide
from cornplug.planner.pipeline.formulate import formulate
from cornplug.planner.report import explanation


def given(
    *, pool: list[dict[str, Any]] | None = None, rules: dict[str, Any] | None = None, **tables: Any
) -> PlanInput:
    request = {"name": "r", "rate": 12.0, "prompt": 600, "output": 100} | tables.get("request", {})
    component = {"name": "qwen", "kind": "llm", "shape": QWEN_7B, "tp": [1], "engines": ["sglang"]}
    return plan_input(
        components=[component | tables.get("component", {})],
        applications=[
            {"name": "chat", "llm": "qwen", "slo": {"ttft_s": 0.8, "tpot_s": 0.06}, "requests": [request]}
            | tables.get("application", {})
        ],
        pool=pool or [{"name": "own", "gpu": "A100-80", "gpus": 1, "price_per_hour": 4.0}],
        rules={"n_plus_one": False, "simulate": False, "use_idle_gpus": False} | (rules or {}),
    )


def test_formulate_replica_starts_after_its_weights_are_read() -> None:
    """15.2 GB at 0.5 GB/s, and a minute of its own."""
    pool = [{"name": "own", "gpu": "A100-80", "gpus": 1, "price_per_hour": 4.0, "weights_gb_s": 0.5}]
    problem = formulate(given(pool=pool, request={"growth_per_minute": 0.2}))
    weights = component_shapes.weights_bytes(LLMShape.model_validate(QWEN_7B), "none")
    assert problem.pool.cells
    assert [c.start_s for c in problem.pool.cells] == [pytest.approx(60 + weights / 0.5e9)] * len(
        problem.cells
    )
    assert [d.growth_per_s for d in problem.pool.demands] == [pytest.approx(0.2 / 60)]
    assert {c.start_s for c in formulate(given(pool=pool)).pool.cells} == {0.0}, "nothing grows"


def test_decide_slower_disk_needs_more_replicas_for_growth() -> None:
    found = []
    for gb_s in (50.0, 0.02):
        pool = [{"name": "own", "gpu": "A100-80", "gpus": 1, "price_per_hour": 4.0, "weights_gb_s": gb_s}]
        decision = decide(given(pool=pool, request={"growth_per_minute": 0.2}), digest="")
        found.append(sum(g.replicas for g in decision.plan.groups))
    quick, slow = found
    assert slow > quick


def test_explain_growth_and_spot_are_priced() -> None:
    pool = [
        {"name": "own", "gpu": "A100-80", "gpus": 1, "price_per_hour": 4.0, "weights_gb_s": 0.02},
        {"name": "spot", "gpu": "A100-80", "gpus": 1, "price_per_hour": 1.0, "spot": True},
    ]
    plan_given = given(pool=pool, request={"growth_per_minute": 0.2}, rules={"spot_share": 0.4})
    decision = decide(plan_given, digest="")
    assert {(n.name, n.spot) for n in decision.plan.nodes} == {("own", False), ("spot", True)}
    found = explanation.explain(plan_given, decision)
    saves = {b.constraint: b.saves_per_hour for b in found.binding}
    assert saves["spot"] is not None
    assert saves["spot"] > 0
    assert saves["growth"] is not None
    assert saves["growth"] > 0
    assert any("spot are spot machines" in note and "40 %" in note for note in found.notes)


def test_decide_work_that_can_wait_takes_spot_machines() -> None:
    pool = [
        {"name": "own", "gpu": "A100-80", "gpus": 1, "price_per_hour": 4.0},
        {"name": "spot", "gpu": "A100-80", "gpus": 1, "price_per_hour": 1.0, "spot": True},
    ]
    online = decide(given(pool=pool), digest="").plan
    assert {n.name for n in online.nodes} == {"own"}, "rules.spot_share is 0"
    waits = decide(given(pool=pool, application={"workload": "offline"}), digest="").plan
    assert {n.name for n in waits.nodes} == {"spot"}


def test_formulate_each_phase_has_its_own_precision() -> None:
    pool = [{"name": "h100", "gpu": "H100", "gpus": 8}]
    component = {
        "quantisations": ["none", "fp8"],
        "prefill_quantisations": ["fp8"],
        "decode_quantisations": ["none"],
    }
    problem = formulate(
        given(pool=pool, component=component, application={"structures": ["monolith", "P+D"]})
    )
    found: dict[str, set[str]] = {}
    for spec in problem.cells.values():
        found.setdefault(spec.service.tasks, set()).add(spec.footprint.quantisation)
    assert found["P"] == {"fp8"}
    assert found["D"] == {"none"}
    assert "fp8" in found["PD"]


def test_plan_of_pair_names_the_precision_of_each_phase() -> None:
    component = {"prefill_quantisations": ["fp8"], "decode_quantisations": ["none"]}
    pool = [{"name": "h100", "gpu": "H100", "gpus": 8}]
    plan = decide(given(pool=pool, component=component, application={"structures": ["P+D"]}), digest="").plan
    assert {g.tasks: g.quantisation for g in plan.groups} == {"P": "fp8", "D": "none"}


@pytest.mark.parametrize("key", ["prefill_quantisations", "decode_quantisations"])
def test_component_precision_of_phase_on_encoder_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="neither prefills nor decodes"):
        plan_input(
            components=[{"name": "vit", "kind": "encoder", key: ["fp8"]}],
            applications=[{"name": "a", "llm": "vit", "requests": [{"name": "r", "rate": 1.0}]}],
            pool=[{"name": "own", "gpu": "A100-80"}],
        )
