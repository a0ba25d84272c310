"""Search for a solution in which the capacity of every used cell has been simulated.

Closed forms estimate the capacities of all cells, and the simulator determines the capacities of the cells
that a solution uses. If the solution's replicas can still serve all load, the solution is final. Otherwise
the problem is solved again with the simulated capacities.

A solver fills some cells completely and leaves other cells empty, especially spare replicas. `balance_load`
reduces the load of the fullest cell of every service as far as its tiers allow. Waits become shorter, and
spare replicas stay warm.

When re-planning, there are many ways to start new processes, and the solver may reach its limit before it
finds a plan that is as good as the current deployment. Therefore a second, small pool that contains only the
running processes is solved in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import inf
from typing import Any, Final

from pulp import lpSum

from cornplug.errors import PlanInfeasible, PlanUnfinished
from cornplug.planner.candidates.cells import CellSpec
from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer import milp
from cornplug.planner.optimizer.optimization_problem import (
    CurrentState,
    OptimizationProblem,
    PoolSolution,
    SolveProgress,
)
from cornplug.planner.optimizer.pool_model import PoolModel
from cornplug.planner.optimizer.solution import flows, slack
from cornplug.planner.optimizer.solvers import SolverLimits
from cornplug.planner.optimizer.solvers import solve as run_solver
from cornplug.planner.pipeline.formulate import FormulatedProblem

PhaseCallback = Callable[[str, float], None]
"""Function that is called with the name of a phase and its finished share."""
ProgressCallback = Callable[[SolveProgress], None]

MAX_ROUNDS: Final = 6
"""Maximum number of rounds. The last round's solution is accepted without confirmation."""
REPLICA_TOLERANCE: Final = 1.5
"""Factor for the validity of a simulated capacity. A capacity for c replicas is valid for c / 1.5 to c x 1.5
replicas."""
GROWTH_THRESHOLD: Final = 1.05
"""Ratio of a simulated capacity to the earlier capacity above which fewer replicas might be sufficient."""
SCOUT_WORK: Final = 0.1
"""Share of the solver's work in rounds whose capacities are from closed forms. The plans of these rounds are
not final."""
MAX_SCOUT_ROUNDS: Final = 3
"""Maximum number of rounds with the share `SCOUT_WORK`."""
SEARCH_WORK: Final = 0.5
"""Share of the solver's work after the used cells were simulated."""
FOLLOW_UP_WORK: Final = 0.2
"""Share of the solver's work if a similar problem was solved before."""
_RATE_TOLERANCE: Final = 1e-6
"""Relative tolerance of fixed values, because of the solver's tolerances."""


def with_simulated_capacities(
    problem: FormulatedProblem,
    report: PhaseCallback,
    on_progress: ProgressCallback | None,
    *,
    similar_solution: PoolSolution | None = None,
) -> tuple[FormulatedProblem, PoolSolution]:
    """Return the problem with simulated capacities, and its solution.

    `similar_solution` is the solution of a similar problem that was solved before, or None. Raises the errors
    of `milp.solve`.
    """
    problem = _simulate_current(problem, report)
    floor: PoolSolution | None = None
    timed_out, rounds = False, 0
    # Only a least-cost search can start from a plan.
    later = FOLLOW_UP_WORK if problem.pool.objective == "cost" else SEARCH_WORK
    effort = _first_effort(problem) if similar_solution is None else later
    while True:
        report("solve", rounds / MAX_ROUNDS)
        settings = _settings(problem.solver, effort)
        cells = similar_solution.replicas if similar_solution is not None else ()
        try:
            solution = solve_with_baseline(
                problem.pool, settings, on_progress, problem.infeasibility_notes, cells
            )
        except PlanUnfinished:
            if effort == 1:
                raise
            effort = 1.0
            continue
        timed_out = timed_out or solution.timed_out
        solution = replace(_with_bound(solution, floor, problem.solver.gap), timed_out=timed_out)
        floor = similar_solution = solution
        rounds += 1
        doubtful = _unconfirmed(problem, solution) if problem.rules.simulate and rounds < MAX_ROUNDS else []
        fitted: PoolSolution | None = None
        if doubtful:
            found = _simulate_cells(problem, doubtful, report)
            before, problem = problem, problem.with_cells(found)
            if _capacity_grew(before, problem, found, 1.0) or problem.pool.objective != "cost":
                floor = None
            if set(found) <= set(problem.cells) and not _capacity_grew(
                before, problem, found, GROWTH_THRESHOLD
            ):
                fitted = balance_load(problem.pool, solution, settings)
        if fitted is None and doubtful:
            scouts = effort == SCOUT_WORK and rounds < MAX_SCOUT_ROUNDS
            effort = SCOUT_WORK if scouts else SEARCH_WORK if effort == SCOUT_WORK else later
        elif effort == SCOUT_WORK and solution.status != "optimal":
            effort = SEARCH_WORK
        else:
            report("solve", 1.0)
            return problem, fitted or balance_load(problem.pool, solution, settings) or solution


def _first_effort(problem: FormulatedProblem) -> float:
    """Return the share of the solver's work for the first round."""
    unsure = any(spec.has_times and not spec.simulated_replicas for spec in problem.cells.values())
    return SCOUT_WORK if unsure and problem.rules.simulate and problem.pool.objective == "cost" else 1.0


def _simulate_current(problem: FormulatedProblem, report: PhaseCallback) -> FormulatedProblem:
    """When re-planning, simulate the capacities of the running cells, which closed forms underestimate."""
    current = problem.pool.current
    if current is None or not problem.rules.simulate:
        return problem
    specs = [(problem.cells[name], n) for name, n in current.replicas.items() if n]
    doubtful = [(spec, n) for spec, n in specs if spec.has_times and not spec.simulated_replicas]
    return problem.with_cells(_simulate_cells(problem, doubtful, report)) if doubtful else problem


def _settings(solver: SolverOptions, effort: float) -> SolverOptions:
    limits = {"time_limit_s": effort * solver.time_limit_s, "work": effort * solver.work}
    return solver.model_copy(update=limits)


def _unconfirmed(problem: FormulatedProblem, solution: PoolSolution) -> list[tuple[CellSpec, int]]:
    """Return the used cells whose capacity was not simulated for a similar number of replicas."""
    used = [(problem.cells[name], n) for name, n in solution.replicas.items() if n]
    return [
        (spec, n)
        for spec, n in used
        if spec.has_times
        and not spec.simulated_replicas / REPLICA_TOLERANCE
        <= n
        <= spec.simulated_replicas * REPLICA_TOLERANCE
    ]


def _simulate_cells(
    problem: FormulatedProblem, cells: list[tuple[CellSpec, int]], report: PhaseCallback
) -> dict[str, CellSpec]:
    found = {}
    for i, (spec, replicas) in enumerate(cells):
        report("confirm", i / len(cells))
        found[spec.cell.name] = problem.cell_builder.confirm(spec, problem.classes, replicas)
    return found


def _with_bound(solution: PoolSolution, floor: PoolSolution | None, gap: float) -> PoolSolution:
    """Return the solution with the better of its own bound and the bound of `floor`.

    `floor` is an earlier solution, or None if capacities have increased since. If capacities have only
    decreased, the earlier bound is still valid.
    """
    if floor is None or floor.bound <= solution.bound:
        return solution
    raised = replace(solution, bound=min(floor.bound, solution.objective))
    return replace(raised, status="optimal") if raised.gap <= gap else raised


def _capacity_grew(
    before: FormulatedProblem, after: FormulatedProblem, names: dict[str, CellSpec], factor: float
) -> bool:
    return any(
        rate > factor * before.cells[name].cell.capacity[u]
        for name in names
        if name in after.cells
        for u, rate in after.cells[name].cell.capacity.items()
    )


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
    _fix_solution(model, solution)
    fullest = _add_fullest_variables(model, solution)
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


def _fix_solution(model: PoolModel, solution: PoolSolution) -> None:
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
        phi.lowBound, phi.upBound = rate * (1 - _RATE_TOLERANCE), rate * (1 + _RATE_TOLERANCE)


def _add_fullest_variables(model: PoolModel, solution: PoolSolution) -> list[Any]:
    """Add a variable for each service that bounds the utilisation of all its cells, and return the
    variables."""
    found = []
    for i, (service, cells) in enumerate(model.cells_of.items()):
        used = [c for c in cells if solution.replicas.get(c.name)]
        if not used:
            continue
        fullest = model.add_real(f"fullest_{i}")
        found.append(fullest)
        for cell in used:
            capacity = solution.replicas[cell.name] * fullest
            model.add(f"fullest[{service},{cell.name}]", model.load(cell, model.demands_of(cell)) <= capacity)
    return found


def solve_with_baseline(
    pool: OptimizationProblem,
    settings: SolverOptions,
    on_progress: Callable[[SolveProgress], None] | None,
    notes: Mapping[str, str],
    near_cells: Collection[str] = (),
) -> PoolSolution:
    """Solve the pool, and when re-planning also the pool of only the running processes. Return the better
    solution, with the bound of the complete pool.

    Arguments and errors are the same as for `milp.solve`.
    """
    current = pool.current
    if current is None or pool.objective != "cost":
        return milp.solve(pool, settings, on_progress, notes=notes, near_cells=near_cells)
    baseline = _baseline(pool, current, settings)
    try:
        known = {*near_cells, *(baseline.replicas if baseline else ())}
        whole = milp.solve(pool, settings, on_progress, notes=notes, near_cells=known)
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
    """Solve the pool with only the running cells and the cells to which they can switch.

    Returns None if these cells cannot serve the load or no plan was found.
    """
    names = set(current.replicas)
    names |= {other for c in pool.cells if c.name in names for other in c.switches_with}
    cells = tuple(c for c in pool.cells if c.name in names)
    try:
        return milp.solve(replace(pool, cells=cells), settings)
    except (PlanInfeasible, PlanUnfinished):
        return None
