"""Adds spare replicas, so that a service survives the loss of one replica or of one node with all its
replicas.

For the loss of a node, the model limits the number of a cell's replicas on each node. Nodes are counted, not
indexed, so the model chooses the limit k (a binary b_jk for each k): x_j <= sum of k s_jk, with s_jk <= z_n
if b_jk = 1 and s_jk = 0 otherwise. Whether the replicas of all services can be placed within these limits is
checked at placement, and a failed placement is excluded as a `CrowdedNode`.
"""

from __future__ import annotations

from typing import Any

from pulp import lpSum

from cornplug.planner.optimizer.optimization_problem import Cell, CrowdedNode
from cornplug.planner.optimizer.variables import PoolModel


def constrain(model: PoolModel) -> None:
    """Add rows for every used cell of the services that must survive a loss.

    The free capacity of cells that can replace the lost replicas must be sufficient for the lost replicas'
    maximum load. After a loss, the share of the capacity for peaks may be used. Capacities are converted to
    lost replicas with the minimum rate over all demands. This is exact if the cells' capacities are multiples
    of one another, and conservative otherwise.
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
        # The row has no effect for a cell that is not used.
        model.add(f"spare[{name}]", lpSum(left) + limit * most * (1 - used) >= limit * needed)
    for name, choices in model.spread.items():
        _spread(model, model.cells[name], choices)
    for i, crowded in enumerate(model.pool.limits.crowded):
        _not_again(model, i, crowded)


def stands_in(model: PoolModel, cell: Cell, lost: Cell) -> float:
    """Return how many replicas of `lost` one replica of `cell` can replace.

    Returns 0 if `cell` cannot do all of the work of `lost`.
    """
    if cell.tier > lost.tier:
        return 0.0
    return min(cell.capacity.get(u, 0.0) / lost.capacity[u] for u in model.online(lost))


def _beside(model: PoolModel, lost: Cell) -> list[tuple[Cell, float]]:
    """Return the cells whose replicas may be lost together with a node of `lost`.

    Each cell has the maximum number of replicas of `lost` to which one of its replicas corresponds.
    """
    found = []
    for cell in model.cells_of[lost.service]:
        common = [u for u in model.online(lost) if u in cell.capacity]
        if cell.name in model.e and cell.nodes == lost.nodes and cell.tier <= lost.tier and common:
            found.append((cell, max(cell.capacity[u] / lost.capacity[u] for u in common)))
    return found


def _spread(model: PoolModel, cell: Cell, choices: list[tuple[int, Any, Any]]) -> None:
    """Limit the number of a cell's replicas on each node to k, for exactly one k."""
    name, z = cell.name, model.z[cell.nodes]
    most = min(model.nodes[cell.nodes].stock, model.most(cell))
    model.add(f"spread[{name}]", model.x[name] <= lpSum(k * s for k, _, s in choices))
    model.add(f"spread[{name},one]", lpSum(b for _, b, _ in choices) == model.e[name])
    model.add(f"spread[{name},nodes]", lpSum(s for _, _, s in choices) <= z)
    for k, b, s in choices:
        model.add(f"spread[{name},{k}]", s <= most * b)


def _not_again(model: PoolModel, i: int, crowded: CrowdedNode) -> None:
    """Exclude the placement of a crowded node.

    The plan must have more nodes of this class than before, or survive the loss of all replicas of that node.
    """
    if crowded.nodes not in model.z:
        return
    more = model.count(f"q_{i}", 1)
    model.add(f"crowded[{i}]", model.z[crowded.nodes] >= (crowded.count + 1) * more)
    for name, replicas in crowded.replicas.items():
        if name in model.spread:
            lost = model.lost(model.cells[name])
            model.add(f"crowded[{i},{name}]", lost >= replicas * (model.e[name] - more))
