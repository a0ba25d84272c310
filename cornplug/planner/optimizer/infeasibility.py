"""Explanation of an infeasible problem: the constraint, the allowed and the needed amount, and the remedies.

Limits are relaxed one kind at a time, and the smallest excess over the limit is computed. If the pool is
feasible without one kind of limit, raising this limit is one remedy. Serving fewer requests is always another
remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from pulp import lpSum

from cornplug.errors import PlanInfeasible
from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer.optimization_problem import CapacityShortfall, OptimizationProblem
from cornplug.planner.optimizer.pool_model import PoolModel
from cornplug.planner.optimizer.solution import counted_switches
from cornplug.planner.optimizer.solvers import SolverLimits
from cornplug.planner.optimizer.solvers import solve as run_solver

UNLIMITED_NODES = 10**6
"""Number of nodes in each class if the stock is relaxed."""
WORK_SHARE = 0.25
"""Share of a solve's work for each kind of limit. Because of this limit, the reported excess may be slightly
larger than necessary."""

BuildModel = Callable[[OptimizationProblem], PoolModel]


def refuse_unserved(model: PoolModel, notes: Mapping[str, str]) -> None:
    """Raise PlanInfeasible if no cell can serve a demand, even with unlimited stock.

    `notes` contains reasons by demand.
    """
    lost = _unservable_demands(model)
    if lost:
        demands_of: dict[str, list[str]] = {}
        for u in lost:
            reason = notes.get(u) or "; ".join(map(str, _find_reasons(model.pool, u)))
            demands_of.setdefault(reason, []).append(u)
        raise PlanInfeasible(
            "no plan: " + "; ".join(f"demand[{', '.join(us)}]: {why}" for why, us in demands_of.items())
        )


def summarize_unserved(model: PoolModel) -> str:
    """Return in one line the reason why a demand cannot be served, or "" if a cell can serve each demand."""
    lost = _unservable_demands(model)
    if not lost:
        return ""
    facts = [_find_reasons(model.pool, u)[0].fact for u in lost]
    others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return f"nothing serves {lost[0]}{others}: {facts[0]}"


def _unservable_demands(model: PoolModel) -> list[str]:
    """Return the demands that no cell can serve but that the objective requires to be served."""
    served = {v.demand for v in model.variants}
    lost = [u.name for u in model.pool.demands if u.rate > 0 and u.name not in served]
    left_out = model.pool.objective == "goodput" and len(lost) < len(model.pool.demands)
    return [] if left_out else lost


@dataclass(frozen=True)
class UnservedReason:
    """Reason why no cell of a service can serve a demand, and the remedy."""

    fact: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.fact}. {self.remedy}"


def _find_reasons(pool: OptimizationProblem, demand: str) -> list[UnservedReason]:
    """Return the reasons why none of the demand's variants can be served."""
    variants = [v for v in pool.variants if v.demand == demand]
    if not variants:
        return [UnservedReason("no structure fits its requests", "Allow another structure")]
    reasons = dict.fromkeys(
        reason for v in variants for n in v.needs if (reason := _find_reason(pool, demand, n.service, n.tier))
    )
    return list(reasons)


def _find_reason(pool: OptimizationProblem, demand: str, service: str, tier: float) -> UnservedReason | None:
    cells = [c for c in pool.cells if c.service == service]
    if not cells:
        return UnservedReason(f"{service} does not fit on any GPU of the pool", "Add a larger GPU")
    able = [c for c in cells if demand in c.capacity]
    if not able:
        fact = f"no configuration of {service} meets its SLO"
        return UnservedReason(fact, "Loosen the SLO or add a faster GPU")
    best = min(able, key=lambda c: c.tier)
    if best.tier <= tier:
        return None
    return UnservedReason(
        f"{service} must finish within {tier:g} s, but the fastest, {best.name}, takes {best.tier:g} s",
        "Loosen its SLO or add a faster GPU",
    )


@dataclass(frozen=True)
class Relaxation:
    """Pool without one kind of limit, the excess over this limit, which is minimised, and a function that
    reports the excess."""

    pool: OptimizationProblem
    excess: Callable[[PoolModel], Any]
    report: Callable[[PoolModel], Iterator[CapacityShortfall]]


def explain(pool: OptimizationProblem, settings: SolverOptions, build: BuildModel) -> PlanInfeasible:
    """Return an error that lists alternative changes that would make the pool feasible."""
    found = [
        list(shortfall)
        for relaxation in relaxations(pool)
        if (shortfall := _solve_relaxation(relaxation, settings, build))
    ]
    remedies = " Or: ".join("; ".join(format_shortfall(s) for s in remedy) for remedy in found)
    return PlanInfeasible(
        "no plan: " + (remedies or "several constraints together make every plan infeasible.")
    )


def format_shortfall(shortfall: CapacityShortfall) -> str:
    s = shortfall
    return f"{s.constraint}: {s.allowed:.4g} {s.unit}, {s.needed:.4g} needed. {s.remedy}"


def _solve_relaxation(
    relaxation: Relaxation, settings: SolverOptions, build: BuildModel
) -> list[CapacityShortfall]:
    model = build(relaxation.pool)
    model.problem.setObjective(relaxation.excess(model))
    run = run_solver(
        model.problem, SolverLimits(0.02, settings.time_limit_s, settings.threads, WORK_SHARE * settings.work)
    )
    return list(relaxation.report(model)) if run.status in ("optimal", "feasible") else []


def relaxations(pool: OptimizationProblem) -> Iterator[Relaxation]:
    yield _stock(pool)
    if pool.current is not None and pool.current.max_changes is not None:
        yield _changes(pool)
    if pool.limits.spare:
        yield _spare(pool)
    if any(n.nic < inf for n in pool.nodes):
        yield _network(pool)
    if any(n.dram < inf for n in pool.nodes) and pool.levels:
        yield _memory(pool)
    yield _demand(pool)


def _stock(pool: OptimizationProblem) -> Relaxation:
    limit = {n.name: n.stock for n in pool.nodes}

    def excess(model: PoolModel) -> Any:
        over = {name: model.add_integer(f"over_{i}") for i, name in enumerate(limit)}
        for name, count in over.items():
            model.add(f"over[{name}]", model.z[name] - limit[name] <= count)
        return lpSum((model.nodes[name].price + 1) * count for name, count in over.items())

    def tell(model: PoolModel) -> Iterator[CapacityShortfall]:
        for name, z in model.z.items():
            if (needed := round(z.varValue or 0.0)) > limit[name]:
                yield CapacityShortfall(
                    f"stock[{name}]",
                    limit[name],
                    needed,
                    "nodes",
                    f"Increase the stock of {name} to {needed}.",
                )

    relaxed = tuple(replace(n, stock=UNLIMITED_NODES) for n in pool.nodes)
    return Relaxation(replace(pool, nodes=relaxed), excess, tell)


def _changes(pool: OptimizationProblem) -> Relaxation:
    running = pool.current
    assert running is not None
    allowed = running.max_changes or 0

    def excess(model: PoolModel) -> Any:
        return lpSum(model.a.values()) + lpSum(counted_switches(model, running))

    def tell(model: PoolModel) -> Iterator[CapacityShortfall]:
        needed = round(sum(v.varValue or 0.0 for v in [*model.a.values(), *counted_switches(model, running)]))
        yield CapacityShortfall(
            "change_budget", allowed, needed, "changes", f"Increase max_changes to {needed}."
        )

    return Relaxation(replace(pool, current=replace(running, max_changes=None)), excess, tell)


def _spare(pool: OptimizationProblem) -> Relaxation:
    names = ", ".join(sorted(pool.limits.spare))

    def tell(model: PoolModel) -> Iterator[CapacityShortfall]:
        what, less = ("nodes", "true or false") if pool.limits.by_node else ("replicas", "false")
        remedy = f"Or set rules.n_plus_one = {less}."
        yield CapacityShortfall(f"spare[{names}]", 0, 1, f"{what} that may be lost", remedy)

    relaxed = replace(pool, limits=replace(pool.limits, spare=frozenset()))
    return Relaxation(relaxed, lambda model: lpSum(model.x.values()), tell)


def _network(pool: OptimizationProblem) -> Relaxation:
    share = pool.limits.network_utilisation
    size = {v.name: v.network for v in pool.variants}

    def excess(model: PoolModel) -> Any:
        over = model.add_real("over")
        capacity = lpSum(share * n.nic * model.z[n.name] for n in pool.nodes if n.nic < inf)
        model.add("over[network]", lpSum(size[v] * phi for v, phi in model.phi.items()) - capacity <= over)
        return over

    def tell(model: PoolModel) -> Iterator[CapacityShortfall]:
        needed = sum(size[v] * (phi.varValue or 0.0) for v, phi in model.phi.items())
        capacity = sum(share * n.nic * (model.z[n.name].varValue or 0.0) for n in pool.nodes)
        yield CapacityShortfall(
            "network", capacity, needed, "bytes/s", "Use faster network cards, or fewer separate stages."
        )

    return Relaxation(replace(pool, nodes=tuple(replace(n, nic=inf) for n in pool.nodes)), excess, tell)


def _memory(pool: OptimizationProblem) -> Relaxation:
    size = {level.name: level.bytes for level in pool.levels}

    def excess(model: PoolModel) -> Any:
        return lpSum(size[name] * w for name, w in model.w.items())

    def tell(model: PoolModel) -> Iterator[CapacityShortfall]:
        needed = sum(size[name] * (w.varValue or 0.0) for name, w in model.w.items())
        capacity = sum(n.dram * (model.z[n.name].varValue or 0.0) for n in pool.nodes)
        yield CapacityShortfall(
            "memory[caches]", capacity, needed, "bytes", "Increase dram_gib of the nodes."
        )

    return Relaxation(replace(pool, nodes=tuple(replace(n, dram=inf) for n in pool.nodes)), excess, tell)


def _demand(pool: OptimizationProblem) -> Relaxation:
    def unserved(model: PoolModel) -> Any:
        return lpSum(u.rate for u in pool.demands) - lpSum(model.phi.values())

    def tell(model: PoolModel) -> Iterator[CapacityShortfall]:
        for u in pool.demands:
            served = sum(model.phi[v.name].varValue or 0.0 for v in model.variants if v.demand == u.name)
            if served < u.rate * (1 - 1e-6):
                remedy = f'Lower its rate, or set objective = "goodput" to plan for {served:.4g}.'
                yield CapacityShortfall(f"demand[{u.name}]", served, u.rate, "requests/s served", remedy)

    return Relaxation(replace(pool, objective="goodput"), unserved, tell)
