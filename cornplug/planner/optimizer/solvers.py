"""Calls of the solver HiGHS.

All problems are minimised. The result includes the proven bound. PuLP reports "Optimal" even if the time
limit was reached, so the status is computed from the best plan and the bound.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isfinite
from typing import Any, Final, Literal

import highspy
import pulp
from highspy import HighsModelStatus, HighsSolution, cb

from cornplug.planner.optimizer.optimization_problem import SolveProgress

ProgressCallback = Callable[[SolveProgress], None]
NAME: Final = "HiGHS"
MIN_STEPS: Final = 10
"""Number of steps that are added to the steps of each call, because presolve may solve a model in 0 steps."""
_scheduler: Final = {"threads": 0}
"""Number of threads in the last solver call of this process."""


@dataclass(frozen=True)
class SolverRun:
    """Result of one solver call. If the solver found a plan, the problem's variables contain its values."""

    status: Literal["optimal", "feasible", "infeasible", "none"]
    """"none" means that a limit was reached before a plan or a proof of infeasibility was found."""
    seconds: float
    objective: float = inf
    bound: float = -inf
    first_s: float | None = None
    history: tuple[SolveProgress, ...] = ()
    work: float = 0.0
    """Steps x non-zero coefficients, in millions, see `SolverOptions.work`."""
    timed_out: bool = False
    """Whether the limit in seconds was reached. If so, another run may find another plan."""


@dataclass(frozen=True)
class SolverLimits:
    gap: float
    seconds: float
    threads: int = 1
    work: float = inf
    """Maximum work, in the unit of `SolverRun.work`. Unlike `seconds`, which matters only on slow machines,
    this limit is deterministic."""


def solve(
    problem: Any, limits: SolverLimits, on_progress: ProgressCallback | None = None, *, start: bool = False
) -> SolverRun:
    """Minimise the problem with HiGHS. With `start`, begin with the current values of the variables.

    `on_progress` is called when the best plan or the bound improves.
    """
    _without_banner()
    _share_threads(limits.threads)
    began, history = time.monotonic(), list[SolveProgress]()
    per_step = (1 + sum(len(row) for row in problem.constraints())) / 1e6
    steps = 0

    def note(kind: Any, _message: str, out: Any, reply: Any, _data: Any) -> None:
        nonlocal steps
        if kind == cb.kCallbackMipInterrupt:
            steps += 1
            reply.user_interrupt = steps * per_step > limits.work
            return
        incumbent = out.mip_primal_bound if isfinite(out.mip_primal_bound) else None
        bound = out.mip_dual_bound if isfinite(out.mip_dual_bound) else None
        progress = SolveProgress(time.monotonic() - began, incumbent, bound)
        if kind == cb.kCallbackMipImprovingSolution or not history or history[-1].bound != bound:
            history.append(progress)
            if on_progress is not None:
                on_progress(progress)

    solver = _WarmStartHighs(
        msg=False,
        gapRel=limits.gap,
        timeLimit=limits.seconds,
        threads=limits.threads,
        callbackTuple=(note, None),
        callbacksToActivate=[
            cb.HighsCallbackType.kCallbackMipImprovingSolution,
            cb.HighsCallbackType.kCallbackMipLogging,
            cb.HighsCallbackType.kCallbackMipInterrupt,
        ],
        start=start,
    )
    problem.solve(solver)
    seconds, model = time.monotonic() - began, problem.solverModel
    info, verdict = model.getInfo(), model.getModelStatus()
    spent = {
        "work": (MIN_STEPS + steps) * per_step,
        "timed_out": verdict == HighsModelStatus.kTimeLimit,
    }
    if verdict in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible):
        return SolverRun("infeasible", seconds, history=tuple(history), **spent)
    if info.primal_solution_status != 2:  # 2 means that there is a feasible solution.
        return SolverRun("none", seconds, bound=info.mip_dual_bound, history=tuple(history), **spent)
    objective = model.getObjectiveValue()
    first = next((p.seconds for p in history if p.incumbent is not None), seconds)
    status = _status(objective, info.mip_dual_bound, limits.gap)
    return SolverRun(status, seconds, objective, info.mip_dual_bound, first, tuple(history), **spent)


class _WarmStartHighs(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS with a warm start, which PuLP does not support."""

    def __init__(self, *, start: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.start = start

    def callSolver(self, lp: Any) -> None:
        if self.start:
            start = HighsSolution()
            start.col_value = [v.varValue or 0.0 for v in lp.variables()]
            lp.solverModel.setSolution(start)
        super().callSolver(lp)


def with_objective(run: SolverRun, objective: float, gap: float) -> SolverRun:
    """Return the run with another, better objective, and with the status that follows from the bound."""
    return replace(run, objective=objective, status=_status(objective, run.bound, gap))


def _status(objective: float, bound: float, gap: float) -> Literal["optimal", "feasible"]:
    return "optimal" if is_within_gap(objective, bound, gap) else "feasible"


def is_within_gap(objective: float, bound: float, gap: float) -> bool:
    """Return whether the bound proves that no plan is better than the objective by more than the gap."""
    return isfinite(objective) and objective - bound <= gap * abs(objective) + 1e-6


def relax(problem: Any) -> None:
    """Solve the problem with continuous instead of integer variables, so that `pi` of each row is its shadow
    price."""
    _without_banner()
    _share_threads(1)
    problem.solve(pulp.HiGHS(mip=False, msg=False, threads=1))


def _share_threads(number: int) -> None:
    """Set the number of threads for the next solver call.

    HiGHS starts its threads once per process. Without this call, a later solve with another number of threads
    would return no result.
    """
    if _scheduler["threads"] != number:
        highspy.Highs.resetGlobalScheduler(True)
        _scheduler["threads"] = number


@cache
def _without_banner() -> None:
    """Create the first solver of this process with standard output closed.

    highspy 1.16 prints a banner to standard output before any option can be set, but `cornplug plan --json`
    must print only JSON.
    """
    sys.stdout.flush()
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        highspy.Highs()  # type: ignore[no-untyped-call]
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)
