"""Groups of services that can replace one another. Their least costs bound the whole pool's.

A request may use the monolith, or separate prefill and decode: such services form a group. Constraints that
couple groups (tiers of one demand, cache levels, the network, nodes that several groups share) are left out.
At any GPU price a group's least cost is therefore at most its cost in a plan. The model's own relaxation
splits replicas freely, and its bound is some percent lower.
"""

from __future__ import annotations

from dataclasses import replace

from cornplug.planner.optimizer.optimization_problem import OptimizationProblem, PathVariant


def groups(pool: OptimizationProblem) -> list[frozenset[str]]:
    """Return a partition of the services that variants need."""
    parts: list[frozenset[str]] = []
    for u in pool.demands:
        variants = [[need.service for need in v.needs] for v in pool.variants if v.demand == u.name]
        services = dict.fromkeys(service for variant in variants for service in variant)
        always = [s for s in services if all(s in variant for variant in variants)]
        either = frozenset(services) - frozenset(always)
        for new in [either, *(frozenset({service}) for service in always)]:
            if new:
                touched = [part for part in parts if part & new]
                parts = [part for part in parts if not part & new]
                parts.append(new.union(*touched))
    return parts


def subproblem(pool: OptimizationProblem, services: frozenset[str]) -> OptimizationProblem:
    """Return the pool of one group: its cells, and the demands' work there."""
    variants: dict[tuple[str, object], PathVariant] = {}
    for v in pool.variants:
        needs = tuple(need for need in v.needs if need.service in services)
        variants.setdefault((v.demand, needs), replace(v, needs=needs, levels=frozenset(), network=0.0))
    demands = {u for (u, needs) in variants if needs}
    cells = [c for c in pool.cells if c.service in services]
    return replace(
        pool,
        cells=tuple(
            replace(c, capacity={u: r for u, r in c.capacity.items() if u in demands}) for c in cells
        ),
        demands=tuple(u for u in pool.demands if u.name in demands),
        variants=tuple(v for v in variants.values() if v.demand in demands),
        levels=(),
        objective="cost",
        current=None,
        # A group alone would pay for all nodes over which it is spread.
        limits=replace(pool.limits, by_node=False, crowded=()),
    )
