"""Spare replicas: a service survives the loss of one replica, or of one node with all that it holds.

For a node the model needs to know the most replicas of a cell that any node holds. Nodes are counted, not
indexed, so it chooses that number k (one binary b_jk for each) and has at most k replicas on each node of the
class: x_j <= k z_n, with s_jk <= z_n where b_jk = 1 and 0 elsewhere. Whether the replicas of all services can
be placed so is seen when they are placed; a placement that fails comes back as a `CrowdedNode`.
"""

from __future__ import annotations

from typing import Any

from pulp import lpSum

from cornplug.planner.optimizer.optimization_problem import Cell, CrowdedNode
from cornplug.planner.optimizer.variables import PoolModel


def constrain(model: PoolModel) -> None:
    """Rows for every cell in use of the services that must survive.

    The capacity that online work leaves free on the cells that may stand in, counted in lost
    replicas, is at least the lost ones, filled to the limit: after a loss the part kept for peaks
    may be used.
    The exchange rate is the worst of the classes at hand, so that the row is exact where cells
    are one another's multiples and careful otherwise.
    """
    limit = model.pool.limits.max_utilisation
    for name, used in model.e.items():
        cell = model.cells[name]
        model.add(f"used[{name}]", model.x[name] <= model.most(cell) * used)
        left = [
            rate * (limit * model.x[other.name] - model.load(other, model.online(other)))
            for other in model.cells_of[cell.service]
            if (rate := stands_in(model, other, cell)) > 0
        ]
        if not model.pool.limits.by_node:
            model.add(f"spare[{name}]", lpSum(left) >= limit * used)
            continue
        beside = _beside(model, cell)
        needed = lpSum(worth * model.lost(other) for other, worth in beside)
        most = sum(worth * model.per_node(other) for other, worth in beside)
        # Of a cell that is not used, the row says nothing
        model.add(f"spare[{name}]", lpSum(left) + limit * most * (1 - used) >= limit * needed)
    for name, choices in model.spread.items():
        _spread(model, model.cells[name], choices)
    for i, crowded in enumerate(model.pool.limits.crowded):
        _not_again(model, i, crowded)


def stands_in(model: PoolModel, cell: Cell, lost: Cell) -> float:
    """Replicas of `lost` that one of `cell` is worth; 0: it may not take all of its work."""
    if cell.tier > lost.tier:
        return 0.0
    return min(cell.capacity.get(u, 0.0) / lost.capacity[u] for u in model.online(lost))


def _beside(model: PoolModel, lost: Cell) -> list[tuple[Cell, float]]:
    """Cells whose replicas go with a node of `lost`, for the same free capacity; their most worth in it."""
    found = []
    for cell in model.cells_of[lost.service]:
        common = [u for u in model.online(lost) if u in cell.capacity]
        if cell.name in model.e and cell.nodes == lost.nodes and cell.tier <= lost.tier and common:
            found.append((cell, max(cell.capacity[u] / lost.capacity[u] for u in common)))
    return found


def _spread(model: PoolModel, cell: Cell, choices: list[tuple[int, Any, Any]]) -> None:
    """At most k replicas on each node, for one k."""
    name, z = cell.name, model.z[cell.nodes]
    most = min(model.nodes[cell.nodes].stock, model.most(cell))
    model.add(f"spread[{name}]", model.x[name] <= lpSum(k * s for k, _, s in choices))
    model.add(f"spread[{name},one]", lpSum(b for _, b, _ in choices) == model.e[name])
    model.add(f"spread[{name},nodes]", lpSum(s for _, _, s in choices) <= z)
    for k, b, s in choices:
        model.add(f"spread[{name},{k}]", s <= most * b)


def _not_again(model: PoolModel, i: int, crowded: CrowdedNode) -> None:
    """More nodes than the crowded one's class had, or the loss of all that it held."""
    if crowded.nodes not in model.z:
        return
    more = model.count(f"q_{i}", 1)
    model.add(f"crowded[{i}]", model.z[crowded.nodes] >= (crowded.count + 1) * more)
    for name, replicas in crowded.replicas.items():
        if name in model.spread:
            lost = model.lost(model.cells[name])
            model.add(f"crowded[{i},{name}]", lost >= replicas * (model.e[name] - more))
