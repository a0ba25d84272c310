"""Adds replicas on GPUs that a solution pays for but does not use.

Complete nodes are paid for. The model uses the minimum number of replicas, because tight bounds on the number
keep its relaxation tight, so the other GPUs of a node would be idle. Additional replicas of the fullest
groups cost nothing, reduce waits and add headroom.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer.optimization_problem import (
    Cell,
    CurrentState,
    OptimizationProblem,
    PoolSolution,
)
from cornplug.planner.pipeline.balance_load import balance_load
from cornplug.planner.pipeline.lose_nodes import unsurvived
from cornplug.planner.pipeline.place_replicas import idle_gpus


def use_idle_gpus(pool: OptimizationProblem, solution: PoolSolution, settings: SolverOptions) -> PoolSolution:
    """Add replicas to a solution on GPUs that it pays for but does not use (`PoolSolution.extra`). Returns
    the solution unchanged if no replica fits.

    When re-planning, only running replicas that the solution would stop are added, because starting a replica
    has a cost.
    """
    extra = _extra_replicas(pool, solution)
    if not extra:
        return solution
    filled = balance_load(
        pool, replace(solution, replicas=Counter(solution.replicas) + extra, extra=extra), settings
    )
    if filled is None or unsurvived(pool, filled):
        return solution
    # Keep the slack of the model's own rows, because extra replicas are not a reason for a plan.
    return replace(filled, slack=solution.slack)


def _extra_replicas(pool: OptimizationProblem, solution: PoolSolution) -> Counter[str]:
    """Return the number of extra replicas by cell.

    Each extra replica is added to the cell with the highest load per replica for which GPUs are idle.
    """
    idle, replicas, extra = idle_gpus(pool, solution), Counter(solution.replicas), Counter[str]()
    load, stopped = _loads(pool, solution), _stopped(pool.current, solution)
    while True:
        fitting = [
            (c, source)
            for c in pool.cells
            if load[c.name] > 0 and c.gpus <= idle[c.nodes] + 1e-9
            for source in _sources(c, pool.current, stopped)[:1]
        ]
        if not fitting:
            return extra
        fullest, source = max(fitting, key=lambda it: load[it[0].name] / replicas[it[0].name])
        stopped[source] -= 1
        idle[fullest.nodes] -= fullest.gpus
        replicas[fullest.name] += 1
        extra[fullest.name] += 1


def _loads(pool: OptimizationProblem, solution: PoolSolution) -> defaultdict[str, float]:
    """Return the load of each cell, as the number of replicas that would be fully utilised."""
    cells, load = {c.name: c for c in pool.cells}, defaultdict[str, float](float)
    for f in solution.flows:
        load[f.cell] += f.rate / cells[f.cell].capacity[f.demand]
    return load


def _stopped(current: CurrentState | None, solution: PoolSolution) -> Counter[str]:
    """Return the number of running replicas that the solution stops, by cell."""
    if current is None:
        return Counter()
    left = Counter(current.replicas) + Counter(solution.started)
    for (source, to), n in solution.switched.items():
        left[source] -= n
        left[to] += n
    left.subtract(solution.replicas)
    return left


def _sources(cell: Cell, current: CurrentState | None, stopped: Counter[str]) -> list[str]:
    """Return the cells whose replicas can become replicas of `cell` at no cost.

    For a new plan, this is only the cell itself. When re-planning, these are cells with replicas that would
    otherwise be stopped.
    """
    if current is None:
        return [cell.name]
    same = [cell.name, *sorted(one for one, other in current.free if other == cell.name)]
    return [name for name in same if stopped[name] > 0]
