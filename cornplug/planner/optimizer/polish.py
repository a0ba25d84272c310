"""Computes rates for integer numbers of replicas and nodes.

A solver's integers are exact only to a tolerance (1e-6 in HiGHS), so 4e-6 of a replica may do some work.
Polishing fixes every integer at its rounded value, and solves for the rates again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Final

from pulp import LpInteger

from cornplug.planner.optimizer.solution import Values
from cornplug.planner.optimizer.solvers import SolverLimits, solve
from cornplug.planner.optimizer.variables import PoolModel

WHOLE: Final = 1e-9
HELD: Final = 1e-7
"""Relative loss that is allowed for an earlier goal, because of the solver's tolerances."""


def is_whole(model: PoolModel, values: Values) -> bool:
    return all(abs(values[v] - round(values[v])) <= WHOLE for v in _integers(model))


def polish(
    model: PoolModel, fresh: PoolModel, wanted: Sequence[tuple[Any, int]], values: Values
) -> dict[Any, float]:
    """Return the values of `model` with rounded integers and the best rates for these integers.

    If no rates are feasible with the rounded integers, the rates are not changed.

    Args:
        fresh: the same model without an objective. It is modified.
        wanted: goals of `fresh`, as (expression, sign). The sign is 1 (minimised) or -1 (maximised).
    """
    rounded = {v.name: round(values[v]) for v in _integers(model)}
    for v in _integers(fresh):
        v.lowBound = v.upBound = rounded[v.name]
    found: dict[str, float] = {}
    for expression, sign in wanted:
        fresh.problem.setObjective(sign * expression)
        if solve(fresh.problem, SolverLimits(0.0, inf)).status not in ("optimal", "feasible"):
            break
        found = {v.name: v.varValue or 0.0 for v in fresh.problem.variables()}
        reached = sum(weight * found[v.name] for v, weight in expression.items())
        fresh.problem.addConstraint(sign * expression <= sign * reached + HELD * max(1.0, abs(reached)))
    return {v: rounded.get(v.name, found.get(v.name, value)) for v, value in values.items()}


def _integers(model: PoolModel) -> list[Any]:
    return [v for v in model.problem.variables() if v.cat == LpInteger]
