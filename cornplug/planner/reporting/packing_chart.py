"""Which replica sits on which GPU, as inline SVG: one box a node, one square a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from cornplug.planner.plan import Group, Plan, PlannedNodes
from cornplug.planner.reporting.charts import svg, words
from cornplug.planner.reporting.markup import Markup, joined, tag, text

MOST_NODES = 48
"""Of one class; a plan may have hundreds."""
_SIDE, _GAP, _ACROSS = 26.0, 3.0, 4
_COLOURS = 6


@dataclass(frozen=True)
class Part:
    """What one replica has of one GPU."""

    node: int
    gpu: int
    start: float
    """Where on the GPU it begins, 0 to 1."""
    share: float
    group: str
    replica: int


def parts(plan: Plan, nodes: PlannedNodes) -> list[Part]:
    """Every replica on this class of nodes, GPU by GPU. Parts of one GPU follow one another."""
    taken: dict[tuple[int, int], float] = defaultdict(float)
    found = []
    for g in plan.groups:
        for replica, place in enumerate(g.placement if g.nodes == nodes.name else []):
            for node, gpu in _gpus(g, nodes.gpus, place[0], place[1]):
                found.append(Part(node, gpu, taken[node, gpu], g.share, g.name, replica))
                taken[node, gpu] += g.share
    return found


def _gpus(g: Group, of_node: int, node: int, first: int) -> Iterator[tuple[int, int]]:
    """The replica's GPUs: beyond the node's last one, the next node's."""
    for n in range(g.tp * g.pp):
        more, gpu = divmod(first + n, of_node)
        yield node + more, gpu


def draw(plan: Plan, nodes: PlannedNodes) -> Markup:
    """The nodes of one class."""
    shown = min(nodes.count, MOST_NODES)
    columns = min(nodes.gpus, 4)
    wide, high = columns * (_SIDE + _GAP) + 12, ceil(nodes.gpus / columns) * (_SIDE + _GAP) + 26
    drawn = [_node(n, nodes, columns, wide, high) for n in range(shown)]
    colour = {g.name: n % _COLOURS for n, g in enumerate(plan.groups)}
    for part in parts(plan, nodes):
        if part.node < shown:
            x, y = _corner(part.node, part.gpu, columns, wide, high)
            drawn.append(_part(part, x, y, colour[part.group]))
    rows = ceil(shown / _ACROSS)
    return svg(_ACROSS * wide, max(rows, 1) * high, f"Replicas on {nodes.name}", drawn)


def keys(plan: Plan) -> list[tuple[str, int]]:
    """(group, number of its colour) for the legend."""
    return [(g.name, n % _COLOURS) for n, g in enumerate(plan.groups)]


def _corner(node: int, gpu: int, columns: int, wide: float, high: float) -> tuple[float, float]:
    x = (node % _ACROSS) * wide + 6 + (gpu % columns) * (_SIDE + _GAP)
    y = (node // _ACROSS) * high + 20 + (gpu // columns) * (_SIDE + _GAP)
    return x, y


def _node(n: int, nodes: PlannedNodes, columns: int, wide: float, high: float) -> Markup:
    empty = []
    for gpu in range(nodes.gpus):
        x, y = _corner(n, gpu, columns, wide, high)
        empty.append(tag("rect", x=x, y=y, width=_SIDE, height=_SIDE, rx=3.0, class_="gpu"))
    x, y = _corner(n, 0, columns, wide, high)
    return joined([words(x, y - 5, f"{nodes.name} {n}", "soft"), *empty])


def _part(part: Part, x: float, y: float, colour: int) -> Markup:
    title = tag("title", text(f"{part.group}, replica {part.replica}, node {part.node}, GPU {part.gpu}"))
    return tag(
        "rect",
        title,
        x=x,
        y=y + _SIDE * part.start,
        width=_SIDE,
        height=_SIDE * part.share,
        rx=3.0,
        class_=f"fill edge c{colour}",
    )
