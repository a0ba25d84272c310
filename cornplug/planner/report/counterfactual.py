"""What would the plan cost if the pool were a little different? One question, one quick solve."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cornplug.errors import PlanInfeasible
from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer import infeasibility, milp, objectives
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem
from cornplug.planner.optimizer.solvers import SolverLimits
from cornplug.planner.optimizer.solvers import solve as run_solver


@dataclass(frozen=True)
class CounterfactualQuestion:
    name: str
    text: str
    pool: OptimizationProblem


@dataclass(frozen=True)
class CounterfactualAnswer:
    value: float | None
    """Of the pool's objective (dollars an hour, goodput, least share); None: no plan was found."""
    proven: bool
    """To the solver's gap; of None, that there is none."""
    reason: str = ""
    """Of None: the missing capacity or cell, where that is plain without a search."""


class ExplanationClock:
    """Seconds that may be spent on explanations, and how they are spent."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._end = now() + seconds

    @property
    def left(self) -> float:
        return max(self._end - self._now(), 0.0)


def ask(pool: OptimizationProblem, settings: SolverOptions, seconds: float) -> CounterfactualAnswer:
    """Solve for the first objective only: no tie-breaks, and no search for the shortfall."""
    model = milp.build(pool)
    try:
        infeasibility.refuse_unserved(model, {})
    except PlanInfeasible as e:
        return CounterfactualAnswer(None, True, str(e).removeprefix("no plan: "))
    goal = objectives.goals(model)[0]
    model.problem.setObjective(goal.sign * goal.expression)
    run = run_solver(model.problem, SolverLimits(settings.gap, seconds, settings.threads))
    if run.status in ("infeasible", "none"):
        return CounterfactualAnswer(None, run.status == "infeasible")
    return CounterfactualAnswer(goal.sign * run.objective / hours(pool), run.status == "optimal")


def hours(pool: OptimizationProblem) -> float:
    """A re-plan's objective is dollars over its horizon."""
    return pool.current.horizon_hours if pool.current is not None and pool.objective == "cost" else 1.0
