"""Small pools for tests: one service that every request needs once, unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer.optimization_problem import (
    Cell,
    MachineClass,
    OptimizationProblem,
    PathVariant,
    PoolLimits,
    RateDemand,
    ServiceDemand,
)

EXACT = SolverOptions(gap=0, time_limit_s=20)
NO_RESERVE = PoolLimits(max_utilisation=1.0, online_share=1.0)
"""Published examples fill their GPUs to the brim."""


def one_service(
    capacity: Mapping[str, Mapping[str, float]],
    prices: Mapping[str, float],
    rates: Mapping[str, float],
    *,
    slices: int | None = None,
    stock: int = 500,
    limits: PoolLimits = NO_RESERVE,
) -> OptimizationProblem:
    """`capacity`: GPU -> demand -> rate. Nodes of one GPU each."""
    return OptimizationProblem(
        nodes=tuple(MachineClass(g, g, 1, price, stock) for g, price in prices.items()),
        cells=tuple(Cell(f"s@{g}", "s", g, 1, 1.0, dict(capacity[g])) for g in prices),
        demands=tuple(RateDemand(u, rate, slices=slices) for u, rate in rates.items()),
        variants=tuple(PathVariant(u, u, "monolith", (ServiceDemand("s", 1.0),)) for u in rates),
        limits=limits,
    )
