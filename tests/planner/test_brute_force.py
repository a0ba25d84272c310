"""The model against trying every plan, on hundreds of tiny pools (case A16)."""

from __future__ import annotations

from functools import cache

import pytest
from planner.brute_force import best, change
from planner.pools import EXACT
from planner.random_pools import KINDS, random_pool

from cornplug.errors import PlanInfeasible
from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer.milp import solve
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem, PoolSolution

CASES = 208
"""Issue 5 asks for 200; each of the 8 kinds gets as many."""


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_solve_random_pool_matches_brute_force(kind: int) -> None:
    for seed in range(kind, CASES, len(KINDS)):
        pool = random_pool(seed)
        plan = plan_of(seed)
        assert values(pool, plan) == pytest.approx(expected(pool, plan), rel=1e-4, abs=1e-5), seed


def test_brute_force_pools_have_varied_plans() -> None:
    """Most have a plan, some have none, and many plans need several cells."""
    plans = [plan_of(seed) for seed in range(CASES)]
    found = [plan for plan in plans if plan is not None]
    assert 0.5 * len(plans) < len(found) < 0.95 * len(plans)
    assert sum(len(plan.replicas) > 1 for plan in found) > len(found) / 3
    assert all(plan.status == "optimal" and plan.gap < 1e-4 for plan in found)


@cache
def plan_of(seed: int) -> PoolSolution | None:
    return attempt(random_pool(seed), EXACT)


def attempt(pool: OptimizationProblem, settings: SolverOptions) -> PoolSolution | None:
    try:
        return solve(pool, settings)
    except PlanInfeasible:
        return None


def values(pool: OptimizationProblem, plan: PoolSolution | None) -> list[float]:
    """Of all goals in their order, computed from the plan itself; a pool without a plan has none."""
    if plan is None:
        return []
    dollars = sum(n.price * plan.nodes.get(n.name, 0) for n in pool.nodes)
    if pool.current is not None:
        replicas = tuple(plan.replicas.get(c.name, 0) for c in pool.cells)
        switching = change(pool.cells, pool.current, replicas)
        assert switching is not None
        dollars = pool.current.horizon_hours * dollars + switching
    by_demand = {u.name: 0.0 for u in pool.demands}
    for v in pool.variants:
        by_demand[v.demand] += plan.served.get(v.name, 0.0)
    goodput = sum(u.weight * by_demand[u.name] for u in pool.demands)
    least = min(by_demand[u.name] / u.rate for u in pool.demands)
    found = {"cost": [], "goodput": [goodput], "max-min": [least, goodput]}[pool.objective]
    assert plan.objective == pytest.approx([*found, dollars][0], rel=1e-5, abs=1e-6)
    return [*found, dollars]


def expected(pool: OptimizationProblem, plan: PoolSolution | None) -> list[float]:
    """Where a class cannot be served at all, the model may refuse instead of serving none of it."""
    found = best(pool)
    if found is None or (plan is None and pool.objective != "cost" and found[0] == 0):
        return []
    return list(found)
