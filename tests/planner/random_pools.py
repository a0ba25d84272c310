"""Tiny random pools of every kind that the model knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from cornplug.planner.optimizer.optimization_problem import (
    CacheLevel,
    Cell,
    CurrentState,
    MachineClass,
    OptimizationProblem,
    PathVariant,
    PoolLimits,
    RateDemand,
    ServiceDemand,
)

KINDS = ("cost", "goodput", "max-min", "replan", "spare", "caches", "network", "slices")


def random_pool(seed: int) -> OptimizationProblem:
    """Kinds take turns, so that any run of seeds holds them all."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    nodes = tuple(
        MachineClass(f"n{i}", f"g{i}", int(rng.choice([1, 2])), some(rng, 0.5, 4), int(rng.integers(1, 3)))
        for i in range(2)
    )
    tiers = [0.5] if kind == "spare" else [0.2, 0.5]
    demands = tuple(
        RateDemand(f"a/u{i}", some(rng, 0.3, 1.5), online=bool(rng.random() < 0.7))
        for i in range(int(rng.integers(1, 3)))
    )
    cells = _cells(rng, nodes, demands, tiers)
    return _with(kind, rng, OptimizationProblem(nodes, cells, demands, _variants(rng, demands, tiers)))


def some(rng: np.random.Generator, low: float, high: float) -> float:
    return round(float(rng.uniform(low, high)), 2)


def _cells(
    rng: np.random.Generator,
    nodes: tuple[MachineClass, ...],
    demands: tuple[RateDemand, ...],
    tiers: list[float],
) -> tuple[Cell, ...]:
    # With one tier (spare), cells are one another's multiples: there "one replica more" has one meaning
    even = len(tiers) == 1
    share = {u.name: float(rng.uniform(0.5, 2)) for u in demands}
    cells = []
    for k in range(int(rng.integers(3, 5))):
        node, service = nodes[int(rng.integers(0, 2))], f"s{k % 2}"
        gpus = float(rng.choice([0.5, 1, 2, 4]))
        gpus = min(gpus, 2.0 * node.gpus)
        speed = gpus**0.9 * float(rng.uniform(0.5, 3))
        capacity = {
            u.name: round(speed * (share[u.name] if even else float(rng.uniform(0.5, 2))), 3)
            for u in demands
            if even or k < 2 or rng.random() < 0.8
        }
        tier = tiers[0] if k < 2 else float(rng.choice(tiers))
        cells.append(Cell(f"c{k}", service, node.name, gpus, tier, capacity))
    return tuple(cells)


def _variants(
    rng: np.random.Generator, demands: tuple[RateDemand, ...], tiers: list[float]
) -> tuple[PathVariant, ...]:
    variants = []
    for u in demands:
        for k in range(int(rng.integers(1, 4))):
            services = ["s0"] if rng.random() < 0.4 else ["s0", "s1"]
            needs = tuple(ServiceDemand(s, float(rng.choice(tiers)), some(rng, 0.3, 1.5)) for s in services)
            network = some(rng, 0, 2)
            variants.append(PathVariant(f"{u.name}#{k}", u.name, "monolith", needs, network=network))
    return tuple(variants)


def _with(kind: str, rng: np.random.Generator, pool: OptimizationProblem) -> OptimizationProblem:
    if kind == "goodput":
        heavy = tuple(replace(u, rate=u.rate * 3, weight=float(rng.integers(1, 4))) for u in pool.demands)
        return replace(pool, objective="goodput", demands=heavy)
    if kind == "max-min":
        return replace(
            pool, objective="max-min", demands=tuple(replace(u, rate=u.rate * 2) for u in pool.demands)
        )
    if kind == "replan":
        return _running(rng, pool)
    if kind == "spare":
        light = tuple(replace(u, rate=u.rate / 2) for u in pool.demands)
        return replace(pool, demands=light, limits=PoolLimits(spare=frozenset({"s0"})))
    if kind == "caches":
        return _cached(rng, pool)
    if kind == "network":
        slow = tuple(replace(n, nic=some(rng, 0.5, 3)) for n in pool.nodes)
        return replace(pool, nodes=slow)
    if kind == "slices":
        return replace(pool, demands=tuple(replace(u, slices=int(rng.integers(1, 4))) for u in pool.demands))
    return pool


def _running(rng: np.random.Generator, pool: OptimizationProblem) -> OptimizationProblem:
    first, second, *others = pool.cells
    twin = replace(second, nodes=first.nodes, gpus=first.gpus, switches_with=(first.name,))
    cells = (replace(first, switches_with=(second.name,)), twin, *others[:1])
    now = {c.name: int(rng.integers(0, 3)) for c in cells}
    running = CurrentState(
        replicas=now,
        below_min_dwell={
            name: int(rng.integers(0, count + 1)) for name, count in now.items() if rng.random() < 0.3
        },
        start_cost={c.name: some(rng, 0.1, 3) for c in cells},
        switch_cost=0.05,
        horizon_hours=1.0,
        max_changes=None if rng.random() < 0.5 else int(rng.integers(0, 4)),
    )
    return replace(pool, cells=cells, current=running)


def _cached(rng: np.random.Generator, pool: OptimizationProblem) -> OptimizationProblem:
    sizes: tuple[tuple[str, Literal[0, 1, 2]], ...] = (("none", 0), ("half", 1), ("full", 2))
    levels = tuple(CacheLevel(name, "embeddings", float(size)) for name, size in sizes)
    variants = tuple(
        replace(
            v,
            name=f"{v.name}@{name}",
            levels=frozenset({name}),
            needs=tuple(replace(n, work=n.work * (1 - 0.4 * size)) for n in v.needs),
        )
        for v in pool.variants
        for name, size in sizes
    )
    nodes = tuple(replace(n, dram=some(rng, 0.3, 1.5)) for n in pool.nodes)
    return replace(pool, levels=levels, variants=variants, nodes=nodes)
