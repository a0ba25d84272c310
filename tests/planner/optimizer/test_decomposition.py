"""Bounds of groups hold, and what the search finds is what the solver would have found."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from planner.pools import EXACT
from pulp import lpSum

from cornplug.planner.optimizer import decomposition, milp, solution
from cornplug.planner.optimizer.decomposition import Incumbent, service_groups, subproblem
from cornplug.planner.optimizer.optimization_problem import (
    Cell,
    MachineClass,
    OptimizationProblem,
    PathVariant,
    RateDemand,
    ServiceDemand,
    SolveProgress,
)
from cornplug.planner.optimizer.solvers import SolverLimits, SolverRun

APPS = 5


@pytest.fixture(scope="module")
def pool() -> OptimizationProblem:
    """Applications with their own LLM, one tower for all: five groups and one."""
    services = {"vit/E": 3.1} | {
        f"llm{a}/{role}": 1.3 + 0.2 * a for a in range(APPS) for role in ("PD", "P", "D")
    }
    cells = [
        Cell(f"{s}@{n}", s, n, gpus, 1.0, {f"a{a}/u": round(rate * factor * gpus, 3) for a in range(APPS)})
        for s, rate in services.items()
        for n, gpus, factor in (("small", 1, 1.0), ("large", 2, 1.35 if s.endswith("D") else 1.1))
    ]
    variants = []
    for a in range(APPS):
        tower = ServiceDemand("vit/E", 1.0, 0.5)
        variants.append(PathVariant(f"{a}m", f"a{a}/u", "E+PD", (tower, ServiceDemand(f"llm{a}/PD", 1.0))))
        apart = (tower, ServiceDemand(f"llm{a}/P", 1.0, 0.6), ServiceDemand(f"llm{a}/D", 1.0, 0.5))
        variants.append(PathVariant(f"{a}s", f"a{a}/u", "E+P+D", apart))
    return OptimizationProblem(
        nodes=(MachineClass("small", "L4", 4, 3.0, 40), MachineClass("large", "H100", 8, 8.9, 40)),
        cells=tuple(cells),
        demands=tuple(RateDemand(f"a{a}/u", 1.7 + 0.9 * a) for a in range(APPS)),
        variants=tuple(variants),
    )


def test_services_that_stand_in_for_one_another_form_a_group(pool: OptimizationProblem) -> None:
    parts = {frozenset(part) for part in service_groups(pool)}
    llms = {frozenset({f"llm{a}/PD", f"llm{a}/P", f"llm{a}/D"}) for a in range(APPS)}
    assert parts == {frozenset({"vit/E"}), *llms}


def test_decomposition_groups_alone_cost_no_more_than_plan(pool: OptimizationProblem) -> None:
    """Each group's GPUs, at the price of a GPU, in a plan that is proven to be the cheapest."""
    plan = milp.solve(pool, EXACT)
    gpu = {n.name: n.price / n.gpus for n in pool.nodes}
    total = 0.0
    for part in service_groups(pool):
        cells = [c for c in pool.cells if c.service in part]
        spent = sum(gpu[c.nodes] * c.gpus * plan.replicas.get(c.name, 0) for c in cells)
        by_gpu = tuple(MachineClass(n.name, n.gpu, 1, gpu[n.name], n.stock * n.gpus) for n in pool.nodes)
        least = milp.solve(replace(subproblem(pool, part), nodes=by_gpu), EXACT).objective
        assert least <= spent + 1e-6
        total += least
    assert total <= plan.objective + 1e-6


def test_least_cost_of_small_pool_is_one_call_with_all_of_the_work(
    pool: OptimizationProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, solve = list[SolverLimits](), decomposition.run_solver

    def unproven(problem: Any, limits: SolverLimits, *arguments: Any, **options: Any) -> SolverRun:
        calls.append(limits)
        return replace(solve(problem, limits, *arguments, **options), status="feasible", bound=-inf)

    monkeypatch.setattr(decomposition, "run_solver", unproven)
    model = milp.build(pool)
    cost = solution.cost_objective(model).expression
    limits = SolverLimits(0.0, 1e5, work=2.0)
    run, values = decomposition.least_cost(model, cost, limits, None, milp.build)
    assert run.status == "feasible"
    assert values is not None
    assert [limit.work for limit in calls] == [limits.work]


def test_least_cost_near_cells_are_searched_first_and_bound_nothing(
    pool: OptimizationProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_cells, bounds, solve = list[set[str]](), list[float](), decomposition.run_solver

    def noted(problem: Any, *arguments: Any, **options: Any) -> SolverRun:
        open_cells.append({name for name, x in model.x.items() if x.upBound > 0})
        bounds.append(best_bound())
        return solve(problem, *arguments, **options)

    def best_bound() -> float:
        return max((at.bound for at in seen if at.bound is not None), default=-inf)

    monkeypatch.setattr(decomposition, "run_solver", noted)
    seen = list[SolveProgress]()
    near = {c.name for c in pool.cells if c.nodes == "small"}
    model = milp.build(pool)
    cost = solution.cost_objective(model).expression
    limits = SolverLimits(0.0, 1e5, work=20.0)
    run, values = decomposition.least_cost(model, cost, limits, seen.append, milp.build, near)
    assert open_cells == [near, {c.name for c in pool.cells}]
    assert bounds == [-inf, -inf], "what the near cells bound is no bound of the whole"
    assert values is not None
    assert run.objective == pytest.approx(milp.solve(pool, EXACT).objective)
    assert run.bound == pytest.approx(run.objective)
    first = next(at.incumbent for at in seen if at.incumbent is not None)
    alone = replace(pool, cells=tuple(c for c in pool.cells if c.name in near))
    assert first == pytest.approx(milp.solve(alone, EXACT).objective)


def test_rounds_find_the_optimum_and_never_bound_beyond_it(pool: OptimizationProblem) -> None:
    """Without the solver's first seconds on the whole, which would settle so small a pool."""
    seen: list[SolveProgress] = []
    exact = milp.solve(pool, EXACT).objective
    model = milp.build(pool)
    money = solution.cost_objective(model).expression
    best = Incumbent(model, money, SolverLimits(0.001, 20.0, work=20.0), seen.append)
    bounds_before = {name: (x.lowBound, x.upBound) for name, x in model.x.items()}
    parts = [milp.build(subproblem(pool, part)) for part in service_groups(pool)]
    decomposition.run_rounds(best, parts, money + 0.1 * lpSum(model.x.values()))
    assert exact - 1e-6 <= best.dollars <= 1.03 * exact
    assert {name: (x.lowBound, x.upBound) for name, x in model.x.items()} == bounds_before
    best.improve(money, 1.0)
    assert (best.combined_run().status, best.dollars) == ("optimal", pytest.approx(exact, rel=1e-3))
    assert best.bound <= exact + 1e-6
    costs = [p.incumbent for p in seen if p.incumbent is not None]
    bounds = [p.bound for p in seen if p.bound is not None]
    assert costs == sorted(costs, reverse=True)
    assert bounds == sorted(bounds)
    assert max(bounds) <= min(costs) + 1e-6


def test_rounds_at_other_prices_bound_as_truly(pool: OptimizationProblem) -> None:
    """A gap of nothing keeps them going until their work is done."""
    exact = milp.solve(pool, EXACT).objective
    model = milp.build(pool)
    money = solution.cost_objective(model).expression
    best = Incumbent(model, money, SolverLimits(0.0, 20.0, work=2.0), None)
    decomposition.run_rounds(
        best, [milp.build(subproblem(pool, part)) for part in service_groups(pool)], 1.1 * money
    )
    assert best.bound <= exact + 1e-6
    assert best.dollars >= exact - 1e-6
