"""Replicas and nodes that a solver stopped early has left without a use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cornplug.planner.optimizer import milp
from cornplug.planner.optimizer.optimization_problem import CurrentState, OptimizationProblem, PoolLimits
from cornplug.planner.optimizer.pool_model import PoolModel
from cornplug.planner.optimizer.solution import Values, trim

from ..pools import EXACT, one_service

CAPACITY = {"L4": {"u": 2.0}, "H100": {"u": 6.0}}
POOL = one_service(CAPACITY, {"L4": 1.0, "H100": 4.0}, {"u": 6.0})


def optimum(pool: OptimizationProblem) -> tuple[PoolModel, dict[object, float]]:
    """A model, and the values of its optimum: three L4."""
    solution = milp.solve(pool, EXACT)
    model = milp.build(pool)
    values: dict[object, float] = dict.fromkeys(model.problem.variables(), 0.0)
    values |= {model.x[name]: float(n) for name, n in solution.replicas.items()}
    values |= {model.z[name]: float(n) for name, n in solution.nodes.items()}
    values |= {model.phi[name]: rate for name, rate in solution.served.items()}
    values |= {model.f[f.demand, f.cell]: f.rate for f in solution.flows}
    values |= {model.e[name]: 1.0 for name in model.e if solution.replicas.get(name)}
    values |= {model.a[name]: float(n) for name, n in solution.started.items()}
    return model, values


def replicas(model: PoolModel, values: Values) -> dict[str, float]:
    return {name: values[x] for name, x in model.x.items() if values[x]}


def test_trim_replica_without_load_goes_with_its_node() -> None:
    model, values = optimum(POOL)
    idle = {**values, model.x["s@H100"]: 2.0, model.z["H100"]: 2.0, model.x["s@L4"]: 4.0, model.z["L4"]: 5.0}
    trimmed = trim(model, idle)
    assert replicas(model, trimmed) == {"s@L4": 3.0}
    assert {name: trimmed[z] for name, z in model.z.items()} == {"L4": 3.0, "H100": 0.0}


def test_trim_optimum_is_unchanged() -> None:
    model, values = optimum(POOL)
    assert trim(model, values) == values


def test_trim_spare_replica_is_kept() -> None:
    """With N+1, one replica carries no load of its own and must stay."""
    pool = replace(POOL, limits=PoolLimits(1.0, 1.0, spare=frozenset({"s"})))
    model, values = optimum(pool)
    assert sum(replicas(model, values).values()) == 4
    idle = {**values, model.x["s@L4"]: values[model.x["s@L4"]] + 2, model.z["L4"]: values[model.z["L4"]] + 2}
    assert trim(model, idle) == values


def test_trim_start_of_an_idle_replica_is_taken_back() -> None:
    current = CurrentState({"s@L4": 3}, start_cost={"s@L4": 1.0, "s@H100": 1.0})
    model, values = optimum(replace(POOL, current=current))
    idle = {**values, model.x["s@L4"]: 4.0, model.z["L4"]: 4.0, model.a["s@L4"]: 1.0}
    assert trim(model, idle) == values


@pytest.mark.parametrize(("below_min_dwell", "stays"), [(0, 3.0), (4, 4.0)])
def test_trim_running_idle_replica_stops_unless_below_min_dwell(below_min_dwell: int, stays: float) -> None:
    current = CurrentState({"s@L4": 4}, below_min_dwell={"s@L4": below_min_dwell})
    model, values = optimum(replace(POOL, current=current))
    started = dict.fromkeys(model.a.values(), 0.0)
    idle = {**values, **started, model.x["s@L4"]: 4.0, model.z["L4"]: 4.0, model.d["s@L4"]: 0.0}
    assert replicas(model, trim(model, idle)) == {"s@L4": stays}


def test_solve_stopped_early_has_no_replica_without_use() -> None:
    """Without `trim` this plan costs three times as much: HiGHS had just found its first one."""
    chance = np.random.default_rng(4)
    gpus, demands = ["L4", "A10", "A100", "H100", "B200"], [f"u{i}" for i in range(12)]
    pool = one_service(
        {g: {u: chance.uniform(1, 9) * (i + 1) for u in demands} for i, g in enumerate(gpus)},
        {g: chance.uniform(0.8, 1.3) * (i + 1) for i, g in enumerate(gpus)},
        {u: chance.uniform(1, 40) for u in demands},
    )
    found = milp.solve(pool, EXACT.model_copy(update={"work": 0.01}))
    assert found.status == "feasible"
    load = dict.fromkeys(found.replicas, 0.0)
    for flow in found.flows:
        cell = next(c for c in pool.cells if c.name == flow.cell)
        load[flow.cell] += flow.rate / cell.capacity[flow.demand]
    assert all(n - 1 < load[name] for name, n in found.replicas.items())
    assert found.nodes == {name.removeprefix("s@"): n for name, n in found.replicas.items()}
    assert found.objective == pytest.approx(sum(n.price * found.nodes.get(n.name, 0) for n in pool.nodes))
