"""The planner's decision: services, cells and ways from the input, solved, drawn up, rehearsed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cornplug.planner import milp
from cornplug.planner.draw_up import draw_up
from cornplug.planner.inputs import PlanInput
from cornplug.planner.plan import Plan
from cornplug.planner.pool import Pool, Solution
from cornplug.planner.problem import Problem, problem

Report = Callable[[str, float], None]
"""Phase in words, share of it that is done."""


@dataclass(frozen=True)
class Decision:
    plan: Plan
    problem: Problem
    solution: Solution

    @property
    def pool(self) -> Pool:
        return self.problem.pool


def decide(given: PlanInput, *, digest: str, progress: Report | None = None) -> Decision:
    """The cheapest plan (or the one of most goodput) that keeps every SLO.

    PlanInfeasible: there is none with this pool. `digest`: SHA-256 of the input file's bytes.
    """
    report = progress or (lambda _phase, _share: None)
    report("cells", 0.0)
    posed = problem(given)
    report("cells", 1.0)
    report("solve", 0.0)
    solution = milp.solve(posed.pool, given.solver)
    report("solve", 1.0)
    return Decision(draw_up(posed, solution, digest=digest), posed, solution)
