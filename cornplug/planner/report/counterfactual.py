"""Cost of a plan for a slightly different pool. Each question is one quick solve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer import infeasibility, milp, objectives
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem
from cornplug.planner.optimizer.solvers import SolverLimits
from cornplug.planner.optimizer.solvers import solve as run_solver

QUESTION_WORK: Final = 0.5
"""Maximum solver work for one question."""
BUILD_WORK: Final = 0.02
"""Solver work counted for building the model of a question."""


@dataclass(frozen=True)
class CounterfactualQuestion:
    name: str
    text: str
    pool: OptimizationProblem


@dataclass(frozen=True)
class CounterfactualAnswer:
    value: float | None
    """Value of the pool's objective (dollars per hour, goodput, least share), or None if no plan was found
    that is good enough.
    """
    proven: bool
    """Whether the value is proved within the solver's gap, or, if it is None, that there is no such plan."""
    reason: str = ""
    """If the value is None: the missing capacity or cell, if it is known without a search."""
    timed_out: bool = False
    """Whether the time limit ended the search. Another run may have another result."""


class ExplanationBudget:
    """Solver work that explanations may use. The same input gives the same explanations on any machine."""

    def __init__(self, work: float) -> None:
        """Create a budget of `work`, in the unit of `SolverOptions.work`."""
        self.left = max(work, 0.0)

    def spend(self, work: float) -> None:
        self.left = max(self.left - work, 0.0)


def ask(
    pool: OptimizationProblem,
    settings: SolverOptions,
    budget: ExplanationBudget,
    *,
    at_least: float | None = None,
) -> CounterfactualAnswer:
    """Return the answer for the first objective, without tie-breaks and without a search for the shortfall.

    With `at_least`, only plans of at least this value are considered, which prunes most of the search. The
    work, at most `QUESTION_WORK`, is taken from the budget.
    """
    budget.spend(BUILD_WORK)
    model = milp.build(pool)
    if reason := infeasibility.unserved_in_short(model):
        return CounterfactualAnswer(None, True, reason)
    goal = objectives.goals(model)[0]
    model.problem.setObjective(goal.sign * goal.expression)
    if at_least is not None:
        model.problem.addConstraint(goal.sign * goal.expression <= goal.sign * at_least * hours(pool))
    work = min(QUESTION_WORK, budget.left)
    run = run_solver(model.problem, SolverLimits(settings.gap, settings.time_limit_s, settings.threads, work))
    budget.spend(run.work)
    if run.status in ("infeasible", "none"):
        return CounterfactualAnswer(None, run.status == "infeasible", timed_out=run.timed_out)
    value = goal.sign * run.objective / hours(pool)
    return CounterfactualAnswer(value, run.status == "optimal", timed_out=run.timed_out)


def hours(pool: OptimizationProblem) -> float:
    """Return the hours by which the objective is divided, because a re-plan's objective is dollars over its
    horizon.
    """
    return pool.current.horizon_hours if pool.current is not None and pool.objective == "cost" else 1.0
