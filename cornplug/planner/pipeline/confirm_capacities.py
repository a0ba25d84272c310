"""A solution of which every cell has a simulated capacity.

Closed forms screen all cells; the simulator confirms only those that a solution uses. Where its
replicas still carry everything at their simulated capacities, the solution stands; else the
problem is solved again with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from cornplug.errors import PlanUnfinished
from cornplug.planner.candidates.cells import CellSpec
from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer.optimization_problem import PoolSolution, SolveProgress
from cornplug.planner.pipeline import current_deployment_baseline
from cornplug.planner.pipeline.balance_load import balance_load
from cornplug.planner.pipeline.formulate import FormulatedProblem

Report = Callable[[str, float], None]
"""Phase in words, share of it that is done."""
Watch = Callable[[SolveProgress], None]

ROUNDS: Final = 6
"""The last round's solution is taken as it is, confirmed or not."""
ENOUGH: Final = 1.5
"""A capacity confirmed for c replicas holds for c / 1.5 to c x 1.5."""
GROWN: Final = 1.05
"""Where a capacity has grown by this, fewer replicas might do."""
SCOUT: Final = 0.1
"""Of the solver's work: for rounds whose cells closed forms rate, so that the plan will not stand."""
SCOUTS: Final = 3
"""Such rounds at most."""
SEARCH: Final = 0.5
"""Once the cells that a plan uses are simulated."""
LATER: Final = 0.2
"""For a problem like one that was solved."""


def with_simulated_capacities(
    problem: FormulatedProblem, report: Report, watch: Watch | None, *, near: PoolSolution | None = None
) -> tuple[FormulatedProblem, PoolSolution]:
    """The solution, and the problem with the capacities that it was confirmed with.

    `near`: the solution of a like problem, where one was solved before. Raises as `milp.solve`.
    """
    problem = _current_simulated(problem, report)
    floor: PoolSolution | None = None
    timed_out, rounds = False, 0
    # Only a search for the least cost begins from a plan
    later = LATER if problem.pool.objective == "cost" else SEARCH
    effort = _first_effort(problem) if near is None else later
    while True:
        report("solve", rounds / ROUNDS)
        settings = _settings(problem.solver, effort)
        cells = near.replicas if near is not None else ()
        try:
            solution = current_deployment_baseline.solve(problem.pool, settings, watch, problem.notes, cells)
        except PlanUnfinished:
            if effort == 1:
                raise
            effort = 1.0
            continue
        timed_out = timed_out or solution.timed_out
        solution = replace(_with_bound(solution, floor, problem.solver.gap), timed_out=timed_out)
        floor = near = solution
        rounds += 1
        doubtful = _doubtful(problem, solution) if problem.rules.simulate and rounds < ROUNDS else []
        fitted: PoolSolution | None = None
        if doubtful:
            found = _simulated(problem, doubtful, report)
            before, problem = problem, problem.with_cells(found)
            if _grown(before, problem, found, 1.0) or problem.pool.objective != "cost":
                floor = None
            if set(found) <= set(problem.cells) and not _grown(before, problem, found, GROWN):
                fitted = balance_load(problem.pool, solution, settings)
        if fitted is None and doubtful:
            scouts = effort == SCOUT and rounds < SCOUTS
            effort = SCOUT if scouts else SEARCH if effort == SCOUT else later
        elif effort == SCOUT and solution.status != "optimal":
            effort = SEARCH
        else:
            report("solve", 1.0)
            return problem, fitted or balance_load(problem.pool, solution, settings) or solution


def _first_effort(problem: FormulatedProblem) -> float:
    """The share of the solver's work for the first round."""
    unsure = any(spec.timed and not spec.simulated_replicas for spec in problem.cells.values())
    return SCOUT if unsure and problem.rules.simulate and problem.pool.objective == "cost" else 1.0


def _current_simulated(problem: FormulatedProblem, report: Report) -> FormulatedProblem:
    """When re-planning: with simulated capacities of the current cells, which closed forms underrate."""
    current = problem.pool.current
    if current is None or not problem.rules.simulate:
        return problem
    specs = [(problem.cells[name], n) for name, n in current.replicas.items() if n]
    doubtful = [(spec, n) for spec, n in specs if spec.timed and not spec.simulated_replicas]
    return problem.with_cells(_simulated(problem, doubtful, report)) if doubtful else problem


def _settings(solver: SolverOptions, effort: float) -> SolverOptions:
    limits = {"time_limit_s": effort * solver.time_limit_s, "work": effort * solver.work}
    return solver.model_copy(update=limits)


def _doubtful(problem: FormulatedProblem, solution: PoolSolution) -> list[tuple[CellSpec, int]]:
    """Cells in use whose capacity no simulation has confirmed for about so many replicas."""
    used = [(problem.cells[name], n) for name, n in solution.replicas.items() if n]
    return [
        (spec, n)
        for spec, n in used
        if spec.timed and not spec.simulated_replicas / ENOUGH <= n <= spec.simulated_replicas * ENOUGH
    ]


def _simulated(
    problem: FormulatedProblem, doubtful: list[tuple[CellSpec, int]], report: Report
) -> dict[str, CellSpec]:
    found = {}
    for i, (spec, replicas) in enumerate(doubtful):
        report("confirm", i / len(doubtful))
        found[spec.cell.name] = problem.cell_builder.confirm(spec, problem.classes, replicas)
    return found


def _with_bound(solution: PoolSolution, floor: PoolSolution | None, gap: float) -> PoolSolution:
    """With the better bound: cells that carry less than those of `floor` cost no less."""
    if floor is None or floor.bound <= solution.bound:
        return solution
    raised = replace(solution, bound=min(floor.bound, solution.objective))
    return replace(raised, status="optimal") if raised.gap <= gap else raised


def _grown(
    before: FormulatedProblem, after: FormulatedProblem, names: dict[str, CellSpec], times: float
) -> bool:
    return any(
        rate > times * before.cells[name].cell.capacity[u]
        for name in names
        if name in after.cells
        for u, rate in after.cells[name].cell.capacity.items()
    )
