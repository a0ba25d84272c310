"""HiGHS in this process, through PuLP.

All programs are minimised. A run includes its proven bound. PuLP reports "Optimal" also if the time limit was
reached, so the status is computed from the incumbent and the bound.
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

Watch = Callable[[SolveProgress], None]
NAME: Final = "HiGHS"
MIN_STEPS: Final = 10
"""Minimum number of steps to count per call, because presolve alone may solve a model."""
_scheduler: Final = {"threads": 0}
"""Number of threads of the last call in this process."""


@dataclass(frozen=True)
class SolverRun:
    """Result of one solver call. The variables contain its plan, if it found one."""

    status: Literal["optimal", "feasible", "infeasible", "none"]
    """"none" means that the time was up before a plan or a proof of infeasibility was found."""
    seconds: float
    objective: float = inf
    bound: float = -inf
    first_s: float | None = None
    history: tuple[SolveProgress, ...] = ()
    work: float = 0.0
    """Million steps x non-zero coefficients, see `SolverOptions.work`."""
    timed_out: bool = False
    """Whether the wall-clock limit was reached. Another run may find another plan."""


@dataclass(frozen=True)
class SolverLimits:
    gap: float
    seconds: float
    threads: int = 1
    work: float = inf
    """Work as in `SolverRun.work`. It is deterministic, unlike `seconds`, which only limits slow machines."""


def solve(
    problem: Any, limits: SolverLimits, watch: Watch | None = None, *, start: bool = False
) -> SolverRun:
    """Minimise the problem with HiGHS. With `start`, begin from the current values of the variables."""
    _without_banner()
    _share_threads(limits.threads)
    began, history = time.monotonic(), list[SolveProgress]()
    per_step = (1 + sum(len(row) for row in problem.constraints())) / 1e6
    steps = 0

    def note(kind: Any, _message: str, out: Any, answer: Any, _data: Any) -> None:
        nonlocal steps
        if kind == cb.kCallbackMipInterrupt:
            steps += 1
            answer.user_interrupt = steps * per_step > limits.work
            return
        incumbent = out.mip_primal_bound if isfinite(out.mip_primal_bound) else None
        bound = out.mip_dual_bound if isfinite(out.mip_dual_bound) else None
        progress = SolveProgress(time.monotonic() - began, incumbent, bound)
        if kind == cb.kCallbackMipImprovingSolution or not history or history[-1].bound != bound:
            history.append(progress)
            if watch is not None:
                watch(progress)

    solver = _Highs(
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
    if info.primal_solution_status != 2:  # 2 means a feasible point
        return SolverRun("none", seconds, bound=info.mip_dual_bound, history=tuple(history), **spent)
    objective = model.getObjectiveValue()
    first = next((p.seconds for p in history if p.incumbent is not None), seconds)
    status = _status(objective, info.mip_dual_bound, limits.gap)
    return SolverRun(status, seconds, objective, info.mip_dual_bound, first, tuple(history), **spent)


class _Highs(pulp.HiGHS):  # type: ignore[misc]
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
    """Return the run with a better objective than the solver's, and the status that its bound proves."""
    return replace(run, objective=objective, status=_status(objective, run.bound, gap))


def _status(objective: float, bound: float, gap: float) -> Literal["optimal", "feasible"]:
    return "optimal" if reached(objective, bound, gap) else "feasible"


def reached(objective: float, bound: float, gap: float) -> bool:
    """Return whether the bound proves that no plan is better by more than the gap."""
    return isfinite(objective) and objective - bound <= gap * abs(objective) + 1e-6


def relax(problem: Any) -> None:
    """Solve without integrality. Each row's `pi` is then its shadow price."""
    _without_banner()
    _share_threads(1)
    problem.solve(pulp.HiGHS(mip=False, msg=False, threads=1))


def _share_threads(number: int) -> None:
    """Set the number of threads of the next call.

    HiGHS starts its threads once per process, and solves nothing if a later call requests another number.
    """
    if _scheduler["threads"] != number:
        highspy.Highs.resetGlobalScheduler(True)
        _scheduler["threads"] = number


@cache
def _without_banner() -> None:
    """Create the first solver of this process with standard output closed.

    highspy 1.16 prints a banner to it before any option is set, but `cornplug plan --json` must print only
    JSON.
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
