"""A solution of which every cell has a simulated capacity.

Closed forms screen all cells; the simulator confirms only those that a solution uses. Where its
replicas still carry everything at their simulated capacities, the solution stands; else the
problem is solved again with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

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
LATER: Final = 0.5
"""Of the solver's limits, for rounds after the first: they change little."""


def with_simulated_capacities(
    problem: FormulatedProblem, report: Report, watch: Watch | None, *, first: bool = True
) -> tuple[FormulatedProblem, PoolSolution]:
    """The solution, and the problem with the capacities that it was confirmed with.

    `first`: False where a like problem was solved before. Raises as `milp.solve`.
    """
    problem = _current_simulated(problem, report)
    floor: PoolSolution | None = None
    timed_out = False
    for i in range(ROUNDS):
        report("solve", i / ROUNDS)
        settings = _settings(problem.solver, first=first and i == 0)
        solution = current_deployment_baseline.solve(problem.pool, settings, watch, problem.notes)
        timed_out = timed_out or solution.timed_out
        solution = replace(_with_bound(solution, floor, problem.solver.gap), timed_out=timed_out)
        floor = solution
        doubtful = _doubtful(problem, solution)
        if not doubtful or not problem.rules.simulate or i == ROUNDS - 1:
            break
        found = _simulated(problem, doubtful, report)
        before, problem = problem, problem.with_cells(found)
        if _grown(before, problem, found, 1.0) or problem.pool.objective != "cost":
            floor = None
        if set(found) <= set(problem.cells) and not _grown(before, problem, found, GROWN):
            fitted = balance_load(problem.pool, solution, settings)
            if fitted is not None:
                report("solve", 1.0)
                return problem, fitted
    report("solve", 1.0)
    return problem, balance_load(problem.pool, solution, settings) or solution


def _current_simulated(problem: FormulatedProblem, report: Report) -> FormulatedProblem:
    """When re-planning: with simulated capacities of the current cells, which closed forms underrate."""
    current = problem.pool.current
    if current is None or not problem.rules.simulate:
        return problem
    specs = [(problem.cells[name], n) for name, n in current.replicas.items() if n]
    doubtful = [(spec, n) for spec, n in specs if spec.timed and not spec.simulated_replicas]
    return problem.with_cells(_simulated(problem, doubtful, report)) if doubtful else problem


def _settings(solver: SolverOptions, *, first: bool) -> SolverOptions:
    if first:
        return solver
    later = {"time_limit_s": LATER * solver.time_limit_s, "work": LATER * solver.work}
    return solver.model_copy(update=later)


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
