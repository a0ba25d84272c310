"""Searches for the cheapest plan in pools that are too large for a single solver call.

Only complete nodes have a cost, so a solver does not notice that a plan with fewer GPUs on a node is better.
Therefore the solver first minimises a potential: the cost plus a small share of the price of each used GPU.
In addition, each group of services is solved separately (`subproblems.py`). The least cost of a group bounds
the pool's cost more tightly than the relaxation, in which a solver mostly splits replicas. Then the pool is
searched only over the cells that occur in the groups' plans. Both steps are repeated with slightly different
GPU prices. The last solver call minimises the cost itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from pulp import LpContinuous, lpSum

from cornplug.planner.optimizer.incumbent import Incumbent, Tell
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem
from cornplug.planner.optimizer.solution import Values
from cornplug.planner.optimizer.solvers import SolverLimits, SolverRun, relax
from cornplug.planner.optimizer.solvers import solve as run_solver
from cornplug.planner.optimizer.subproblems import groups, subproblem
from cornplug.planner.optimizer.variables import PoolModel

Build = Callable[[OptimizationProblem], PoolModel]

NEAR, QUICK, POTENTIAL, GROUPS, CHOSEN, ROOT, ROUNDS = 0.1, 0.15, 0.2, 0.15, 0.15, 0.05, 0.5
"""Shares of the solver's work for the steps of the search. The last solver call gets the rest."""
SMALL = 500
"""Number of columns up to which one solver call gets all of the work. Pools of `examples/plan_and_launch`
(342 columns) are proved optimal with 5 to 21 units of work this way. The decomposition left gaps of 11 to 25
% after 20 units."""
MOST_ROUNDS = 20
GPU_WEIGHT = 0.1
"""Share of a GPU's price that is part of the potential."""
SPREAD = 0.03
"""Relative variation of GPU prices between rounds, in both directions."""


def least_cost(
    model: PoolModel,
    cost: Any,
    limits: SolverLimits,
    tell: Tell | None,
    build: Build,
    near: Collection[str] = (),
) -> tuple[SolverRun, Values | None]:
    """Search for the cheapest plan, and return the run with its proven bound and the plan's values, if any.

    `near` contains names of cells in the plan of a similar pool. A first search uses only these cells. It is
    fast, and its plan is the start of the complete search.
    """
    best = Incumbent(model, cost, limits, tell)
    others = model.x.keys() - set(near)
    if near and others:
        with without(model, others):
            # Pass another object than `cost`, so that `improve` does not use the bound, which is valid only
            # for these cells.
            best.improve(1 * cost, NEAR)
    small = len(model.problem.variables()) <= SMALL
    quick = best.improve(cost, 1.0 if small else QUICK)
    settled = best.proven or (small and best.values is not None)
    if settled or quick.status == "infeasible":
        return best.run("infeasible" if quick.status == "infeasible" else None), best.values
    prices = gpu_prices(model, cost)
    potential = cost + GPU_WEIGHT * lpSum(prices[name] * x for name, x in model.x.items())
    if best.values is None:
        best.improve(potential, POTENTIAL)
    rounds(best, [build(subproblem(model.pool, part)) for part in groups(model.pool)], potential)
    if best.proven:
        return best.run(), best.values
    last = best.improve(cost, 1.0)
    return best.run("infeasible" if last.status == "infeasible" else None), best.values


def gpu_prices(model: PoolModel, cost: Any) -> dict[str, float]:
    """Return the price of the GPUs of one replica, by cell and in the unit of `cost`."""
    return {
        c.name: cost.get(model.z[c.nodes], 0.0) / model.nodes[c.nodes].gpus * c.gpus for c in model.pool.cells
    }


def rounds(best: Incumbent, parts: list[PoolModel], potential: Any) -> None:
    """Solve the groups separately, then the pool over the cells in the groups' plans, in several rounds.

    Ends when the plan is proven or the work or time limit is reached.
    """
    model, chance = best.model, np.random.default_rng(0)
    gpu_values, candidate_cells = shadow_prices(best), set[str]()
    end = best.spent + ROUNDS * best.limits.work
    for i in range(MOST_ROUNDS):
        spread = {
            n: gpu_values[n] * (chance.uniform(1 - SPREAD, 1 + SPREAD) if i else 1.0) for n in gpu_values
        }
        candidate_cells |= bound_groups(best, parts, spread)
        if best.values is not None:
            candidate_cells |= {name for name, x in model.x.items() if best.values[x] > 0.5}
        with without(model, model.x.keys() - candidate_cells):
            best.improve(potential, CHOSEN, gap=best.limits.gap / 10)
        if i == 0:
            best.improve(best.cost, ROOT)
        if best.proven or best.spent > end or best.timed_out:
            return


def bound_groups(best: Incumbent, parts: list[PoolModel], gpu_values: Mapping[str, float]) -> set[str]:
    """Bound the cost of each group's replicas at these GPU prices, and return the cells of the groups' plans.

    The bounds are added to the model as constraints. They follow from the model's other constraints, so they
    are not reported as reasons for a plan.
    """
    used, end = set[str](), best.spent + GROUPS * best.limits.work
    for i, part in enumerate(sorted(parts, key=lambda part: len(part.x))):
        work = 2 * (end - best.spent) / (len(parts) - i)
        if work <= 0:
            break
        for z in part.z.values():
            z.cat = LpContinuous  # GPUs are paid for individually.
        part.problem.setObjective(lpSum(gpu_values[n] * part.nodes[n].gpus * z for n, z in part.z.items()))
        run = run_solver(part.problem, best.limits_of_call(best.limits.gap / 5, work))
        best.record(run)
        if run.bound > 0:
            dollars = lpSum(gpu_values[c.nodes] * c.gpus * best.model.x[c.name] for c in part.pool.cells)
            # Use a limit slightly below the bound, so that rounding does not exclude the plan that proved it.
            best.model.problem.addConstraint(dollars >= run.bound * (1 - 1e-7))
        if run.status in ("optimal", "feasible"):
            used |= {name for name, x in part.x.items() if (x.varValue or 0.0) > 0.5}
    return used


def shadow_prices(best: Incumbent) -> dict[str, float]:
    """Return the value of one GPU of each node class.

    This is the larger of its price and its shadow price in the relaxation. The shadow price is larger if the
    stock is the limit.
    """
    model = best.model
    model.problem.setObjective(best.cost)
    relax(model.problem)
    return {
        name: max(
            best.cost.get(z, 0.0) / model.nodes[name].gpus,
            -(model.rows[f"packing[{name}]"].pi or 0.0),
        )
        for name, z in model.z.items()
    }


@contextmanager
def without(model: PoolModel, cells: Iterable[str]) -> Iterator[None]:
    """Fix the number of these cells' replicas to 0 within the context."""
    before = {name: (model.x[name].lowBound, model.x[name].upBound) for name in cells}
    for name in before:
        model.x[name].lowBound = model.x[name].upBound = 0
    yield
    for name, (low, high) in before.items():
        model.x[name].lowBound, model.x[name].upBound = low, high
