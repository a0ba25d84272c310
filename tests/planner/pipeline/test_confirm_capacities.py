"""How much of the solver's work each round has, until every cell that a plan uses is simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from cornplug.errors import PlanUnfinished
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.optimizer.optimization_problem import PoolSolution
from cornplug.planner.pipeline import confirm_capacities
from cornplug.planner.pipeline.confirm_capacities import (
    FOLLOW_UP_WORK,
    MAX_ROUNDS,
    MAX_SCOUT_ROUNDS,
    SCOUT_WORK,
    SEARCH_WORK,
)
from cornplug.planner.pipeline.confirm_capacities import with_simulated_capacities as confirmed
from cornplug.planner.pipeline.formulate import formulate

from ..made_inputs import QWEN_7B, plan_input


def chat(**rules: Any) -> PlanInput:
    """One application and two GPU types: few cells to simulate."""
    return plan_input(
        components=[{"name": "qwen", "kind": "llm", "shape": QWEN_7B, "tp": [1, 2]}],
        applications=[
            {
                "name": "chat",
                "llm": "qwen",
                "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
                "requests": [{"name": "text", "rate": 6, "prompt": 800, "output": 100}],
            }
        ],
        pool=[{"name": "l4", "gpu": "L4", "gpus": 4}, {"name": "h100", "gpu": "H100", "gpus": 8}],
        rules=rules,
    )


@pytest.fixture
def efforts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Shares of the solver's work, by round."""
    found, solve = list[float](), confirm_capacities.solve_with_baseline

    def noted(pool: Any, settings: Any, *arguments: Any) -> PoolSolution:
        found.append(round(settings.work / WORK, 6))
        return replace(solve(pool, settings, *arguments), status=STATUS["now"])

    monkeypatch.setattr(confirm_capacities, "solve_with_baseline", noted)
    return found


WORK = chat().solver.work
STATUS: dict[str, Literal["optimal", "feasible"]] = {"now": "feasible"}


def quiet(_phase: str, _share: float) -> None:
    pass


def test_plan_cells_are_searched_once_and_looked_at_again_with_little_work(
    efforts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATUS, "now", "feasible")
    problem, solution = confirmed(formulate(chat()), quiet, None)
    assert efforts[0] == SCOUT_WORK
    assert efforts.count(SEARCH_WORK) == 1
    search = efforts.index(SEARCH_WORK)
    assert efforts[:search] == [SCOUT_WORK] * search
    assert search <= MAX_SCOUT_ROUNDS
    assert set(efforts[search + 1 :]) <= {FOLLOW_UP_WORK}
    assert len(efforts) <= MAX_ROUNDS
    used = [problem.cells[name] for name, n in solution.replicas.items() if n]
    assert all(spec.simulated_replicas for spec in used if spec.has_times)

    efforts.clear()
    confirmed(problem, quiet, None, similar_solution=solution)
    assert set(efforts) == {FOLLOW_UP_WORK}


def test_plan_proven_plan_is_not_searched_again(
    efforts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STATUS, "now", "optimal")
    confirmed(formulate(chat()), quiet, None)
    assert set(efforts) == {SCOUT_WORK}


def test_plan_unfinished_round_gets_all_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    found, solve = list[float](), confirm_capacities.solve_with_baseline

    def unfinished(pool: Any, settings: Any, *arguments: Any) -> PoolSolution:
        found.append(round(settings.work / WORK, 6))
        if found[-1] < 1:
            raise PlanUnfinished("no plan was found")
        return solve(pool, settings, *arguments)

    monkeypatch.setattr(confirm_capacities, "solve_with_baseline", unfinished)
    confirmed(formulate(chat()), quiet, None)
    assert found[:2] == [SCOUT_WORK, 1.0]


def test_plan_without_simulation_has_all_of_the_work(efforts: list[float]) -> None:
    confirmed(formulate(chat(simulate=False)), quiet, None)
    assert efforts == [1.0]
    assert confirm_capacities._first_effort(formulate(chat(objective="goodput"))) == 1.0
