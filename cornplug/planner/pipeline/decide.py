"""Planner pipeline: formulates the input as a problem, solves it, builds a plan, and validates the plan.

A cell's capacity for a class assumes that the cell serves only this class, and loads of several classes are
added. However, percentiles do not combine linearly, and the stages of a request do not reach their worst case
together. A class may therefore miss a bound slightly in the simulation of the complete plan. In this case,
the capacities of the services that the class visits are reduced and the problem is solved again, at most
`VALIDATION_ROUNDS` times.

`with_hours` computes the machines that a plan needs in each hour of the day. The other machines can be
released during that hour. A plan serves each request class at its highest rate. In other hours some
replicas can be stopped, but none is added or changed. The optimization is therefore repeated for each hour,
with the plan's numbers of replicas as upper limits and with the same latency bounds and reserves. Loads are
rounded up to eighths of each class's peak, so that few different problems have to be solved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from cornplug.errors import PlanInfeasible, PlanUnfinished
from cornplug.planner.candidates.cells import CellSpec
from cornplug.planner.inputs.request_sampling import RequestClass
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.optimizer.optimization_problem import CurrentState, OptimizationProblem, PoolSolution
from cornplug.planner.pipeline.build_plan import build_plan
from cornplug.planner.pipeline.confirm_capacities import PhaseCallback, ProgressCallback
from cornplug.planner.pipeline.formulate import FormulatedProblem, formulate, limit_to_cells
from cornplug.planner.pipeline.place_replicas import use_idle_gpus, with_spare_nodes
from cornplug.planner.pipeline.validate import SloMiss, validate
from cornplug.planner.plan import Plan, PlannedHour, TimesCorrection

VALIDATION_ROUNDS: Final = 6
DERATE_FACTOR: Final = 0.93
MIN_DERATE_FACTOR: Final = 0.7
"""Smallest factor by which one round reduces a capacity."""
_MAX_CAPACITY: Final = 0.97
"""Maximum capacity after the reduction, as a share of the fullest cell's load."""
HOURS: Final = 24
_LOAD_STEPS: Final = 8
HourlyLoad = tuple[tuple[str, float], ...]
"""(request class, rate in an hour as a share of the planned rate) for all classes."""


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
    progress: PhaseCallback | None = None,
    on_progress: ProgressCallback | None = None,
    corrections: Iterable[TimesCorrection] | None = None,
) -> PlanDecision:
    """Return the best plan for the input's objective that meets every SLO.

    Args:
        digest: SHA-256 of the input file.
        progress: Called with the name of a phase and its finished share.
        on_progress: Called when the solver's best plan or the bound improves.
        corrections: Corrections of the profiles' times, as in `formulate`.

    Raises PlanInfeasible, PlanUnfinished, and the same errors as `formulate`.
    """
    report = progress or (lambda _phase, _share: None)
    report("cells", 0.0)
    problem = formulate(plan_input, corrections)
    report("cells", 1.0)
    if not plan_input.rules.simulate:
        problem, solution = _solve(problem, report, on_progress)
        return PlanDecision(build_plan(problem, solution, digest=digest), problem, solution)
    return _solve_and_validate(problem, digest, report, on_progress)


def _solve(
    problem: FormulatedProblem,
    report: PhaseCallback,
    on_progress: ProgressCallback | None,
    *,
    similar_solution: PoolSolution | None = None,
) -> tuple[FormulatedProblem, PoolSolution]:
    """Solve with `with_spare_nodes`, and use idle GPUs if the rules request it."""
    problem, solution = with_spare_nodes(problem, report, on_progress, similar_solution=similar_solution)
    if problem.rules.use_idle_gpus:
        solution = use_idle_gpus(problem.pool, solution, problem.solver)
    return problem, solution


def _solve_and_validate(
    problem: FormulatedProblem, digest: str, report: PhaseCallback, on_progress: ProgressCallback | None
) -> PlanDecision:
    """Return the first plan that meets all bounds. If no plan does, return the plan with the smallest
    violation."""
    tried: list[PlanDecision] = []
    for i in range(VALIDATION_ROUNDS):
        try:
            near = tried[-1].solution if tried else None
            problem, solution = _solve(problem, report, on_progress, similar_solution=near)
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
        problem = _derate(problem, solution, run.misses)
    report("validate", 1.0)
    return min(tried, key=lambda d: max((m.excess_ratio for m in d.misses), default=0.0))


def _derate(
    problem: FormulatedProblem, solution: PoolSolution, misses: tuple[SloMiss, ...]
) -> FormulatedProblem:
    """Return the problem with reduced capacities of services that affect a missed bound.

    The factor depends on the size of the miss. It is small enough that at least the fullest cell of each
    service can no longer serve its load. Otherwise a service with half-empty cells would not change.
    """
    factor: dict[str, float] = {}
    loads = _loads(problem, solution)
    for miss in misses:
        for service in _affected_services(problem, solution, miss):
            wanted = min(DERATE_FACTOR / miss.excess_ratio, _MAX_CAPACITY * loads.get(service, 1.0))
            factor[service] = min(factor.get(service, DERATE_FACTOR), max(wanted, MIN_DERATE_FACTOR))
    changed = {
        name: spec.derate(factor[spec.cell.service])
        for name, spec in problem.cells.items()
        if spec.has_times and spec.cell.service in factor
    }
    return problem.with_cells(changed)


def _loads(problem: FormulatedProblem, solution: PoolSolution) -> dict[str, float]:
    """Return the load of each service's fullest cell, relative to the pool's limits."""
    limits = problem.pool.limits
    online = {d.name for d in problem.pool.demands if d.online}
    all_of: defaultdict[str, float] = defaultdict(float)
    online_of: defaultdict[str, float] = defaultdict(float)
    for f in solution.flows:
        load = f.rate / problem.cells[f.cell].cell.capacity[f.demand] / solution.replicas[f.cell]
        all_of[f.cell] += load
        online_of[f.cell] += load if f.demand in online else 0.0
    found: defaultdict[str, float] = defaultdict(float)
    for cell, load in all_of.items():
        share = max(load / limits.max_utilisation, online_of[cell] / max(limits.online_share, 1e-9))
        service = problem.cells[cell].cell.service
        found[service] = max(found[service], share)
    return found


def _affected_services(problem: FormulatedProblem, solution: PoolSolution, miss: SloMiss) -> set[str]:
    """Return the services that affect the missed bound. For example, decode does not affect TTFT."""
    request_paths = (problem.request_paths[name] for name, rate in solution.served.items() if rate > 0)
    services = {
        s
        for request_path in request_paths
        if request_path.request_class.name == miss.demand
        for s in request_path.template.stages
    }
    about = {"ttft": "EP", "tpot": "D", "e2e": "EPDG"}[miss.quantity]
    return {s.name for s in services if set(s.tasks) & set(about)}


def with_hours(decision: PlanDecision) -> Plan:
    """Return the plan with the nodes that each hour needs.

    The plan is not changed if the input has no hourly rates or the objective is not the cost.
    """
    plan, problem, solution = decision.plan, decision.problem, decision.solution
    if problem.pool.objective != "cost" or not any(c.has_hourly_rates for c in problem.classes.values()):
        return plan
    loads = [_load(problem.classes, hour) for hour in range(HOURS)]
    needed = {load: _nodes(problem, solution, dict(load)) for load in dict.fromkeys(loads)}
    prices = {n.name: n.price_per_hour for n in plan.nodes}
    hours = [
        PlannedHour(
            hour=hour,
            nodes=needed[load],
            cost_per_hour=sum(count * prices[name] for name, count in needed[load].items()),
        )
        for hour, load in enumerate(loads)
    ]
    return plan.model_copy(update={"hours": hours})


def _load(classes: Mapping[str, RequestClass], hour: int) -> HourlyLoad:
    return tuple(
        (name, ceil(_LOAD_STEPS * of.share_at(hour) - 1e-9) / _LOAD_STEPS) for name, of in classes.items()
    )


def _nodes(problem: FormulatedProblem, solution: PoolSolution, shares: Mapping[str, float]) -> dict[str, int]:
    """Return the number of needed nodes by node class, or all nodes if the solver finds no smaller plan."""
    every = {name: count for name, count in solution.nodes.items() if count}
    if all(share == 1 for share in shares.values()):
        return every
    if not any(shares.values()):
        return dict.fromkeys(every, 0)
    used = {
        name: _limit_to_active_classes(spec, shares)
        for name, spec in problem.cells.items()
        if solution.replicas.get(name)
    }
    used = {name: spec for name, spec in used.items() if spec.cell.capacity}
    pool = replace(_hourly_pool(problem.pool, solution, shares), cells=tuple(s.cell for s in used.values()))
    pool = replace(pool, current=limit_to_cells(pool.current, used))
    try:
        _, found = with_spare_nodes(
            replace(problem, pool=pool, cells=used),
            lambda _phase, _share: None,
            None,
            similar_solution=solution,
        )
    except (PlanInfeasible, PlanUnfinished):
        return every
    return {name: min(found.nodes.get(name, 0), count) for name, count in every.items()}


def _limit_to_active_classes(spec: CellSpec, shares: Mapping[str, float]) -> CellSpec:
    """Return the cell with capacities only for classes that have requests in this hour."""
    capacity = {name: rate for name, rate in spec.cell.capacity.items() if shares[name]}
    return replace(spec, cell=replace(spec.cell, capacity=capacity))


def _hourly_pool(
    pool: OptimizationProblem, solution: PoolSolution, shares: Mapping[str, float]
) -> OptimizationProblem:
    """Return the pool with only the plan's machines and replicas, and with the rates of this hour."""
    demands = tuple(replace(d, rate=d.rate * shares[d.name]) for d in pool.demands if shares[d.name])
    known = {d.name for d in demands}
    return replace(
        pool,
        nodes=tuple(
            replace(n, stock=solution.nodes[n.name]) for n in pool.nodes if solution.nodes.get(n.name)
        ),
        demands=demands,
        variants=tuple(v for v in pool.variants if v.demand in known and v.levels <= solution.levels),
        levels=tuple(level for level in pool.levels if level.name in solution.levels),
        current=CurrentState(
            replicas={name: n for name, n in solution.replicas.items() if n}, horizon_hours=1.0, max_changes=0
        ),
    )
