"""HiGHS in this process, through PuLP; CBC, which comes in PuLP's wheel, where HiGHS cannot.

All programs are minimised. A run says what was proven: PuLP's own status calls a plan "Optimal"
also when the time was up, so that incumbent and bound are compared here.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal

import pulp

from cornplug.errors import ConfigError
from cornplug.planner.solving.pool import Progress

Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class Run:
    """What one call of a solver found. The variables hold its plan where there is one."""

    status: Literal["optimal", "feasible", "infeasible", "none"]
    """none: the time was up before any plan was found, and none was proven impossible."""
    solver: str
    seconds: float
    objective: float = inf
    bound: float = -inf
    first_s: float | None = None
    history: tuple[Progress, ...] = ()


@dataclass(frozen=True)
class Limits:
    gap: float
    seconds: float
    threads: int = 1


def solve(problem: Any, name: str, limits: Limits, watch: Watch | None = None, *, start: bool = False) -> Run:
    """Minimise; with `start`, from the values that the variables hold."""
    if name == "auto":
        name = "highs" if find_spec("highspy") else "cbc"
    run = {"highs": highs, "cbc": cbc}.get(name)
    if run is None:
        raise ConfigError("solver.name", f'there is no solver "{name}"', 'Write "auto", "highs" or "cbc".')
    return run(problem, limits, watch, start=start)


def highs(problem: Any, limits: Limits, watch: Watch | None = None, *, start: bool = False) -> Run:
    if find_spec("highspy") is None:
        raise ConfigError(
            "solver.name", "highspy is not installed", 'pip install "cornplug[planner]", or write "cbc".'
        )
    from highspy import HighsModelStatus, cb

    began, history = time.monotonic(), list[Progress]()

    def note(kind: Any, _message: str, out: Any, _in: Any, _data: Any) -> None:
        incumbent = out.mip_primal_bound if isfinite(out.mip_primal_bound) else None
        bound = out.mip_dual_bound if isfinite(out.mip_dual_bound) else None
        progress = Progress(time.monotonic() - began, incumbent, bound)
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
        ],
        start=start,
    )
    problem.solve(solver)
    seconds, model = time.monotonic() - began, problem.solverModel
    if model.getModelStatus() in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible):
        return Run("infeasible", "HiGHS", seconds, history=tuple(history))
    info = model.getInfo()
    if info.primal_solution_status != 2:  # a feasible point
        return Run("none", "HiGHS", seconds, bound=info.mip_dual_bound, history=tuple(history))
    objective = model.getObjectiveValue()
    first = next((p.seconds for p in history if p.incumbent is not None), seconds)
    status = _status(objective, info.mip_dual_bound, limits.gap)
    return Run(status, "HiGHS", seconds, objective, info.mip_dual_bound, first, tuple(history))


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS, which has no way to hand over a first plan."""

    def __init__(self, *, start: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.start = start

    def callSolver(self, lp: Any) -> None:
        if self.start:
            from highspy import HighsSolution

            given = HighsSolution()
            given.col_value = [v.varValue or 0.0 for v in lp.variables()]
            lp.solverModel.setSolution(given)
        super().callSolver(lp)


def cbc(problem: Any, limits: Limits, watch: Watch | None = None, *, start: bool = False) -> Run:
    """CBC tells its bound in its log only, and nothing before it ends."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cornplug-cbc-") as folder:
        log = Path(folder, "log")
        problem.solve(
            pulp.COIN_CMD(
                path=pulp.PULP_CBC_CMD.pulp_cbc_path,
                msg=False,
                gapRel=limits.gap,
                timeLimit=limits.seconds,
                threads=limits.threads if limits.threads > 1 else None,
                warmStart=start,
                logPath=str(log),
            )
        )
        said = log.read_text()
    seconds = time.monotonic() - began
    if problem.status == pulp.LpStatusInfeasible:
        return Run("infeasible", "CBC", seconds)
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Run("none", "CBC", seconds)
    objective = pulp.value(problem.objective) or 0.0
    bound = _cbc_bound(said, objective, proven=problem.sol_status == pulp.LpSolutionOptimal)
    end = Progress(seconds, objective, bound)
    if watch is not None:
        watch(end)
    return Run(_status(objective, bound, limits.gap), "CBC", seconds, objective, bound, None, (end,))


def _cbc_bound(log: str, objective: float, *, proven: bool) -> float:
    said: Mapping[str, str] = dict(re.findall(r"^(Lower bound|Objective value):\s+(\S+)", log, re.MULTILINE))
    if "Lower bound" in said:
        return min(float(said["Lower bound"]), objective)
    return objective if proven else -inf


def _status(objective: float, bound: float, gap: float) -> Literal["optimal", "feasible"]:
    return "optimal" if reached(objective, bound, gap) else "feasible"


def reached(objective: float, bound: float, gap: float) -> bool:
    """The plan is proven: none is better by more than the gap."""
    return isfinite(objective) and objective - bound <= gap * abs(objective) + 1e-6


def relax(problem: Any, name: str) -> None:
    """Solve without integrality: afterwards each row's `pi` is its shadow price."""
    highs_here = name != "cbc" and find_spec("highspy") is not None
    cbc_path = pulp.PULP_CBC_CMD.pulp_cbc_path
    problem.solve(
        pulp.HiGHS(mip=False, msg=False) if highs_here else pulp.COIN_CMD(path=cbc_path, mip=False, msg=False)
    )
