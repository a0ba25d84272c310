"""Small pools for tests: one service that every request needs once, unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from cornplug.planner.inputs.schema import Solver
from cornplug.planner.optimizer.optimization_problem import Cell, Demand, Limits, Need, Nodes, Pool, Variant

EXACT = Solver(gap=0, time_limit_s=20)
NO_RESERVE = Limits(max_utilisation=1.0, online_share=1.0)
"""Published examples fill their GPUs to the brim."""


def one_service(
    capacity: Mapping[str, Mapping[str, float]],
    prices: Mapping[str, float],
    rates: Mapping[str, float],
    *,
    slices: int | None = None,
    stock: int = 500,
    limits: Limits = NO_RESERVE,
) -> Pool:
    """`capacity`: GPU -> demand -> rate. Nodes of one GPU each."""
    return Pool(
        nodes=tuple(Nodes(g, g, 1, price, stock) for g, price in prices.items()),
        cells=tuple(Cell(f"s@{g}", "s", g, 1, 1.0, dict(capacity[g])) for g in prices),
        demands=tuple(Demand(u, rate, slices=slices) for u, rate in rates.items()),
        variants=tuple(Variant(u, u, "monolith", (Need("s", 1.0),)) for u in rates),
        limits=limits,
    )
