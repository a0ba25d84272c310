"""The planner's decision: services, cells and ways from the input, solved, drawn up, rehearsed.

Where a class misses a bound when the whole plan is simulated, the capacities of the services that
it visits are lowered and the problem is solved again, a few times at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cornplug.errors import PlanInfeasible, PlanUnfinished
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem, PoolSolution
from cornplug.planner.pipeline.build_plan import draw_up
from cornplug.planner.pipeline.confirm_capacities import Report, Watch, confirmed
from cornplug.planner.pipeline.derate import derated
from cornplug.planner.pipeline.formulate import FormulatedProblem, problem
from cornplug.planner.pipeline.validate import SloMiss, rehearse
from cornplug.planner.plan import Plan

REHEARSALS: Final = 6


@dataclass(frozen=True)
class PlanDecision:
    plan: Plan
    problem: FormulatedProblem
    solution: PoolSolution
    misses: tuple[SloMiss, ...] = ()
    """Bounds that the plan did not keep in its own simulation, when rounds ran out."""

    @property
    def pool(self) -> OptimizationProblem:
        return self.problem.pool


def decide(
    plan_input: PlanInput,
    *,
    digest: str,
    progress: Report | None = None,
    watch: Watch | None = None,
) -> PlanDecision:
    """The cheapest plan (or the one of most goodput) that keeps every SLO.

    `digest`: SHA-256 of the input file's bytes. `watch` is told of the solver's incumbents and
    bounds. Raises PlanInfeasible: there is none with this pool; ConfigError: see `problem`.
    """
    report = progress or (lambda _phase, _share: None)
    report("cells", 0.0)
    posed = problem(plan_input)
    report("cells", 1.0)
    if not plan_input.rules.simulate:
        posed, solution = confirmed(posed, report, watch)
        return PlanDecision(draw_up(posed, solution, digest=digest), posed, solution)
    return _rehearsed(posed, digest, report, watch)


def _rehearsed(posed: FormulatedProblem, digest: str, report: Report, watch: Watch | None) -> PlanDecision:
    """The first plan without a miss; where there is none, the one that misses least."""
    tried: list[PlanDecision] = []
    for i in range(REHEARSALS):
        try:
            posed, solution = confirmed(posed, report, watch, first=not tried)
        except (PlanInfeasible, PlanUnfinished):
            if not tried:
                raise
            break
        report("rehearse", i / REHEARSALS)
        trial = rehearse(posed, solution, draw_up(posed, solution, digest=digest))
        tried.append(PlanDecision(trial.plan, posed, solution, trial.misses))
        if not trial.misses:
            break
        posed = derated(posed, solution, trial.misses)
    report("rehearse", 1.0)
    return min(tried, key=lambda d: max((m.times for m in d.misses), default=0.0))
