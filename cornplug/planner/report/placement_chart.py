"""Chart of the replicas on each GPU, which `report.html.j2` draws."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from cornplug.planner.plan import Plan, PlannedNodes, ReplicaGroup

MOST_NODES = 48
"""Maximum number of nodes that are drawn for a class, because a plan may have hundreds."""
SIDE = 26.0
"""Side of a GPU's square."""
_GAP, _ACROSS = 3.0, 4
_COLOURS = 6


@dataclass(frozen=True)
class GpuPart:
    """Part of one GPU that a replica uses."""

    node: int
    gpu: int
    start: float
    """Position on the GPU at which the part begins, 0 to 1."""
    share: float
    group: str
    replica: int


def parts(plan: Plan, nodes: PlannedNodes) -> list[GpuPart]:
    """Return the parts of GPUs that replicas use on this class of nodes. Replicas that share a GPU have
    consecutive parts."""
    taken: dict[tuple[int, int], float] = defaultdict(float)
    found = []
    for g in plan.groups:
        for replica, place in enumerate(g.placement if g.nodes == nodes.name else []):
            for node, gpu in _gpus(g, nodes.gpus, place[0], place[1]):
                found.append(GpuPart(node, gpu, taken[node, gpu], g.share, g.name, replica))
                taken[node, gpu] += g.share
    return found


def _gpus(g: ReplicaGroup, of_node: int, node: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield (node, GPU) for each GPU of a replica that starts at GPU `first` of `node`. The replica may
    continue on the next node."""
    for n in range(g.ranks):
        more, gpu = divmod(first + n, of_node)
        yield node + more, gpu


@dataclass(frozen=True)
class Square:
    """Rectangle on the page for a part of a GPU."""

    x: float
    y: float
    height: float
    title: str
    colour: int


@dataclass(frozen=True)
class PlacementChart:
    """Chart of the nodes of one class."""

    of: PlannedNodes
    width: float
    height: float
    names: list[tuple[float, float, str]]
    gpus: list[tuple[float, float]]
    squares: list[Square]

    @property
    def not_drawn(self) -> int:
        return max(self.of.count - MOST_NODES, 0)


def chart(plan: Plan, nodes: PlannedNodes) -> PlacementChart:
    """Return the chart of a class of nodes: a box for each node, a square for each GPU, and the parts that
    replicas use."""
    shown = min(nodes.count, MOST_NODES)
    columns = min(nodes.gpus, 4)
    wide, high = columns * (SIDE + _GAP) + 12, ceil(nodes.gpus / columns) * (SIDE + _GAP) + 26

    def corner(node: int, gpu: int) -> tuple[float, float]:
        x = (node % _ACROSS) * wide + 6 + (gpu % columns) * (SIDE + _GAP)
        return x, (node // _ACROSS) * high + 20 + (gpu // columns) * (SIDE + _GAP)

    colours = dict(keys(plan))
    squares = [
        Square(
            corner(part.node, part.gpu)[0],
            corner(part.node, part.gpu)[1] + SIDE * part.start,
            SIDE * part.share,
            f"{part.group}, replica {part.replica}, node {part.node}, GPU {part.gpu}",
            colours[part.group],
        )
        for part in parts(plan, nodes)
        if part.node < shown
    ]
    return PlacementChart(
        nodes,
        _ACROSS * wide,
        max(ceil(shown / _ACROSS), 1) * high,
        [(corner(n, 0)[0], corner(n, 0)[1] - 5, f"{nodes.name} {n}") for n in range(shown)],
        [corner(n, gpu) for n in range(shown) for gpu in range(nodes.gpus)],
        squares,
    )


def keys(plan: Plan) -> list[tuple[str, int]]:
    """Return each group with the number of its colour, for the legend."""
    return [(g.name, n % _COLOURS) for n, g in enumerate(plan.groups)]
