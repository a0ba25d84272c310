"""Converts a solution's flows to routes with weights."""

from __future__ import annotations

from collections.abc import Mapping

from cornplug.planner.optimizer.optimization_problem import PathVariant, PoolSolution, ServiceDemand
from cornplug.planner.pipeline.formulate import FormulatedProblem
from cornplug.planner.plan import PlanRoute, RouteStage

LEAST_PART = 1e-6
"""Share of a class's rate below which a flow is only a consequence of the solver's tolerance."""


def routes(
    problem: FormulatedProblem, solution: PoolSolution, group_of: Mapping[str, str]
) -> list[PlanRoute]:
    """Return a route for each variant that serves requests. `group_of` maps cells to names of groups."""
    rates = {d.name: d.rate for d in problem.pool.demands}
    served = [
        v for v in problem.pool.variants if solution.served.get(v.name, 0.0) > LEAST_PART * rates[v.demand]
    ]
    return [_route(problem, solution, variant, group_of) for variant in served]


def _route(
    problem: FormulatedProblem, solution: PoolSolution, variant: PathVariant, group_of: Mapping[str, str]
) -> PlanRoute:
    tasks = {s.name: s.tasks for s in problem.request_paths[variant.name].path.stages}
    app, request = variant.demand.split("/")
    stages = []
    for need in variant.needs:
        weights = _weights(solution, variant.demand, need)
        stages.append(
            RouteStage(tasks=tasks[need.service], groups={group_of[c]: w for c, w in weights.items()})
        )
    rate = solution.served[variant.name]
    return PlanRoute(app=app, request=request, structure=variant.structure, rate=rate, stages=stages)


def _weights(solution: PoolSolution, demand: str, need: ServiceDemand) -> dict[str, float]:
    """Return each cell's share of the demand's work that requires this service and tier."""
    rates: dict[str, float] = {}
    for f in solution.flows:
        if (f.demand, f.service, f.tier) == (demand, need.service, need.tier):
            rates[f.cell] = rates.get(f.cell, 0.0) + f.rate
    total = sum(rates.values())
    kept = {cell: rate for cell, rate in rates.items() if rate > LEAST_PART * total}
    return {cell: rate / sum(kept.values()) for cell, rate in kept.items()}
