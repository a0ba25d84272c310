"""Cost of a plan for a slightly different pool, which takes one quick solve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer import infeasibility, milp, objectives
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem
from cornplug.planner.optimizer.solvers import SolverLimits
from cornplug.planner.optimizer.solvers import solve as run_solver

QUESTION_WORK: Final = 0.5
"""Maximum solver work for one question, in the unit of `SolverOptions.work`."""
BUILD_WORK: Final = 0.02
"""Solver work that is counted for building a question's model."""


@dataclass(frozen=True)
class CounterfactualQuestion:
    name: str
    text: str
    pool: OptimizationProblem


@dataclass(frozen=True)
class CounterfactualAnswer:
    value: float | None
    """Value of the pool's objective (dollars per hour, goodput or least share), or None if no plan was found,
    or none that reaches `at_least`.
    """
    proven: bool
    """Whether the solver proved the value within its gap. If the value is None: whether it proved that there
    is no such plan."""
    reason: str = ""
    """If the value is None: the capacity or cell that is missing, or "" if only a search would find it."""
    timed_out: bool = False
    """Whether the time limit ended the search. Another run may have another result."""


class ExplanationBudget:
    """Solver work that explanations may still use. Work is counted, not time, so the same input has the same
    explanations on any machine."""

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
    """Solve the pool for its first objective only, and return the result. If the pool has no plan, the
    shortfall is not searched.

    With `at_least`, only plans that are at least as good as this value are considered, which prunes most of
    the search. The work, at most `QUESTION_WORK`, is subtracted from the budget.
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
    """Return the hours by which to divide the objective: a re-plan's horizon, because its objective is the
    dollars over this horizon, and otherwise 1."""
    return pool.current.horizon_hours if pool.current is not None and pool.objective == "cost" else 1.0
