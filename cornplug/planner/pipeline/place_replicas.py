"""Replicas to GPUs of nodes. Exact, because footprints divide each other.

Footprints are 1/4, 1/2, 1, 2, 4 or 8 GPUs of a node with 1, 2, 4 or 8, or whole nodes. For sizes
of which each divides the next larger one, first-fit-decreasing wastes nothing (Coffman, Garey,
Johnson 1987, "Bin packing with divisible item sizes"), so every solution that the pool
model admits (sum of footprints <= GPUs of all nodes) can be placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

Slot = tuple[int, int]
"""Node's number in its class, first GPU."""


def place(footprints: Mapping[str, tuple[float, int]], gpus: int, nodes: int) -> dict[str, list[Slot]]:
    """Give each replica its node and first GPU.

    `footprints`: group -> (GPUs of one replica, replicas). A replica of several nodes has the
    first one's slot, and the nodes after it. ValueError: more than `nodes` nodes of `gpus` GPUs,
    or a footprint off the chain.
    """
    order = sorted(footprints, key=lambda group: -footprints[group][0])
    free = [Fraction(gpus)] * nodes
    slots: dict[str, list[Slot]] = {group: [] for group in footprints}
    for group in order:
        size, replicas = Fraction(footprints[group][0]), footprints[group][1]
        _check(size, gpus, group)
        for _ in range(replicas):
            slots[group].append(_first_fit(free, size, gpus, group))
    return slots


def _first_fit(free: list[Fraction], size: Fraction, gpus: int, group: str) -> Slot:
    for node in range(len(free)):
        whole_nodes = max(int(size / gpus), 1)
        if size > gpus:
            if _empty(free[node : node + whole_nodes], whole_nodes, gpus):
                free[node : node + whole_nodes] = [Fraction(0)] * whole_nodes
                return node, 0
        elif free[node] >= size:
            first = gpus - free[node]
            free[node] -= size
            return node, int(first)
    raise ValueError(f"{group}: no room for {float(size):g} GPUs on {len(free)} nodes of {gpus}")


def _empty(nodes: Sequence[Fraction], wanted: int, gpus: int) -> bool:
    return len(nodes) == wanted and all(f == gpus for f in nodes)


def _check(size: Fraction, gpus: int, group: str) -> None:
    fits = (Fraction(gpus) / size).denominator == 1 if size <= gpus else (size / gpus).denominator == 1
    if size <= 0 or not fits:
        raise ValueError(f"{group}: {float(size):g} GPUs neither divide a node of {gpus} nor fill whole ones")
