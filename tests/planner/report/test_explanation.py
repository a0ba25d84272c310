"""Reasons of plans that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cornplug.planner.inputs.schema import PlanInput, Slo
from cornplug.planner.optimizer import decomposition, solvers
from cornplug.planner.pipeline.decide import PlanDecision, decide
from cornplug.planner.report import counterfactual, explanation, slo_cost_curve
from cornplug.planner.report.counterfactual import CounterfactualResult, ExplanationBudget

from ..sample_input import given


def decided(of: PlanInput) -> PlanDecision:
    return decide(of, digest="0" * 64)


def full(**rules: Any) -> dict[str, Any]:
    """No reserves: costs are then plain sums."""
    return {"n_plus_one": False, "simulate": False, "max_utilisation": 1.0, "online_share": 1.0} | rules


PAIR = {
    "components": [
        {
            "name": "llm",
            "kind": "llm",
            "tp": [1],
            "engines": ["vllm"],
            "profiles": [
                {"kind": "throughput", "gpu": "A100-80", "role": "P", "requests_per_s": 5.6},
                {"kind": "throughput", "gpu": "A100-80", "role": "D", "requests_per_s": 10.0},
                {"kind": "throughput", "gpu": "A100-80", "role": "PD", "requests_per_s": 1.6},
            ],
        }
    ],
    "pool": [{"name": "a100", "gpu": "A100-80", "gpus": 1, "price_per_hour": 3.0, "stock": 12}],
}
"""DistServe's example: 2 P and 1 D carry 10 requests/s, which takes 7 monoliths."""


def pair(rate: float, **changes: Any) -> PlanInput:
    app = {
        "name": "chat",
        "llm": "llm",
        "workload": "online",
        "slo": {"ttft_s": 0.4},
        "structures": ["monolith", "P+D"],
        "requests": [{"name": "short", "rate": rate}],
    }
    rules = full(disaggregation_efficiency_p=1.0, disaggregation_efficiency_d=1.0)
    return PlanInput.model_validate(PAIR | {"applications": [app], "rules": rules} | changes)


def test_explanation_alternatives_have_prices() -> None:
    found = explanation.explain(given(rate=14, rules=full()), decided(given(rate=14, rules=full())))
    # Best: 1 A100 (10) + 2 A10G (4) = 5.69.
    costs = {a.name: a.cost_per_hour for a in found.alternatives}
    assert costs["without A10G"] == pytest.approx(2 * 3.67)
    assert costs["without A100-80"] == pytest.approx(7 * 1.01)
    assert [a.cost_per_hour for a in found.alternatives] == sorted(costs.values(), key=float)  # type: ignore[arg-type]
    assert (
        next(a.reason_against for a in found.alternatives if a.name == "without A100-80")
        == "costs $1.38/h more (+24 %)"
    )


def test_explanation_equal_engine_is_called_as_good() -> None:
    found = explanation.explain(given(), decided(given()))
    (one,) = [a for a in found.alternatives if a.name in ("without vllm", "without sglang")]
    assert one.reason_against == "equally good within the solver's gap"


def test_explanation_binding_stock_says_the_saving_of_more() -> None:
    pool = [
        {"name": "a10g", "gpu": "A10G", "gpus": 1, "price_per_hour": 1.01, "stock": 32},
        {"name": "a100", "gpu": "A100-80", "gpus": 1, "price_per_hour": 3.67, "stock": 1},
    ]
    scarce = given(rate=20, rules=full(), pool=pool)
    binding = {b.constraint: b for b in explanation.explain(scarce, decided(scarce)).binding}
    # 1 A100 and 5 A10G, $8.72; with a second A100, $7.34.
    assert binding["stock[a100]"].saves_per_hour == pytest.approx(8.72 - 7.34)
    assert "stock[a10g]" not in binding


def test_explanation_binding_reserves_have_prices() -> None:
    spared = given(rate=16, rules=full(online_share=0.8, n_plus_one=True))
    binding = {b.constraint: b.saves_per_hour for b in explanation.explain(spared, decided(spared)).binding}
    assert binding["online"] > 0  # type: ignore[operator]
    assert "rules.online_share" in next(
        b.question.text
        for b in counterfactual.constraint_questions(decided(spared).pool, decided(spared).solution)
        if b.question.name == "online"
    )
    assert binding["demand[chat/short]"] > 0  # type: ignore[operator]


def test_ask_for_a_plan_as_good_as_none_is_finds_none() -> None:
    """1 A100 and 2 A10G, $5.69, carry 14 requests/s: no plan costs $5.60."""
    pool = decided(given(rate=14, rules=full())).pool
    settings, budget = given().solver, ExplanationBudget(1.0)
    assert counterfactual.solve_question(pool, settings, budget, at_least=5.70).value == pytest.approx(5.69)
    result = counterfactual.solve_question(pool, settings, budget, at_least=5.60)
    assert (result.value, result.proven) == (None, True)


def test_explanation_monolith_loses_when_roles_differ() -> None:
    found = explanation.explain(pair(10), decided(pair(10)))
    # At 2.5 requests/s 2 of either do; at 5, 2 do the work of 4.
    assert found.monolith == (
        "The monolith loses here: using it everywhere costs $21.00/h, 133 % more. "
        "It is the cheapest at 0.25 times this load, it is not at 0.5, 2 and 4 times this load."
    )


def test_explanation_monolith_wins_when_fast() -> None:
    profiles = [
        *PAIR["components"][0]["profiles"][:2],  # type: ignore[index]
        {"kind": "throughput", "gpu": "A100-80", "role": "PD", "requests_per_s": 6.0},
    ]
    llm = PAIR["components"][0] | {"profiles": profiles}  # type: ignore[operator]
    found = explanation.explain(pair(5, components=[llm]), decided(pair(5, components=[llm])))
    assert found.monolith.startswith("The monolith wins here: dividing requests costs $6.00/h, 100 % more.")


def test_explanation_plan_without_bounds_has_no_curve() -> None:
    assert explanation.explain(pair(10), decided(pair(10))).curve == []


def timed(ttft_s: float) -> PlanInput:
    """A 7B model by its size: L4 computes 4000 tokens in half a second and more, H100 in a tenth."""
    shape = {
        "kind": "llm", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128,
        "parameters": 7.0e9,
    }  # fmt: skip
    return PlanInput.model_validate(
        {
            "components": [{"name": "llm", "kind": "llm", "tp": [1], "engines": ["vllm"], "shape": shape}],
            "applications": [
                {
                    "name": "chat",
                    "llm": "llm",
                    "slo": {"ttft_s": ttft_s, "tpot_s": 0.2},
                    "structures": ["monolith"],
                    "requests": [{"name": "long", "rate": 1.0, "prompt": 4000, "output": 8}],
                }
            ],
            "pool": [
                {"name": "l4", "gpu": "L4", "gpus": 1, "price_per_hour": 0.8},
                {"name": "h100", "gpu": "H100", "gpus": 1, "price_per_hour": 6.9},
            ],
            "rules": full(),
        }
    )


def test_explanation_looser_bounds_cost_less() -> None:
    tight = timed(1.2)
    decision = decided(tight)
    found = explanation.explain(tight, decision, work=60)
    costs = {p.slo_factor: p.cost_per_hour for p in found.curve}
    assert sorted(costs) == [0.5, 0.7, 1.0, 1.5, 2.0, 3.0]
    assert costs[1.0] == decision.plan.cost_per_hour
    falling = [float("inf") if c is None else c for c in costs.values()]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < falling[2]
    (slo,) = [b for b in found.binding if b.constraint == "slo[chat]"]
    assert slo.saves_per_hour == pytest.approx(costs[1.0] - (costs[1.5] or 0.0))
    assert any(note.startswith("Times of llm/PD are estimates") for note in found.notes)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_explanation_estimated_sglang_is_doubted(engine: str) -> None:
    """Its first tokens came later than estimated: benchmarks/results/plan_vs_published.md."""
    tables = timed(1.2).model_dump()
    tables["components"][0]["engines"] = [engine]
    given = PlanInput.model_validate(tables)
    found = explanation.explain(given, decided(given), work=0)
    assert any("In published measurements, SGLang" in note for note in found.notes) == (engine == "sglang")


def test_explanation_without_work_is_noted() -> None:
    found = explanation.explain(pair(10), decided(pair(10)), work=0)
    assert found.alternatives == []
    assert found.binding == []
    assert any("The solver work did not suffice for monolith everywhere" in note for note in found.notes)


def test_explanation_question_ended_by_clock_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a starved machine: the result is not the same everywhere then, and the report says so."""
    given, solve = timed(1.2), solvers.solve
    decision = decided(given)

    def late(*arguments: Any, **options: Any) -> solvers.SolverRun:
        return replace(solve(*arguments, **options), timed_out=True)

    for module in (counterfactual, decomposition):
        monkeypatch.setattr(module, "run_solver", late)
    notes = explanation.explain(given, decision, work=60).notes
    (note,) = [n for n in notes if n.startswith("The solver's time limit ended ")]
    assert "monolith everywhere" in note
    assert note.endswith("Another run may differ.")
    monkeypatch.undo()
    assert not any("time limit" in n for n in explanation.explain(given, decision, work=60).notes)


def test_explanation_plan_of_sweep_ended_by_clock_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    given, solve = timed(1.2), solvers.solve
    decision = decided(given)
    monkeypatch.setattr(decomposition, "run_solver", lambda *a, **o: replace(solve(*a, **o), timed_out=True))
    notes = explanation.explain(given, decision, work=60).notes
    assert any("time limit ended SLO × 0.7, SLO × 1.5, SLO × 0.5 and " in note for note in notes)


def test_scaled_applications_change_bounds_only() -> None:
    applications = given().applications
    (looser,) = slo_cost_curve.scale_bounds(applications, 2.0)
    assert looser.slo == Slo(ttft_s=1.0)
    assert [looser.model_copy(update={"slo": applications[0].slo})] == applications


def test_at_a_larger_load_the_stock_is_no_obstacle() -> None:
    pool = decided(given()).pool
    larger = explanation.scale_load(pool, 4.0)
    assert [d.rate for d in larger.demands] == [d.rate * 4 for d in pool.demands]
    assert [n.stock for n in larger.nodes] == [n.stock * 4 for n in pool.nodes]


@pytest.mark.parametrize(
    ("single", "says"),
    [
        (CounterfactualResult(12.0, True), "using it everywhere costs $12.00/h, 20 % more."),
        (CounterfactualResult(10.0, True), "Using the monolith everywhere costs the same here."),
        (
            CounterfactualResult(None, True, "demand[a/b]: too slow"),
            "no plan of monoliths only meets the SLOs with this pool (demand[a/b]: too slow).",
        ),
    ],
)
def test_monolith_single_result_is_worded(single: CounterfactualResult, says: str) -> None:
    assert explanation.monolith_loses(10.0, single).endswith(says)


def test_explanation_budget_spent_has_nothing_left() -> None:
    budget = ExplanationBudget(3)
    budget.spend(2)
    assert budget.remaining == 1
    budget.spend(3)
    assert budget.remaining == 0
