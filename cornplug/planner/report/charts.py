"""Charts of a plan's HTML report, which `report.html.j2` draws: bars, the cost curve, request flows, and
placement.

The fields `kind` are CSS classes in `report.css`, so that the charts follow the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from cornplug.planner.plan import CurvePoint, Plan, PlannedGroup, PlannedNodes, PlanRoute
from cornplug.planner.report import formatting
from cornplug.planner.report.formatting import SloCheck

_LEFT, _RIGHT, _TOP, _BOTTOM = 84.0, 600.0, 16.0, 200.0
"""Edges of the area with a cost curve's points, in the units of the SVG."""
BOX_WIDTH, BOX_HEIGHT = 190.0, 34.0
"""Width and height of a box."""
_COLUMN_GAP, _ROW = 90.0, 44.0
_TASK_ORDER = "EPDG"
MAX_DRAWN_NODES = 48
"""Maximum number of nodes that are drawn for a class, because a plan may have hundreds."""
GPU_SIDE = 26.0
"""Side of a GPU's square."""
_GPU_GAP, _NODES_PER_ROW = 3.0, 4
_COLOURS = 6


@dataclass(frozen=True)
class Bar:
    label: str
    share: float
    """Length of the bar as a fraction of the chart's limit. May exceed 1."""
    value: str
    kind: str


@dataclass(frozen=True)
class Point:
    factor: str
    cost: str
    x: float
    y: float | None
    """Vertical coordinate in the SVG, or None if there is no plan."""


@dataclass(frozen=True)
class Curve:
    levels: list[tuple[float, str]]
    """Vertical coordinate and cost of each horizontal line."""
    points: list[Point]
    path: str
    """SVG path through all points that have a plan, or "" for fewer than two points."""


def utilisation(groups: Sequence[PlannedGroup]) -> list[Bar]:
    """Return a bar with the utilisation of each group. Groups with estimated times have a warning colour."""
    return [
        Bar(
            f"{g.replicas} × {g.name}",
            g.utilisation,
            f"{formatting.format_percent(g.utilisation)} · {formatting.profile_origin(g.profile)}",
            "warn" if formatting.profile_origin(g.profile) == "ESTIMATE" else "c0",
        )
        for g in groups
    ]


def bound_bars(checks: Sequence[SloCheck]) -> list[Bar]:
    """Return a bar for each bound, with the simulated time as a fraction of the bound."""
    return [
        Bar(
            f"{c.demand} {c.name} ≤ {c.bound_text}",
            0.0 if c.simulated is None else c.simulated / c.bound,
            c.simulated_text,
            "c1" if c.is_met else "bad",
        )
        for c in checks
        if c.bound is not None
    ]


def cost_curve(curve: Sequence[CurvePoint]) -> Curve:
    """Return the curve of the cost, in dollars per hour, over the factor that multiplies all bounds."""
    factors = [math.log(p.slo_factor) for p in curve]
    low, span = min(factors), max(max(factors) - min(factors), 1e-9)
    top = ceiling(max((p.cost_per_hour or 0 for p in curve), default=1))

    def height(cost: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * cost / top

    points = [
        Point(
            f"{p.slo_factor:g}",
            "no plan" if p.cost_per_hour is None else formatting.format_dollars(p.cost_per_hour),
            _LEFT + (_RIGHT - _LEFT) * (factor - low) / span,
            None if p.cost_per_hour is None else height(p.cost_per_hour),
        )
        for p, factor in zip(curve, factors, strict=True)
    ]
    reached = [f"{p.x:.1f} {p.y:.1f}" for p in points if p.y is not None]
    levels = [(height(top * n / 4), formatting.format_dollars(top * n / 4)) for n in range(5)]
    return Curve(levels, points, "M" + "L".join(reached) if len(reached) > 1 else "")


def ceiling(value: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is not below `value`."""
    if value <= 0:
        return 1.0
    power = float(10 ** math.floor(math.log10(value)))
    return next(n * power for n in (1.0, 2.0, 5.0, 10.0) if n * power >= value * 0.999999)


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    label: str
    under: str
    kind: str
    """CSS class of the box in `report.css`."""


@dataclass(frozen=True)
class Line:
    path: str
    width: float
    title: str


@dataclass(frozen=True)
class FlowChart:
    width: float
    height: float
    boxes: list[Box]
    lines: list[Line]


def flow_chart(plan: Plan) -> FlowChart:
    """Return the chart of request classes and groups. The width of a line is proportional to its requests per
    second."""
    boxes = _boxes(plan)
    edges = _edges(plan.routes)
    most = max(edges.values(), default=1.0)
    lines = [
        Line(_path(boxes[a], boxes[b]), 1 + 7 * flow / most, f"{a} → {b}: {formatting.format_rate(flow)}")
        for (a, b), flow in edges.items()
        if a in boxes and b in boxes
    ]
    width = max((box.x for box in boxes.values()), default=0.0) + BOX_WIDTH + 8
    height = max((box.y for box in boxes.values()), default=0.0) + BOX_HEIGHT + 8
    return FlowChart(width, height, list(boxes.values()), lines)


def _classes(routes: Sequence[PlanRoute]) -> dict[str, float]:
    rates: dict[str, float] = defaultdict(float)
    for r in routes:
        rates[r.class_name] += r.rate
    return dict(rates)


def _edges(routes: Sequence[PlanRoute]) -> dict[tuple[str, str], float]:
    """Return the requests per second on each edge (from, to). The rate between the groups of two stages is
    proportional to the weights of both groups.
    """
    flows: dict[tuple[str, str], float] = defaultdict(float)
    for route in routes:
        before = {route.class_name: 1.0}
        for stage in route.stages:
            for a, share in before.items():
                for b, weight in stage.groups.items():
                    flows[a, b] += route.rate * share * weight
            before = stage.groups
    return dict(flows)


def _boxes(plan: Plan) -> dict[str, Box]:
    """Return the boxes by name: a column with the classes, then the groups in columns by their first task, in
    the order in which a request needs the tasks.
    """
    boxes = {
        name: Box(4.0, 4 + n * _ROW, name, formatting.format_rate(flow), "c1")
        for n, (name, flow) in enumerate(_classes(plan.routes).items())
    }
    columns = sorted({g.tasks[0] for g in plan.groups}, key=_TASK_ORDER.find)
    for column, task in enumerate(columns, 1):
        for row, g in enumerate(g for g in plan.groups if g.tasks[0] == task):
            under = f"{g.replicas} × {g.gpu} {formatting.format_shape(g.parallelism, g.share)}"
            boxes[g.name] = Box(
                4 + column * (BOX_WIDTH + _COLUMN_GAP), 4 + row * _ROW, g.service, under, "c0"
            )
    return boxes


def _path(a: Box, b: Box) -> str:
    x1, y1, x2, y2 = a.x + BOX_WIDTH, a.y + BOX_HEIGHT / 2, b.x, b.y + BOX_HEIGHT / 2
    middle = (x1 + x2) / 2
    return f"M{x1:g} {y1:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}"


def flow_legend(routes: Sequence[PlanRoute]) -> Iterator[str]:
    """Yield the chart's routes in words, such as "chat/short: 7.5/s as E+PD"."""
    for r in routes:
        yield f"{r.class_name}: {formatting.format_rate(r.rate)} as {r.structure}"


@dataclass(frozen=True)
class GpuShare:
    """Part of one GPU that a replica uses."""

    node: int
    gpu: int
    start: float
    """Position on the GPU at which the part begins, 0 to 1."""
    share: float
    group: str
    replica: int


def gpu_shares(plan: Plan, nodes: PlannedNodes) -> list[GpuShare]:
    """Return the parts of GPUs that replicas use on this class of nodes. Replicas that share a GPU have
    consecutive parts."""
    taken: dict[tuple[int, int], float] = defaultdict(float)
    found = []
    for g in plan.groups:
        for replica, place in enumerate(g.placement if g.nodes == nodes.name else []):
            for node, gpu in _gpus(g, nodes.gpus, place[0], place[1]):
                found.append(GpuShare(node, gpu, taken[node, gpu], g.share, g.name, replica))
                taken[node, gpu] += g.share
    return found


def _gpus(g: PlannedGroup, gpus_per_node: int, node: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield (node, GPU) for each GPU of a replica that starts at GPU `first` of `node`. The replica may
    continue on the next node."""
    for n in range(g.ranks):
        more, gpu = divmod(first + n, gpus_per_node)
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

    node_class: PlannedNodes
    width: float
    height: float
    names: list[tuple[float, float, str]]
    gpus: list[tuple[float, float]]
    squares: list[Square]

    @property
    def omitted_nodes(self) -> int:
        return max(self.node_class.count - MAX_DRAWN_NODES, 0)


def placement_chart(plan: Plan, nodes: PlannedNodes) -> PlacementChart:
    """Return the chart of a class of nodes: a box for each node, a square for each GPU, and the parts that
    replicas use."""
    shown = min(nodes.count, MAX_DRAWN_NODES)
    columns = min(nodes.gpus, 4)
    wide, high = columns * (GPU_SIDE + _GPU_GAP) + 12, ceil(nodes.gpus / columns) * (GPU_SIDE + _GPU_GAP) + 26

    def corner(node: int, gpu: int) -> tuple[float, float]:
        x = (node % _NODES_PER_ROW) * wide + 6 + (gpu % columns) * (GPU_SIDE + _GPU_GAP)
        return x, (node // _NODES_PER_ROW) * high + 20 + (gpu // columns) * (GPU_SIDE + _GPU_GAP)

    colours = dict(group_colours(plan))
    squares = [
        Square(
            corner(part.node, part.gpu)[0],
            corner(part.node, part.gpu)[1] + GPU_SIDE * part.start,
            GPU_SIDE * part.share,
            f"{part.group}, replica {part.replica}, node {part.node}, GPU {part.gpu}",
            colours[part.group],
        )
        for part in gpu_shares(plan, nodes)
        if part.node < shown
    ]
    return PlacementChart(
        nodes,
        _NODES_PER_ROW * wide,
        max(ceil(shown / _NODES_PER_ROW), 1) * high,
        [(corner(n, 0)[0], corner(n, 0)[1] - 5, f"{nodes.name} {n}") for n in range(shown)],
        [corner(n, gpu) for n in range(shown) for gpu in range(nodes.gpus)],
        squares,
    )


def group_colours(plan: Plan) -> list[tuple[str, int]]:
    """Return each group with the number of its colour, for the legend."""
    return [(g.name, n % _COLOURS) for n, g in enumerate(plan.groups)]
