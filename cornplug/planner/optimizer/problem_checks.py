"""Checks of a pool, because a solver would return confusing results for an invalid pool."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite, log2

from cornplug.errors import ConfigError
from cornplug.planner.optimizer.optimization_problem import Cell, MachineClass, OptimizationProblem

SMALLEST_SHARE = 0.125
"""Smallest share of a GPU that a replica may use. GPU counts of replicas are halves of one another or
complete nodes, so that counting nodes is exact."""


def check(pool: OptimizationProblem) -> None:
    """Raise ConfigError if an entry of the pool is invalid. The error names the entry."""
    _once("nodes", (n.name for n in pool.nodes))
    _once("cells", (c.name for c in pool.cells))
    _once("demands", (u.name for u in pool.demands))
    _once("variants", (v.name for v in pool.variants))
    _once("levels", (level.name for level in pool.levels))
    _nodes(pool)
    _cells(pool)
    _demands(pool)
    _variants(pool)
    share = pool.limits.spot_share
    _require(0 <= share <= 1, "limits.spot_share", f"is {share}", "Set a share from 0 to 1.")
    _running(pool)


def _require(holds: bool, field: str, problem: str, remedy: str) -> None:
    if not holds:
        raise ConfigError(field, problem, remedy)


def _once(what: str, names: Iterable[str]) -> None:
    seen = set[str]()
    for name in names:
        _require(
            name not in seen, f"{what}[{name}]", "is defined twice", "Use a different name for each entry."
        )
        seen.add(name)


def _nodes(pool: OptimizationProblem) -> None:
    for node in pool.nodes:
        field = f"nodes[{node.name}]"
        _require(node.gpus >= 1, f"{field}.gpus", f"is {node.gpus}", "Set 1 or more.")
        _require(
            node.price >= 0 and isfinite(node.price),
            f"{field}.price",
            f"is {node.price}",
            "Set dollars per hour, 0 or more.",
        )
        _require(
            node.stock >= 0,
            f"{field}.stock",
            f"is {node.stock}",
            "Set the number of available nodes, 0 or more.",
        )


def _cells(pool: OptimizationProblem) -> None:
    nodes = {n.name: n for n in pool.nodes}
    demands = {u.name for u in pool.demands}
    for cell in pool.cells:
        field = f"cells[{cell.name}]"
        _require(
            cell.nodes in nodes,
            f"{field}.nodes",
            f'"{cell.nodes}" is not a node class',
            "Set the name of a node class.",
        )
        _require(
            packs(cell, nodes[cell.nodes]),
            f"{field}.gpus",
            f"{cell.gpus:g} GPUs do not divide a node of {nodes[cell.nodes].gpus}",
            "Set 1/8, 1/4, 1/2, 1, 2, 4 or 8 up to the node's GPUs, or a multiple of the node's GPUs.",
        )
        for demand, rate in cell.capacity.items():
            where = f"{field}.capacity[{demand}]"
            _require(demand in demands, where, "is not for a known demand", "Use the name of a demand.")
            _require(
                rate > 0 and isfinite(rate),
                where,
                f"is {rate}",
                "Set requests per second above 0, or omit a demand that the cell cannot serve.",
            )
        _require(
            0 <= cell.preference <= 0.03,
            f"{field}.preference",
            f"is {cell.preference}",
            "Set a number from 0 to 0.03.",
        )


def packs(cell: Cell, node: MachineClass) -> bool:
    if cell.gpus > node.gpus:
        return cell.gpus % node.gpus == 0
    return (
        cell.gpus >= SMALLEST_SHARE and log2(cell.gpus).is_integer() and (node.gpus / cell.gpus).is_integer()
    )


def _demands(pool: OptimizationProblem) -> None:
    for u in pool.demands:
        field = f"demands[{u.name}]"
        _require(
            u.rate >= 0 and isfinite(u.rate),
            f"{field}.rate",
            f"is {u.rate}",
            "Set requests per second, 0 or more.",
        )
        _require(u.growth_per_s >= 0, f"{field}.growth_per_s", f"is {u.growth_per_s}", "Set 0 or more.")
        _require(u.weight > 0, f"{field}.weight", f"is {u.weight}", "Set a number above 0.")
        _require(u.slices is None or u.slices >= 1, f"{field}.slices", f"is {u.slices}", "Set 1 or more.")


def _variants(pool: OptimizationProblem) -> None:
    demands = {u.name for u in pool.demands}
    levels = {level.name for level in pool.levels}
    for v in pool.variants:
        field = f"variants[{v.name}]"
        _require(
            v.demand in demands,
            f"{field}.demand",
            f'"{v.demand}" is not a demand',
            "Set the name of a demand.",
        )
        _require(
            v.levels <= levels,
            f"{field}.levels",
            f"{sorted(v.levels - levels)} are not levels",
            "Use the names of levels.",
        )
        for need in v.needs:
            _require(
                need.work >= 0 and isfinite(need.work),
                f"{field}.needs[{need.service}].work",
                f"is {need.work}",
                "Set the number of requests to the service per request, 0 or more.",
            )


def _running(pool: OptimizationProblem) -> None:
    if pool.current is None:
        return
    cells = {c.name for c in pool.cells}
    for name, count in pool.current.replicas.items():
        field = f"current.replicas[{name}]"
        _require(name in cells, field, "is not a cell of the pool", "Keep running cells in the pool.")
        below_min_dwell = pool.current.below_min_dwell.get(name, 0)
        _require(
            0 <= below_min_dwell <= count,
            field,
            f"{below_min_dwell} of {count} are below the minimum dwell",
            "Set at most the number of running replicas.",
        )
