"""The best plan and the best bound so far, over several calls of a solver."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf, isfinite
from typing import Any, Literal

from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer.optimization_problem import SolveProgress
from cornplug.planner.optimizer.solution import Values
from cornplug.planner.optimizer.solvers import SolverLimits, SolverRun, reached
from cornplug.planner.optimizer.solvers import solve as run_solver
from cornplug.planner.optimizer.variables import PoolModel

Tell = Callable[[SolveProgress], None]


class Incumbent:
    """Of one model and its money; `tell` hears of every improvement."""

    def __init__(
        self, model: PoolModel, cost: Any, settings: SolverOptions, seconds: float, tell: Tell | None
    ) -> None:
        self.model, self.cost, self.settings = model, cost, settings
        self.began, self.seconds, self.tell = time.monotonic(), seconds, tell
        self.values: Values | None = None
        self.dollars, self.bound = inf, -inf
        self.history: list[SolveProgress] = []

    @property
    def proven(self) -> bool:
        return reached(self.dollars, self.bound, self.settings.gap)

    def seconds_for(self, share: float) -> float:
        """Of the time limit, as far as it is left; a little always is."""
        left = self.seconds - (time.monotonic() - self.began)
        return max(min(share * self.seconds, left), 0.02 * self.seconds)

    def improve(self, goal: Any, share: float, *, gap: float | None = None) -> SolverRun:
        """One call of the solver, from the best plan; what it finds is kept where it is cheaper."""
        model, is_cost = self.model, goal is self.cost
        model.problem.setObjective(goal)
        for variable, value in (self.values or {}).items():
            variable.varValue = value
        limits = SolverLimits(
            self.settings.gap if gap is None else gap, self.seconds_for(share), self.settings.threads
        )
        watch = self._watch() if is_cost else None
        run = run_solver(model.problem, limits, watch, start=self.values is not None)
        if run.status in ("optimal", "feasible"):
            self._keep({v: v.varValue or 0.0 for v in model.problem.variables()}, equals=not is_cost)
        if is_cost:
            self.raise_bound(run.bound)
        return run

    def _keep(self, values: Values, *, equals: bool) -> None:
        """Of plans that cost the same, the one that is better by a potential leads on."""
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
        """What the solver says while it works, as far as it is news."""

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
        """All calls as one."""
        seconds = time.monotonic() - self.began
        history = tuple(self.history)
        if status is not None:
            return SolverRun(status, seconds, history=history)
        if self.values is None:
            return SolverRun("none", seconds, bound=self.bound, history=history)
        first = next((at.seconds for at in history if at.incumbent is not None), None)
        verdict: Literal["optimal", "feasible"] = "optimal" if self.proven else "feasible"
        return SolverRun(verdict, seconds, self.dollars, self.bound, first, history)


def _known(value: float) -> float | None:
    return value if isfinite(value) else None
