"""Divides a pool into groups of services that can replace one another. Their least costs bound the pool's
cost.

For example, the monolith and the separate prefill and decode services form a group, because a request may use
either. Constraints that couple groups (tiers of one demand, cache levels, the network, nodes that several
groups share) are omitted. At any GPU price, the least cost of a group is therefore at most the group's cost
in a plan. The model's own relaxation splits replicas freely, and its bound is some percent lower.
"""

from __future__ import annotations

from dataclasses import replace

from cornplug.planner.optimizer.optimization_problem import OptimizationProblem, PathVariant


def groups(pool: OptimizationProblem) -> list[frozenset[str]]:
    """Return a partition of the services that the pool's variants need."""
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
    """Return the pool of one group, with the cells of `services` and the demands' work at these services."""
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
        # Omit limits per node, because a group alone would pay for all nodes over which its replicas are
        # spread.
        limits=replace(pool.limits, by_node=False, crowded=()),
    )
