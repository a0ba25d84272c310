"""Collects the best plan and the best bound of several solver calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite
from typing import Any, Literal

from cornplug.planner.optimizer.optimization_problem import SolveProgress
from cornplug.planner.optimizer.solution import Values
from cornplug.planner.optimizer.solvers import SolverLimits, SolverRun, reached
from cornplug.planner.optimizer.solvers import solve as run_solver
from cornplug.planner.optimizer.variables import PoolModel

Tell = Callable[[SolveProgress], None]


class Incumbent:
    """Best plan and bound of a model. `tell` is called for every improvement."""

    def __init__(self, model: PoolModel, cost: Any, limits: SolverLimits, tell: Tell | None) -> None:
        """Create an incumbent without a plan. `limits` apply to all solver calls together."""
        self.model, self.cost, self.limits, self.tell = model, cost, limits, tell
        self.began, self.spent, self.timed_out = time.monotonic(), 0.0, False
        self.values: Values | None = None
        self.dollars, self.bound = inf, -inf
        self.history: list[SolveProgress] = []

    @property
    def proven(self) -> bool:
        return reached(self.dollars, self.bound, self.limits.gap)

    def limits_of_call(self, gap: float, work: float) -> SolverLimits:
        """Return the limits of one solver call: `work`, and the remaining seconds, each with a small
        minimum."""
        left = self.limits.seconds - (time.monotonic() - self.began)
        work = max(min(work, self.limits.work - self.spent), 0.02 * self.limits.work)
        return replace(self.limits, gap=gap, seconds=max(left, 0.02 * self.limits.seconds), work=work)

    def record(self, run: SolverRun) -> None:
        self.spent += run.work
        self.timed_out = self.timed_out or run.timed_out

    def improve(self, goal: Any, share: float, *, gap: float | None = None) -> SolverRun:
        """Run the solver once, starting from the best plan, and keep the result if it is better.

        Args:
            goal: expression to minimise. The bound is used only if this is `cost` itself.
            share: share of the work of all calls.
            gap: gap at which the solver stops, or None for the gap in `limits`.
        """
        model, is_cost = self.model, goal is self.cost
        model.problem.setObjective(goal)
        for variable, value in (self.values or {}).items():
            variable.varValue = value
        limits = self.limits_of_call(self.limits.gap if gap is None else gap, share * self.limits.work)
        watch = self._watch() if is_cost else None
        run = run_solver(model.problem, limits, watch, start=self.values is not None)
        self.record(run)
        if run.status in ("optimal", "feasible"):
            self._keep({v: v.varValue or 0.0 for v in model.problem.variables()}, equals=not is_cost)
        if is_cost:
            self.raise_bound(run.bound)
        return run

    def _keep(self, values: Values, *, equals: bool) -> None:
        """Keep a plan if it is cheaper than the best plan.

        With `equals`, a plan of equal cost also replaces the best plan, because its potential is better.
        """
        dollars = sum(weight * values[v] for v, weight in self.cost.items())
        if dollars < self.dollars - 1e-6:
            self.dollars, self.values = dollars, values
            self._note(self.dollars, self.bound)
        elif equals and dollars < self.dollars + 1e-6:
            self.values = values

    def raise_bound(self, bound: float) -> None:
        if isfinite(bound) and bound > self.bound:
            self.bound = bound
            self._note(self.dollars, self.bound)

    def _watch(self) -> Tell:
        """Return a callback that notes the solver's progress when the incumbent or the bound changes."""

        def heard(at: SolveProgress) -> None:
            dollars = self.dollars if at.incumbent is None else min(at.incumbent, self.dollars)
            bound = self.bound if at.bound is None else max(at.bound, self.bound)
            last = self.history[-1] if self.history else None
            if last is None or (last.incumbent, last.bound) != (_known(dollars), _known(bound)):
                self._note(dollars, bound)

        return heard

    def _note(self, dollars: float, bound: float) -> None:
        at = SolveProgress(time.monotonic() - self.began, _known(dollars), _known(bound))
        self.history.append(at)
        if self.tell is not None:
            self.tell(at)

    def run(self, status: Literal["infeasible"] | None = None) -> SolverRun:
        """Return the result of all solver calls as a single run."""
        seconds = time.monotonic() - self.began
        history = tuple(self.history)
        run = SolverRun("none", seconds, history=history, work=self.spent, timed_out=self.timed_out)
        if status is not None:
            return replace(run, status=status)
        if self.values is None:
            return replace(run, bound=self.bound)
        first = next((at.seconds for at in history if at.incumbent is not None), None)
        verdict: Literal["optimal", "feasible"] = "optimal" if self.proven else "feasible"
        return replace(run, status=verdict, objective=self.dollars, bound=self.bound, first_s=first)


def _known(value: float) -> float | None:
    return value if isfinite(value) else None
