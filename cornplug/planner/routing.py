"""Which part of each class's requests goes where: the solution's flows, as routes with weights."""

from __future__ import annotations

from collections.abc import Mapping

from cornplug.planner.plan import Route, Stage
from cornplug.planner.pool import Need, Pool, Solution, Variant
from cornplug.planner.problem import Problem

LEAST_PART = 1e-6
"""Of a class's rate: less is the solver's rounding."""


def routes(problem: Problem, solution: Solution, group_of: Mapping[str, str]) -> list[Route]:
    """One for each variant that serves something. `group_of`: cell -> group."""
    cells = {c.name: c for c in problem.pool.cells}
    left = {(f.demand, f.service, f.cell): f.rate for f in solution.flows}
    found = []
    for variant in _served(problem.pool, solution):
        rate = solution.served[variant.name]
        stages = []
        tasks = {s.name: s.tasks for s in problem.ways[variant.name].path.stages}
        for need in variant.needs:
            weights = _take(
                left, variant.demand, need, rate * need.work, {n: c.tier for n, c in cells.items()}
            )
            stages.append(
                Stage(tasks=tasks[need.service], groups={group_of[c]: w for c, w in weights.items()})
            )
        app, request = variant.demand.split("/")
        found.append(Route(app=app, request=request, structure=variant.structure, rate=rate, stages=stages))
    return found


def _served(pool: Pool, solution: Solution) -> list[Variant]:
    """Tightest first: what it leaves, looser ones may use, and never the other way round."""
    rates = {d.name: d.rate for d in pool.demands}
    served = [v for v in pool.variants if solution.served.get(v.name, 0.0) > LEAST_PART * rates[v.demand]]
    return sorted(served, key=lambda v: [n.tier for n in v.needs])


def _take(
    left: dict[tuple[str, str, str], float],
    demand: str,
    need: Need,
    wanted: float,
    tiers: Mapping[str, float],
) -> dict[str, float]:
    """Cell -> share of `wanted`, taken from what the solution sends there."""
    may = {
        key: rate
        for key, rate in left.items()
        if key[:2] == (demand, need.service) and tiers[key[2]] <= need.tier and rate > LEAST_PART * wanted
    }
    total = sum(may.values())
    for key, rate in may.items():
        left[key] -= rate / total * min(wanted, total)
    return {cell: rate / total for (_, _, cell), rate in may.items()}
