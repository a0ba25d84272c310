"""The planner's decision: services, cells and ways from the input, solved, drawn up, rehearsed.

Closed forms screen all cells; the simulator confirms only those that a solution uses, and the
problem is solved again with what it found, until a solution uses confirmed cells only. Then the
whole plan is rehearsed. Where a class misses a bound there (percentiles of classes that share a
cell do not mix linearly), its services' capacities are lowered and all begins again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cornplug.planner import milp
from cornplug.planner.cells import CellSpec
from cornplug.planner.draw_up import draw_up
from cornplug.planner.inputs import PlanInput
from cornplug.planner.plan import Plan
from cornplug.planner.pool import Pool, Progress, Solution
from cornplug.planner.problem import Problem, problem
from cornplug.planner.trial import Miss, Trial, rehearse

Report = Callable[[str, float], None]
"""Phase in words, share of it that is done."""

CONFIRMATIONS: Final = 4
"""Rounds of confirming a solution's cells; the last round's solution is taken as it is."""
REHEARSALS: Final = 5
DERATE: Final = 0.93
"""Of capacities, after a rehearsal with a miss; more after a bad one."""
STEEPEST: Final = 0.75
CONFIRMED_ENOUGH: Final = 1.5
"""A capacity confirmed for c replicas holds for c / 1.5 to c x 1.5."""


@dataclass(frozen=True)
class Decision:
    plan: Plan
    problem: Problem
    solution: Solution
    misses: tuple[Miss, ...] = ()
    """Bounds that the plan did not keep in its own simulation, when rounds ran out."""

    @property
    def pool(self) -> Pool:
        return self.problem.pool


def decide(
    given: PlanInput,
    *,
    digest: str,
    progress: Report | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> Decision:
    """The cheapest plan (or the one of most goodput) that keeps every SLO.

    `digest`: SHA-256 of the input file's bytes. `watch` is told of the solver's incumbents and
    bounds. Raises PlanInfeasible: there is none with this pool; ConfigError: see `problem`.
    """
    report = progress or (lambda _phase, _share: None)
    report("cells", 0.0)
    posed = problem(given)
    report("cells", 1.0)
    best: Decision | None = None
    for i in range(REHEARSALS):
        posed, solution = _confirmed(posed, report, watch)
        plan = draw_up(posed, solution, digest=digest)
        if not given.rules.simulate:
            return Decision(plan, posed, solution)
        report("rehearse", i / REHEARSALS)
        trial = rehearse(posed, solution, plan)
        now = Decision(trial.plan, posed, solution, trial.misses)
        best = _better(best, now)
        if not trial.misses:
            break
        posed = _derated(posed, solution, trial)
    report("rehearse", 1.0)
    assert best is not None
    return best


def _confirmed(
    posed: Problem, report: Report, watch: Callable[[Progress], None] | None
) -> tuple[Problem, Solution]:
    """A solution all of whose cells the simulator has confirmed, and the problem that it solves."""
    for i in range(CONFIRMATIONS):
        report("solve", i / CONFIRMATIONS)
        solution = milp.solve(posed.pool, posed.given.solver, watch, notes=posed.notes)
        doubtful = _doubtful(posed, solution)
        if not doubtful or not posed.given.rules.simulate or i == CONFIRMATIONS - 1:
            break
        found = {}
        for n, (spec, replicas) in enumerate(doubtful):
            report("confirm", n / len(doubtful))
            found[spec.cell.name] = posed.equipment.confirm(spec, posed.classes, replicas)
        posed = posed.with_cells(found)
    report("solve", 1.0)
    return posed, solution


def _doubtful(posed: Problem, solution: Solution) -> list[tuple[CellSpec, int]]:
    """Cells in use whose capacity no simulation has confirmed for about so many replicas."""
    used = [(posed.cells[name], n) for name, n in solution.replicas.items() if n]
    return [
        (spec, n)
        for spec, n in used
        if spec.timed and not spec.confirmed / CONFIRMED_ENOUGH <= n <= spec.confirmed * CONFIRMED_ENOUGH
    ]


def _better(one: Decision | None, other: Decision) -> Decision:
    """Without misses before with them; then the smaller miss, or the cheaper plan."""
    if one is None:
        return other

    def rank(d: Decision) -> tuple[float, float]:
        return max((m.times for m in d.misses), default=0.0), d.plan.cost_per_hour

    return min(one, other, key=rank)


def _derated(posed: Problem, solution: Solution, trial: Trial) -> Problem:
    """Less capacity for all cells of the services that a class with a miss has visited."""
    factor: dict[str, float] = {}
    for miss in trial.misses:
        for service in _visited(posed, solution, miss):
            factor[service] = min(factor.get(service, DERATE), max(DERATE / miss.times, STEEPEST))
    changed = {
        name: spec.derate(factor[spec.cell.service])
        for name, spec in posed.cells.items()
        if spec.timed and spec.cell.service in factor
    }
    return posed.with_cells(changed)


def _visited(posed: Problem, solution: Solution, miss: Miss) -> set[str]:
    """Services that bear on what was missed: the first token is none of decode's."""
    ways = (posed.ways[name] for name, rate in solution.served.items() if rate > 0)
    services = {s for way in ways if way.of.name == miss.of for s in way.path.stages}
    about = {"ttft": "EP", "tpot": "D", "e2e": "EPDG"}[miss.what]
    return {s.name for s in services if set(s.tasks) & set(about)}
