"""Search for the cheapest plan in pools that are too large for a single solver call.

Only complete nodes have a cost, so a solver sees no advantage in a plan with fewer GPUs on a node.
Therefore the solver first minimises a potential: the cost plus a small share of the price of each used GPU.
In addition, each group of services that can replace one another is solved separately. For example, the
monolith and the separate prefill and decode services form a group, because a request may use either. At any
GPU price, the least cost of a group is at most the group's cost in a plan, because constraints that couple
groups (tiers of one demand, cache levels, the network, nodes that several groups share) are omitted. The
least costs of the groups bound the pool's cost more tightly than the linear relaxation, which allows
fractions of replicas and is a few percent lower. Then the pool is searched only over the cells that occur in
the groups' plans. Both steps are repeated with slightly different GPU prices. The last solver call minimises
the cost itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import inf, isfinite
from typing import Any, Literal

import numpy as np
from pulp import LpContinuous, lpSum

from cornplug.planner.optimizer.optimization_problem import OptimizationProblem, PathVariant, SolveProgress
from cornplug.planner.optimizer.pool_model import PoolModel
from cornplug.planner.optimizer.solution import Values
from cornplug.planner.optimizer.solvers import SolverLimits, SolverRun, is_within_gap, relax
from cornplug.planner.optimizer.solvers import solve as run_solver

BuildModel = Callable[[OptimizationProblem], PoolModel]

NEAR_WORK, QUICK_WORK, POTENTIAL_WORK, GROUPS_WORK, CHOSEN_WORK, ROOT_WORK, ROUNDS_WORK = (
    0.1,
    0.15,
    0.2,
    0.15,
    0.15,
    0.05,
    0.5,
)
"""Shares of the solver's work for the steps of the search. The last solver call gets the rest."""
SMALL_PROBLEM_COLUMNS = 500
"""Number of columns up to which one solver call gets all of the work. Pools of `examples/plan_and_launch`
(342 columns) are proved optimal with 5 to 21 units of work this way. The decomposition left gaps of 11 to 25
% after 20 units."""
MAX_ROUNDS = 20
GPU_WEIGHT = 0.1
"""Share of a GPU's price that is part of the potential."""
PRICE_SPREAD = 0.03
"""Relative variation of GPU prices between rounds, in both directions."""
ProgressCallback = Callable[[SolveProgress], None]


def least_cost(
    model: PoolModel,
    cost: Any,
    limits: SolverLimits,
    on_progress: ProgressCallback | None,
    build: BuildModel,
    near_cells: Collection[str] = (),
) -> tuple[SolverRun, Values | None]:
    """Search for the cheapest plan. Return the solver run with the proven bound, and the plan's values or
    None.

    `near_cells` contains names of cells in the plan of a similar pool. A fast first search uses only these
    cells. The plan that it finds is the start of the complete search.
    """
    best = Incumbent(model, cost, limits, on_progress)
    others = model.x.keys() - set(near_cells)
    if near_cells and others:
        with _without_cells(model, others):
            # Pass another object than `cost`, so that `improve` does not use the bound, which is valid only
            # for these cells.
            best.improve(1 * cost, NEAR_WORK)
    small = len(model.problem.variables()) <= SMALL_PROBLEM_COLUMNS
    quick = best.improve(cost, 1.0 if small else QUICK_WORK)
    settled = best.is_proven or (small and best.values is not None)
    if settled or quick.status == "infeasible":
        return best.combined_run("infeasible" if quick.status == "infeasible" else None), best.values
    prices = gpu_prices(model, cost)
    potential = cost + GPU_WEIGHT * lpSum(prices[name] * x for name, x in model.x.items())
    if best.values is None:
        best.improve(potential, POTENTIAL_WORK)
    run_rounds(best, [build(subproblem(model.pool, part)) for part in service_groups(model.pool)], potential)
    if best.is_proven:
        return best.combined_run(), best.values
    last = best.improve(cost, 1.0)
    return best.combined_run("infeasible" if last.status == "infeasible" else None), best.values


def gpu_prices(model: PoolModel, cost: Any) -> dict[str, float]:
    """Return the price of the GPUs of one replica, by cell and in the unit of `cost`."""
    return {
        c.name: cost.get(model.z[c.nodes], 0.0) / model.nodes[c.nodes].gpus * c.gpus for c in model.pool.cells
    }


def run_rounds(best: Incumbent, groups: list[PoolModel], potential: Any) -> None:
    """Solve the groups separately, then the pool over the cells in the groups' plans, in several rounds.

    Ends when the plan is proven or the work or time limit is reached.
    """
    model, chance = best.model, np.random.default_rng(0)
    gpu_values, candidate_cells = shadow_prices(best), set[str]()
    end = best.spent + ROUNDS_WORK * best.limits.work
    for i in range(MAX_ROUNDS):
        spread = {
            n: gpu_values[n] * (chance.uniform(1 - PRICE_SPREAD, 1 + PRICE_SPREAD) if i else 1.0)
            for n in gpu_values
        }
        candidate_cells |= bound_groups(best, groups, spread)
        if best.values is not None:
            candidate_cells |= {name for name, x in model.x.items() if best.values[x] > 0.5}
        with _without_cells(model, model.x.keys() - candidate_cells):
            best.improve(potential, CHOSEN_WORK, gap=best.limits.gap / 10)
        if i == 0:
            best.improve(best.cost, ROOT_WORK)
        if best.is_proven or best.spent > end or best.timed_out:
            return


def bound_groups(best: Incumbent, groups: list[PoolModel], gpu_values: Mapping[str, float]) -> set[str]:
    """Bound the cost of each group's replicas at these GPU prices, and return the cells of the groups' plans.

    The bounds are added to the model as constraints. They follow from the model's other constraints, so they
    are not reported as reasons for a plan.
    """
    used, end = set[str](), best.spent + GROUPS_WORK * best.limits.work
    for i, part in enumerate(sorted(groups, key=lambda part: len(part.x))):
        work = 2 * (end - best.spent) / (len(groups) - i)
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
def _without_cells(model: PoolModel, cells: Iterable[str]) -> Iterator[None]:
    """Fix the number of these cells' replicas to 0 within the context."""
    before = {name: (model.x[name].lowBound, model.x[name].upBound) for name in cells}
    for name in before:
        model.x[name].lowBound = model.x[name].upBound = 0
    yield
    for name, (low, high) in before.items():
        model.x[name].lowBound, model.x[name].upBound = low, high


class Incumbent:
    """Best plan and best bound that were found for a model so far. `on_progress` is called for every
    improvement."""

    def __init__(
        self, model: PoolModel, cost: Any, limits: SolverLimits, on_progress: ProgressCallback | None
    ) -> None:
        """Create an incumbent without a plan. `limits` apply to all solver calls together."""
        self.model, self.cost, self.limits, self.on_progress = model, cost, limits, on_progress
        self.began, self.spent, self.timed_out = time.monotonic(), 0.0, False
        self.values: Values | None = None
        self.dollars, self.bound = inf, -inf
        self.history: list[SolveProgress] = []

    @property
    def is_proven(self) -> bool:
        return is_within_gap(self.dollars, self.bound, self.limits.gap)

    def limits_of_call(self, gap: float, work: float) -> SolverLimits:
        """Return the limits of one solver call: `work`, and the remaining seconds, each with a small
        minimum."""
        left = self.limits.seconds - (time.monotonic() - self.began)
        work = max(min(work, self.limits.work - self.spent), 0.02 * self.limits.work)
        return replace(self.limits, gap=gap, seconds=max(left, 0.02 * self.limits.seconds), work=work)

    def record(self, run: SolverRun) -> None:
        self.spent += run.work
        self.timed_out = self.timed_out or run.timed_out

    def improve(self, goal: Any, share: float, *, gap: float | None = None) -> SolverRun:
        """Run the solver once, starting from the best plan, and keep the result if it is better.

        Args:
            goal: Expression to minimise. The solver's bound is used only if `goal` is the object `cost`.
            share: Share of the work of all calls.
            gap: Gap at which the solver stops, or None for the gap in `limits`.
        """
        model, is_cost = self.model, goal is self.cost
        model.problem.setObjective(goal)
        for variable, value in (self.values or {}).items():
            variable.varValue = value
        limits = self.limits_of_call(self.limits.gap if gap is None else gap, share * self.limits.work)
        watch = self._watch() if is_cost else None
        run = run_solver(model.problem, limits, watch, start=self.values is not None)
        self.record(run)
        if run.status in ("optimal", "feasible"):
            self._keep({v: v.varValue or 0.0 for v in model.problem.variables()}, equals=not is_cost)
        if is_cost:
            self.raise_bound(run.bound)
        return run

    def _keep(self, values: Values, *, equals: bool) -> None:
        """Keep a plan if it is cheaper than the best plan.

        With `equals`, a plan of equal cost also replaces the best plan, because its potential is better.
        """
        dollars = sum(weight * values[v] for v, weight in self.cost.items())
        if dollars < self.dollars - 1e-6:
            self.dollars, self.values = dollars, values
            self._record_progress(self.dollars, self.bound)
        elif equals and dollars < self.dollars + 1e-6:
            self.values = values

    def raise_bound(self, bound: float) -> None:
        if isfinite(bound) and bound > self.bound:
            self.bound = bound
            self._record_progress(self.dollars, self.bound)

    def _watch(self) -> ProgressCallback:
        """Return a callback that records the solver's progress when the incumbent or the bound changes."""

        def record_progress(at: SolveProgress) -> None:
            dollars = self.dollars if at.incumbent is None else min(at.incumbent, self.dollars)
            bound = self.bound if at.bound is None else max(at.bound, self.bound)
            last = self.history[-1] if self.history else None
            if last is None or (last.incumbent, last.bound) != (
                _finite_or_none(dollars),
                _finite_or_none(bound),
            ):
                self._record_progress(dollars, bound)

        return record_progress

    def _record_progress(self, dollars: float, bound: float) -> None:
        at = SolveProgress(time.monotonic() - self.began, _finite_or_none(dollars), _finite_or_none(bound))
        self.history.append(at)
        if self.on_progress is not None:
            self.on_progress(at)

    def combined_run(self, status: Literal["infeasible"] | None = None) -> SolverRun:
        """Return the result of all solver calls as a single run."""
        seconds = time.monotonic() - self.began
        history = tuple(self.history)
        run = SolverRun("none", seconds, history=history, work=self.spent, timed_out=self.timed_out)
        if status is not None:
            return replace(run, status=status)
        if self.values is None:
            return replace(run, bound=self.bound)
        first = next((at.seconds for at in history if at.incumbent is not None), None)
        verdict: Literal["optimal", "feasible"] = "optimal" if self.is_proven else "feasible"
        return replace(run, status=verdict, objective=self.dollars, bound=self.bound, first_s=first)


def _finite_or_none(value: float) -> float | None:
    return value if isfinite(value) else None


def service_groups(pool: OptimizationProblem) -> list[frozenset[str]]:
    """Return a partition of the services. Services between which a demand can choose are in one group."""
    parts: list[frozenset[str]] = []
    for u in pool.demands:
        variants = [[need.service for need in v.needs] for v in pool.variants if v.demand == u.name]
        services = dict.fromkeys(service for variant in variants for service in variant)
        always = [s for s in services if all(s in variant for variant in variants)]
        either = frozenset(services) - frozenset(always)
        for new in [either, *(frozenset({service}) for service in always)]:
            if new:
                touched = [part for part in parts if part & new]
                parts = [part for part in parts if not part & new]
                parts.append(new.union(*touched))
    return parts


def subproblem(pool: OptimizationProblem, services: frozenset[str]) -> OptimizationProblem:
    """Return the pool of one group, with the cells of `services` and the demands' work at these services."""
    variants: dict[tuple[str, object], PathVariant] = {}
    for v in pool.variants:
        needs = tuple(need for need in v.needs if need.service in services)
        variants.setdefault((v.demand, needs), replace(v, needs=needs, levels=frozenset(), network=0.0))
    demands = {u for (u, needs) in variants if needs}
    cells = [c for c in pool.cells if c.service in services]
    return replace(
        pool,
        cells=tuple(
            replace(c, capacity={u: r for u, r in c.capacity.items() if u in demands}) for c in cells
        ),
        demands=tuple(u for u in pool.demands if u.name in demands),
        variants=tuple(v for v in variants.values() if v.demand in demands),
        levels=(),
        objective="cost",
        current=None,
        # Omit limits per node, because a group alone would pay for all nodes over which its replicas are
        # spread.
        limits=replace(pool.limits, by_node=False, crowded=()),
    )
