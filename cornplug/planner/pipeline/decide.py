"""Planner pipeline: formulates the input as a problem, solves it, builds a plan, and validates the plan.

If a class misses a bound in the simulation of the complete plan, the capacities of the services that it
visits are reduced and the problem is solved again, at most `VALIDATION_ROUNDS` times.
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
    """Bounds that the plan misses in simulation."""

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
    """Return the best plan for the input's objective that meets every SLO.

    Args:
        digest: SHA-256 of the input file.
        progress: called with the name of a phase and its finished share.
        watch: called with the solver's best plan and bound when one of them improves.
        corrections: as in `formulate`.

    Raises PlanInfeasible and PlanUnfinished, and ConfigError as `formulate`.
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
    """Solve with `with_spare_nodes`, and use idle GPUs if the rules request it."""
    problem, solution = with_spare_nodes(problem, report, watch, near=near)
    if problem.rules.use_idle_gpus:
        solution = use_idle_gpus(problem.pool, solution, problem.solver)
    return problem, solution


def _validated(problem: FormulatedProblem, digest: str, report: Report, watch: Watch | None) -> PlanDecision:
    """Return the first plan that misses no bound, or the plan with the smallest miss if there is none."""
    tried: list[PlanDecision] = []
    for i in range(VALIDATION_ROUNDS):
        try:
            near = tried[-1].solution if tried else None
            problem, solution = _solved(problem, report, watch, near=near)
            # The capacities of this round depend on the solutions of earlier rounds.
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
