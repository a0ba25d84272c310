"""Reduces the capacities of services at which a class missed a bound in the simulation of a complete plan.

A cell's capacity for a class assumes that the cell serves only this class, and loads of several classes are
added. But percentiles do not combine linearly, and the stages of a request do not reach their worst case
together. A plan within its calculated capacities may therefore miss a bound slightly, and needs more capacity
at these services.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from cornplug.planner.optimizer.optimization_problem import PoolSolution
from cornplug.planner.pipeline.formulate import FormulatedProblem
from cornplug.planner.pipeline.validate import SloMiss

DERATE: Final = 0.93
STEEPEST: Final = 0.7
"""Smallest factor by which one round reduces a capacity."""
ROOM: Final = 0.97
"""Maximum capacity after the reduction, as a share of the fullest cell's load."""


def derate(
    problem: FormulatedProblem, solution: PoolSolution, misses: tuple[SloMiss, ...]
) -> FormulatedProblem:
    """Return the problem with reduced capacities of services that affect a missed bound.

    The factor depends on the size of the miss. It makes at least the fullest cell of each service too small
    for its load, because otherwise a service with half-empty cells would not change.
    """
    factor: dict[str, float] = {}
    loads = _loads(problem, solution)
    for miss in misses:
        for service in _visited(problem, solution, miss):
            wanted = min(DERATE / miss.times, ROOM * loads.get(service, 1.0))
            factor[service] = min(factor.get(service, DERATE), max(wanted, STEEPEST))
    changed = {
        name: spec.derate(factor[spec.cell.service])
        for name, spec in problem.cells.items()
        if spec.timed and spec.cell.service in factor
    }
    return problem.with_cells(changed)


def _loads(problem: FormulatedProblem, solution: PoolSolution) -> dict[str, float]:
    """Return the load of each service's fullest cell, relative to the pool's limits."""
    limits = problem.pool.limits
    online = {d.name for d in problem.pool.demands if d.online}
    all_of: defaultdict[str, float] = defaultdict(float)
    online_of: defaultdict[str, float] = defaultdict(float)
    for f in solution.flows:
        load = f.rate / problem.cells[f.cell].cell.capacity[f.demand] / solution.replicas[f.cell]
        all_of[f.cell] += load
        online_of[f.cell] += load if f.demand in online else 0.0
    found: defaultdict[str, float] = defaultdict(float)
    for cell, load in all_of.items():
        share = max(load / limits.max_utilisation, online_of[cell] / max(limits.online_share, 1e-9))
        service = problem.cells[cell].cell.service
        found[service] = max(found[service], share)
    return found


def _visited(problem: FormulatedProblem, solution: PoolSolution, miss: SloMiss) -> set[str]:
    """Return the services that affect the missed bound. For example, decode does not affect TTFT."""
    request_paths = (problem.request_paths[name] for name, rate in solution.served.items() if rate > 0)
    services = {
        s
        for request_path in request_paths
        if request_path.of.name == miss.of
        for s in request_path.path.stages
    }
    about = {"ttft": "EP", "tpot": "D", "e2e": "EPDG"}[miss.what]
    return {s.name for s in services if set(s.tasks) & set(about)}
