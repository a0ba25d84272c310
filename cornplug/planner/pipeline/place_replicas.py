"""Places replicas on GPUs of nodes. This is exact, because the replicas' footprints divide each other.

A footprint is the number of GPUs of a replica: 1/4, 1/2, 1, 2, 4 or 8 GPUs of a node with 1, 2, 4 or 8 GPUs,
or complete nodes. Each size divides the next larger size. If replicas are placed in decreasing order of size,
there is always a node whose free GPUs are a multiple of the replica's size (Coffman, Garey, Johnson 1987,
"Bin packing with divisible item sizes"). So every solution of the pool model (sum of footprints <= GPUs of
all nodes) can be placed on any nodes with enough free GPUs. A replica is placed on the node with the fewest
replicas of its service, and then with the most free GPUs, so that a service loses few replicas with a node.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction

from cornplug.planner.optimizer.optimization_problem import OptimizationProblem, PoolSolution

Slot = tuple[int, int]
"""(index of the node in its class, first GPU)."""


def placement(pool: OptimizationProblem, solution: PoolSolution) -> dict[str, list[Slot]]:
    slots: dict[str, list[Slot]] = {}
    for nodes in pool.nodes:
        here = [c for c in pool.cells if c.nodes == nodes.name and solution.replicas.get(c.name)]
        footprints = {c.name: (c.gpus, solution.replicas[c.name]) for c in here}
        services = {c.name: c.service for c in here}
        slots |= place(footprints, nodes.gpus, solution.nodes.get(nodes.name, 0), services)
    return slots


def idle_gpus(pool: OptimizationProblem, solution: PoolSolution) -> dict[str, float]:
    """Return the number of GPUs without replicas on the solution's nodes, by node class."""
    idle = {n.name: float(n.gpus * solution.nodes.get(n.name, 0)) for n in pool.nodes}
    for cell in pool.cells:
        idle[cell.nodes] -= cell.gpus * solution.replicas.get(cell.name, 0)
    return idle


def place(
    footprints: Mapping[str, tuple[float, int]],
    gpus: int,
    nodes: int,
    services: Mapping[str, str] | None = None,
) -> dict[str, list[Slot]]:
    """Assign a node and a first GPU to each replica.

    A replica on several nodes gets the slot of its first node.

    Args:
        footprints: group -> (GPUs per replica, number of replicas).
        gpus: number of GPUs per node.
        nodes: number of nodes.
        services: group -> service. By default, each group is a service.

    Raises ValueError if there are too few nodes, or if a footprint does not divide a node.
    """
    order = sorted(footprints, key=lambda group: -footprints[group][0])
    free = [Fraction(gpus)] * nodes
    slots: dict[str, list[Slot]] = {group: [] for group in footprints}
    beside: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for group in order:
        same = beside[(services or {}).get(group, group)]
        size, replicas = Fraction(footprints[group][0]), footprints[group][1]
        _check(size, gpus, group)
        for _ in range(replicas):
            slot = _fit(free, size, gpus, group, same)
            same[slot[0]] += 1
            slots[group].append(slot)
    return slots


def _fit(free: list[Fraction], size: Fraction, gpus: int, group: str, same: Mapping[int, int]) -> Slot:
    """Return a slot for a replica, and remove its GPUs from `free`. `same` counts its service's replicas by
    node.
    """
    if size > gpus:
        whole_nodes = int(size / gpus)
        for node in range(len(free)):
            if _empty(free[node : node + whole_nodes], whole_nodes, gpus):
                free[node : node + whole_nodes] = [Fraction(0)] * whole_nodes
                return node, 0
    elif fitting := [node for node, left in enumerate(free) if left >= size]:
        node = min(fitting, key=lambda node: (same.get(node, 0), -free[node]))
        first = gpus - free[node]
        free[node] -= size
        return node, int(first)
    raise ValueError(
        f"{group}: {float(size):g} GPUs do not fit into the free GPUs of {len(free)} nodes of {gpus}"
    )


def _empty(nodes: Sequence[Fraction], wanted: int, gpus: int) -> bool:
    return len(nodes) == wanted and all(f == gpus for f in nodes)


def _check(size: Fraction, gpus: int, group: str) -> None:
    fits = (Fraction(gpus) / size).denominator == 1 if size <= gpus else (size / gpus).denominator == 1
    if size <= 0 or not fits:
        raise ValueError(f"{group}: {float(size):g} GPUs neither divide a node of {gpus} nor fill whole ones")
