"""Chart of the requests that flow through the groups. Request classes are on the left, and each task has a
column.

`report.html.j2` draws the chart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cornplug.planner.plan import Plan, PlanRoute
from cornplug.planner.report import formatting

BOX, HEIGHT = 190.0, 34.0
"""Width and height of a box."""
_GAP, _ROW = 90.0, 44.0
_ORDER = "EPDG"


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


def chart(plan: Plan) -> FlowChart:
    """Return the chart of request classes and groups. The width of a line is proportional to its requests per
    second."""
    boxes = _boxes(plan)
    edges = _edges(plan.routes)
    most = max(edges.values(), default=1.0)
    lines = [
        Line(_path(boxes[a], boxes[b]), 1 + 7 * flow / most, f"{a} → {b}: {formatting.rate(flow)}")
        for (a, b), flow in edges.items()
        if a in boxes and b in boxes
    ]
    width = max((box.x for box in boxes.values()), default=0.0) + BOX + 8
    height = max((box.y for box in boxes.values()), default=0.0) + HEIGHT + 8
    return FlowChart(width, height, list(boxes.values()), lines)


def _classes(routes: Sequence[PlanRoute]) -> dict[str, float]:
    rates: dict[str, float] = defaultdict(float)
    for r in routes:
        rates[f"{r.app}/{r.request}"] += r.rate
    return dict(rates)


def _edges(routes: Sequence[PlanRoute]) -> dict[tuple[str, str], float]:
    """Return the requests per second on each edge (from, to). Edges between two stages are proportional to
    the weights of both stages' groups.
    """
    flows: dict[tuple[str, str], float] = defaultdict(float)
    for route in routes:
        before = {f"{route.app}/{route.request}": 1.0}
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
        name: Box(4.0, 4 + n * _ROW, name, formatting.rate(flow), "c1")
        for n, (name, flow) in enumerate(_classes(plan.routes).items())
    }
    columns = sorted({g.tasks[0] for g in plan.groups}, key=_ORDER.find)
    for column, task in enumerate(columns, 1):
        for row, g in enumerate(g for g in plan.groups if g.tasks[0] == task):
            under = f"{g.replicas} × {g.gpu} {formatting.shape(g.parallelism, g.share)}"
            boxes[g.name] = Box(4 + column * (BOX + _GAP), 4 + row * _ROW, g.service, under, "c0")
    return boxes


def _path(a: Box, b: Box) -> str:
    x1, y1, x2, y2 = a.x + BOX, a.y + HEIGHT / 2, b.x, b.y + HEIGHT / 2
    middle = (x1 + x2) / 2
    return f"M{x1:g} {y1:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}"


def legend(routes: Sequence[PlanRoute]) -> Iterator[str]:
    """Yield the chart's routes in words, such as "chat/short: 7.5/s as E+PD"."""
    for r in routes:
        yield f"{r.app}/{r.request}: {formatting.rate(r.rate)} as {r.structure}"
