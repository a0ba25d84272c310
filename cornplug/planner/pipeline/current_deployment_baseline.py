"""Re-planning: solves the pool of only the running processes, in addition to the complete pool.

There are a thousand ways to start new processes, so the solver may reach its time limit before it finds a
plan that is as good as keeping the current deployment. The pool of only the running processes is small and
quickly solved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from cornplug.errors import PlanInfeasible, PlanUnfinished
from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer import milp
from cornplug.planner.optimizer.optimization_problem import (
    CurrentState,
    OptimizationProblem,
    PoolSolution,
    SolveProgress,
)


def solve(
    pool: OptimizationProblem,
    settings: SolverOptions,
    watch: Callable[[SolveProgress], None] | None,
    notes: Mapping[str, str],
    near: Collection[str] = (),
) -> PoolSolution:
    """Return the better of both solutions, with the bound of the complete pool.

    Arguments and errors are those of `milp.solve`.
    """
    current = pool.current
    if current is None or pool.objective != "cost":
        return milp.solve(pool, settings, watch, notes=notes, near=near)
    baseline = _baseline(pool, current, settings)
    try:
        known = {*near, *(baseline.replicas if baseline else ())}
        whole = milp.solve(pool, settings, watch, notes=notes, near=known)
    except PlanUnfinished:
        if baseline is None:
            raise
        return replace(baseline, status="feasible", bound=0.0)
    if baseline is None:
        return whole
    late = whole.timed_out or baseline.timed_out
    if whole.objective <= baseline.objective:
        return replace(whole, timed_out=late)
    proven = baseline.objective - whole.bound <= settings.gap * abs(baseline.objective) + 1e-6
    return replace(baseline, status="optimal" if proven else "feasible", bound=whole.bound, timed_out=late)


def _baseline(
    pool: OptimizationProblem, current: CurrentState, settings: SolverOptions
) -> PoolSolution | None:
    """Solve the pool of the running processes, with other numbers of replicas and with switched roles.

    Returns None if these processes cannot serve the load or no plan was found.
    """
    names = set(current.replicas)
    names |= {other for c in pool.cells if c.name in names for other in c.switches_with}
    cells = tuple(c for c in pool.cells if c.name in names)
    try:
        return milp.solve(replace(pool, cells=cells), settings)
    except (PlanInfeasible, PlanUnfinished):
        return None
