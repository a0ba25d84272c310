"""Distributes load evenly over the replicas that a solution pays for.

A solution only has to fit its cells, so the solver fills some cells completely and leaves other cells empty,
especially spare replicas. This module reduces the load of the fullest cell of every service as far as its
tiers allow, and changes nothing else. Waits become shorter, and spare replicas stay warm.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any, Final

from pulp import lpSum

from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer import milp
from cornplug.planner.optimizer.optimization_problem import CurrentState, OptimizationProblem, PoolSolution
from cornplug.planner.optimizer.solution import flows, slack
from cornplug.planner.optimizer.solvers import SolverLimits
from cornplug.planner.optimizer.solvers import solve as run_solver
from cornplug.planner.optimizer.variables import PoolModel

HELD: Final = 1e-6
"""Relative tolerance of fixed values, because of the solver's tolerances."""


def balance_load(
    pool: OptimizationProblem, solution: PoolSolution, settings: SolverOptions
) -> PoolSolution | None:
    """Return the solution with evenly distributed flows, for the same replicas, variants and cost.

    Returns None if the replicas' capacity is no longer sufficient. If rates are divided into slices, the
    solution is not changed.
    """
    if any(u.slices is not None for u in pool.demands):
        return solution
    # Pass the replicas as the current deployment, because otherwise the model's own bounds allow only as many
    # replicas as a plan needs.
    model = milp.build(replace(pool, current=CurrentState(solution.replicas)))
    _hold(model, solution)
    fullest = _fullest(model, solution)
    model.problem.setObjective(lpSum(fullest))
    run = run_solver(model.problem, SolverLimits(0.0, inf, settings.threads, settings.work))
    if run.status not in ("optimal", "feasible"):
        return None
    values = {v: v.varValue or 0.0 for v in model.problem.variables()}
    slacks = {name: slack(row, values) for name, row in model.rows.items() if row.keys()}
    return replace(
        solution,
        flows=tuple(flows(model, values, solution.served)),
        slack={name: slacks.get(name, left) for name, left in solution.slack.items()},
    )


def _hold(model: PoolModel, solution: PoolSolution) -> None:
    for name, x in model.x.items():
        x.lowBound = x.upBound = solution.replicas.get(name, 0)
    for name, z in model.z.items():
        z.lowBound = z.upBound = solution.nodes.get(name, 0)
    for name, w in model.w.items():
        w.lowBound = w.upBound = int(name in solution.levels)
    for name, e in model.e.items():
        e.lowBound = e.upBound = int(name in solution.replicas)
    for name, phi in model.phi.items():
        rate = solution.served.get(name, 0.0)
        phi.lowBound, phi.upBound = rate * (1 - HELD), rate * (1 + HELD)


def _fullest(model: PoolModel, solution: PoolSolution) -> list[Any]:
    """Add a variable for each service that bounds the utilisation of all its cells, and return the
    variables."""
    found = []
    for i, (service, cells) in enumerate(model.cells_of.items()):
        used = [c for c in cells if solution.replicas.get(c.name)]
        if not used:
            continue
        fullest = model.real(f"fullest_{i}")
        found.append(fullest)
        for cell in used:
            room = solution.replicas[cell.name] * fullest
            model.add(f"fullest[{service},{cell.name}]", model.load(cell, model.classes(cell)) <= room)
    return found
