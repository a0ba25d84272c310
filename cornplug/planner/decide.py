"""The planner's decision: services, cells and ways from the input, solved, drawn up, rehearsed.

Closed forms screen all cells; the simulator confirms only those that a solution uses, and the
problem is solved again with what it found, until a solution uses confirmed cells only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cornplug.planner import milp
from cornplug.planner.cells import CellSpec
from cornplug.planner.draw_up import draw_up
from cornplug.planner.inputs import PlanInput
from cornplug.planner.plan import Plan
from cornplug.planner.pool import Pool, Progress, Solution
from cornplug.planner.problem import Problem, problem

Report = Callable[[str, float], None]
"""Phase in words, share of it that is done."""

CONFIRMATIONS: Final = 4
"""Rounds of confirming a solution's cells; the last round's solution is taken as it is."""
CONFIRMED_ENOUGH: Final = 1.5
"""A capacity confirmed for c replicas holds for c / 1.5 to c x 1.5."""


@dataclass(frozen=True)
class Decision:
    plan: Plan
    problem: Problem
    solution: Solution

    @property
    def pool(self) -> Pool:
        return self.problem.pool


def decide(
    given: PlanInput,
    *,
    digest: str,
    progress: Report | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> Decision:
    """The cheapest plan (or the one of most goodput) that keeps every SLO.

    `digest`: SHA-256 of the input file's bytes. `watch` is told of the solver's incumbents and
    bounds. Raises PlanInfeasible: there is none with this pool; ConfigError: see `problem`.
    """
    report = progress or (lambda _phase, _share: None)
    report("cells", 0.0)
    posed = problem(given)
    report("cells", 1.0)
    posed, solution = _confirmed(posed, report, watch)
    return Decision(draw_up(posed, solution, digest=digest), posed, solution)


def _confirmed(
    posed: Problem, report: Report, watch: Callable[[Progress], None] | None
) -> tuple[Problem, Solution]:
    """A solution all of whose cells the simulator has confirmed, and the problem that it solves."""
    for i in range(CONFIRMATIONS):
        report("solve", i / CONFIRMATIONS)
        solution = milp.solve(posed.pool, posed.given.solver, watch, notes=posed.notes)
        doubtful = _doubtful(posed, solution)
        if not doubtful or not posed.given.rules.simulate or i == CONFIRMATIONS - 1:
            break
        found = {}
        for n, (spec, replicas) in enumerate(doubtful):
            report("confirm", n / len(doubtful))
            found[spec.cell.name] = posed.equipment.confirm(spec, posed.classes, replicas)
        posed = posed.with_cells(found)
    report("solve", 1.0)
    return posed, solution


def _doubtful(posed: Problem, solution: Solution) -> list[tuple[CellSpec, int]]:
    """Cells in use whose capacity no simulation has confirmed for about so many replicas."""
    used = [(posed.cells[name], n) for name, n in solution.replicas.items() if n]
    return [
        (spec, n)
        for spec, n in used
        if spec.timed and not spec.confirmed / CONFIRMED_ENOUGH <= n <= spec.confirmed * CONFIRMED_ENOUGH
    ]
