"""Machines that a plan needs in each hour of the day. The other machines can be released during that hour.

A plan serves each request class at its highest rate. In other hours some replicas can be stopped, but none is
added or changed. The optimization is therefore repeated for each hour, with the plan's numbers of replicas as
upper limits and with the same latency bounds and reserves. Loads are rounded up to eighths of each class's
peak, so that few different problems have to be solved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Final

from cornplug.errors import PlanInfeasible, PlanUnfinished
from cornplug.planner.candidates.cells import CellSpec
from cornplug.planner.inputs.request_classes import RequestClass
from cornplug.planner.optimizer.optimization_problem import CurrentState, OptimizationProblem, PoolSolution
from cornplug.planner.pipeline import current_deployment
from cornplug.planner.pipeline.decide import PlanDecision
from cornplug.planner.pipeline.formulate import FormulatedProblem
from cornplug.planner.pipeline.place_replicas import with_spare_nodes
from cornplug.planner.plan import Plan, PlannedHour

HOURS: Final = 24
_LOAD_STEPS: Final = 8

HourlyLoad = tuple[tuple[str, float], ...]
"""(request class, rate in an hour as a share of the planned rate) for all classes."""


def with_hours(decision: PlanDecision) -> Plan:
    """Return the plan with the nodes that each hour needs.

    The plan is not changed if the input has no hourly rates or the objective is not the cost.
    """
    plan, problem, solution = decision.plan, decision.problem, decision.solution
    if problem.pool.objective != "cost" or not any(c.has_hourly_rates for c in problem.classes.values()):
        return plan
    loads = [_load(problem.classes, hour) for hour in range(HOURS)]
    needed = {load: _nodes(problem, solution, dict(load)) for load in dict.fromkeys(loads)}
    prices = {n.name: n.price_per_hour for n in plan.nodes}
    hours = [
        PlannedHour(
            hour=hour,
            nodes=needed[load],
            cost_per_hour=sum(count * prices[name] for name, count in needed[load].items()),
        )
        for hour, load in enumerate(loads)
    ]
    return plan.model_copy(update={"hours": hours})


def _load(classes: Mapping[str, RequestClass], hour: int) -> HourlyLoad:
    return tuple(
        (name, ceil(_LOAD_STEPS * of.share_at(hour) - 1e-9) / _LOAD_STEPS) for name, of in classes.items()
    )


def _nodes(problem: FormulatedProblem, solution: PoolSolution, shares: Mapping[str, float]) -> dict[str, int]:
    """Return the number of needed nodes by node class, or all nodes if the solver finds no smaller plan."""
    every = {name: count for name, count in solution.nodes.items() if count}
    if all(share == 1 for share in shares.values()):
        return every
    if not any(shares.values()):
        return dict.fromkeys(every, 0)
    used = {
        name: _limit_to_active_classes(spec, shares)
        for name, spec in problem.cells.items()
        if solution.replicas.get(name)
    }
    used = {name: spec for name, spec in used.items() if spec.cell.capacity}
    pool = replace(_hourly_pool(problem.pool, solution, shares), cells=tuple(s.cell for s in used.values()))
    pool = replace(pool, current=current_deployment.limit_to_cells(pool.current, used))
    try:
        _, found = with_spare_nodes(
            replace(problem, pool=pool, cells=used),
            lambda _phase, _share: None,
            None,
            similar_solution=solution,
        )
    except (PlanInfeasible, PlanUnfinished):
        return every
    return {name: min(found.nodes.get(name, 0), count) for name, count in every.items()}


def _limit_to_active_classes(spec: CellSpec, shares: Mapping[str, float]) -> CellSpec:
    """Return the cell with capacities only for classes that have requests in this hour."""
    capacity = {name: rate for name, rate in spec.cell.capacity.items() if shares[name]}
    return replace(spec, cell=replace(spec.cell, capacity=capacity))


def _hourly_pool(
    pool: OptimizationProblem, solution: PoolSolution, shares: Mapping[str, float]
) -> OptimizationProblem:
    """Return the pool with only the plan's machines and replicas, and with the rates of this hour."""
    demands = tuple(replace(d, rate=d.rate * shares[d.name]) for d in pool.demands if shares[d.name])
    known = {d.name for d in demands}
    return replace(
        pool,
        nodes=tuple(
            replace(n, stock=solution.nodes[n.name]) for n in pool.nodes if solution.nodes.get(n.name)
        ),
        demands=demands,
        variants=tuple(v for v in pool.variants if v.demand in known and v.levels <= solution.levels),
        levels=tuple(level for level in pool.levels if level.name in solution.levels),
        current=CurrentState(
            replicas={name: n for name, n in solution.replicas.items() if n}, horizon_hours=1.0, max_changes=0
        ),
    )
