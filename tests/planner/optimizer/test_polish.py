"""A solver's integers are whole to a tolerance only: a plan's are whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cornplug.planner.optimizer import milp
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem
from cornplug.planner.optimizer.pool_model import PoolModel
from cornplug.planner.optimizer.solution import Values, goals, has_integer_values, polish, read_solution
from cornplug.planner.optimizer.solvers import SolverRun

from ..pools import one_service

POOL = one_service({"L4": {"u": 2.0}, "H100": {"u": 6.0}}, {"L4": 1.0, "H100": 4.0}, {"u": 6.0})
DUST = 4e-6
"""Of a replica, as HiGHS leaves it."""


def dusty(pool: OptimizationProblem) -> tuple[PoolModel, dict[Any, float]]:
    """Three L4 and a speck of an H100 that carries 6 x 4e-6 requests a second."""
    model = milp.build(pool)
    values: dict[Any, float] = dict.fromkeys(model.problem.variables(), 0.0)
    values |= {model.x["s@L4"]: 3.0, model.z["L4"]: 3.0, model.x["s@H100"]: DUST, model.z["H100"]: DUST}
    values |= {model.f["u", "s@H100"]: 6 * DUST, model.f["u", "s@L4"]: 6 - 6 * DUST, model.phi["u"]: 6.0}
    return model, values


def polished(pool: OptimizationProblem) -> tuple[PoolModel, Values]:
    model, values = dusty(pool)
    fresh = milp.build(pool)
    wanted = [(goal.expression, goal.sign) for goal in goals(fresh)[:-1]]
    return model, polish(model, fresh, wanted, values)


@pytest.mark.parametrize("objective", ["cost", "goodput", "max-min"])
def test_polish_speck_of_replica_moves_its_work_to_whole_ones(objective: Any) -> None:
    model, values = polished(replace(POOL, objective=objective))
    assert has_integer_values(model, values)
    assert values[model.f["u", "s@H100"]] == pytest.approx(0, abs=1e-9)
    assert values[model.f["u", "s@L4"]] == pytest.approx(6)


def test_polish_work_that_no_whole_replica_takes_stays() -> None:
    """Then `read` leaves it out."""
    model, values = dusty(replace(POOL, demands=(replace(POOL.demands[0], rate=6 + 6 * DUST),)))
    fresh = milp.build(model.pool)
    wanted = [(goal.expression, goal.sign) for goal in goals(fresh)[:-1]]
    kept = polish(model, fresh, wanted, {**values, model.f["u", "s@L4"]: 6.0})
    assert kept[model.f["u", "s@L4"]] == pytest.approx(6)


def test_read_cell_without_replica_has_no_flow() -> None:
    model, values = dusty(POOL)
    solution = read_solution(model, values, SolverRun("optimal", 0.0, 3.0, 3.0), 1, 0.0)
    assert solution.replicas == {"s@L4": 3}
    assert {f.cell for f in solution.flows} == {"s@L4"}


def test_read_variant_without_replicas_is_not_served() -> None:
    model, values = dusty(POOL)
    nowhere = {**values, model.x["s@L4"]: 0.0, model.phi["u"]: 6 * DUST}
    assert read_solution(model, nowhere, SolverRun("optimal", 0.0, 3.0, 3.0), 1, 0.0).served == {}
