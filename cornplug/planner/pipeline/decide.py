"""The planner's decision: the input formulated as a problem, solved, built into a plan, and validated.

Where a class misses a bound when the whole plan is simulated, the capacities of the services that
it visits are lowered and the problem is solved again, a few times at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from cornplug.errors import PlanInfeasible, PlanUnfinished
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem, PoolSolution
from cornplug.planner.pipeline.build_plan import build_plan
from cornplug.planner.pipeline.confirm_capacities import Report, Watch
from cornplug.planner.pipeline.derate import derate
from cornplug.planner.pipeline.formulate import FormulatedProblem, formulate
from cornplug.planner.pipeline.lose_nodes import with_spare_nodes
from cornplug.planner.pipeline.use_idle_gpus import use_idle_gpus
from cornplug.planner.pipeline.validate import SloMiss, validate
from cornplug.planner.plan import Plan, TimesCorrection

VALIDATION_ROUNDS: Final = 6


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
    corrections: Iterable[TimesCorrection] | None = None,
) -> PlanDecision:
    """The cheapest plan (or the one of most goodput) that keeps every SLO.

    `digest`: SHA-256 of the input file's bytes. `watch` is told of the solver's incumbents and
    bounds; `corrections` as for `formulate`. Raises PlanInfeasible: there is none with this pool;
    ConfigError: see `formulate`.
    """
    report = progress or (lambda _phase, _share: None)
    report("cells", 0.0)
    problem = formulate(plan_input, corrections)
    report("cells", 1.0)
    if not plan_input.rules.simulate:
        problem, solution = _solved(problem, report, watch)
        return PlanDecision(build_plan(problem, solution, digest=digest), problem, solution)
    return _validated(problem, digest, report, watch)


def _solved(
    problem: FormulatedProblem, report: Report, watch: Watch | None, *, near: PoolSolution | None = None
) -> tuple[FormulatedProblem, PoolSolution]:
    """As `with_spare_nodes`, and what is paid for is used where the rules ask for it."""
    problem, solution = with_spare_nodes(problem, report, watch, near=near)
    if problem.rules.use_idle_gpus:
        solution = use_idle_gpus(problem.pool, solution, problem.solver)
    return problem, solution


def _validated(problem: FormulatedProblem, digest: str, report: Report, watch: Watch | None) -> PlanDecision:
    """The first plan without a miss; where there is none, the one that misses least."""
    tried: list[PlanDecision] = []
    for i in range(VALIDATION_ROUNDS):
        try:
            near = tried[-1].solution if tried else None
            problem, solution = _solved(problem, report, watch, near=near)
            # What was derated in earlier rounds follows from their solutions
            late = any(d.solution.timed_out for d in tried)
            solution = replace(solution, timed_out=solution.timed_out or late)
        except (PlanInfeasible, PlanUnfinished):
            if not tried:
                raise
            break
        report("validate", i / VALIDATION_ROUNDS)
        run = validate(problem, solution, build_plan(problem, solution, digest=digest))
        tried.append(PlanDecision(run.plan, problem, solution, run.misses))
        if not run.misses:
            break
        problem = derate(problem, solution, run.misses)
    report("validate", 1.0)
    return min(tried, key=lambda d: max((m.times for m in d.misses), default=0.0))
