"""What would the plan cost if the pool were a little different? One question, one quick solve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer import infeasibility, milp, objectives
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem
from cornplug.planner.optimizer.solvers import SolverLimits
from cornplug.planner.optimizer.solvers import solve as run_solver

QUESTION_WORK: Final = 0.5
"""For one question at most."""
BUILD_WORK: Final = 0.02
"""A question costs this in any case: its model is built."""


@dataclass(frozen=True)
class CounterfactualQuestion:
    name: str
    text: str
    pool: OptimizationProblem


@dataclass(frozen=True)
class CounterfactualAnswer:
    value: float | None
    """Of the pool's objective (dollars an hour, goodput, least share); None: no plan was found that is good
    enough."""
    proven: bool
    """To the solver's gap; of None, that there is none."""
    reason: str = ""
    """Of None: the missing capacity or cell, where that is plain without a search."""
    timed_out: bool = False
    """The wall clock ended the search: another run may answer otherwise."""


class ExplanationBudget:
    """Solver work that may be spent on explanations: equal inputs get equal ones, on any machine."""

    def __init__(self, work: float) -> None:
        """`work`: as `SolverOptions.work`."""
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
    """The answer by the first objective only: no tie-breaks, and no search for the shortfall.

    `at_least`: only a plan that is as good as this is asked for, which prunes most of the search.
    Its work, at most `QUESTION_WORK`, is taken from the budget.
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
    """A re-plan's objective is dollars over its horizon."""
    return pool.current.horizon_hours if pool.current is not None and pool.objective == "cost" else 1.0
