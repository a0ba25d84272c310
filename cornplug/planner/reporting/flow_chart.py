"""How requests flow through the groups, as inline SVG: classes at the left, a column for each task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cornplug.planner.plan import Plan, Route
from cornplug.planner.reporting import wording
from cornplug.planner.reporting.charts import svg, words
from cornplug.planner.reporting.markup import Markup, joined, tag, text

_BOX, _GAP, _ROW, _HEIGHT = 190.0, 90.0, 44.0, 34.0
_ORDER = "EPDG"


@dataclass(frozen=True)
class _Place:
    x: float
    y: float
    label: str
    under: str


def draw(plan: Plan) -> Markup:
    """Boxes for request classes and groups; a line's width is its share of the largest flow."""
    places = _places(plan)
    edges = _edges(plan.routes)
    most = max(edges.values(), default=1.0)
    lines = [
        _line(places[a], places[b], flow / most, f"{a} → {b}: {wording.rate(flow)}")
        for (a, b), flow in edges.items()
        if a in places and b in places
    ]
    boxes = [_box(place, "c1" if name in _classes(plan.routes) else "c0") for name, place in places.items()]
    width = max((p.x for p in places.values()), default=0.0) + _BOX + 8
    height = max((p.y for p in places.values()), default=0.0) + _HEIGHT + 8
    return svg(width, height, "Services and flows", [*lines, *boxes])


def _classes(routes: Sequence[Route]) -> dict[str, float]:
    rates: dict[str, float] = defaultdict(float)
    for r in routes:
        rates[f"{r.app}/{r.request}"] += r.rate
    return dict(rates)


def _edges(routes: Sequence[Route]) -> dict[tuple[str, str], float]:
    """(from, to) -> requests a second; between two stages in proportion to both stages' weights."""
    flows: dict[tuple[str, str], float] = defaultdict(float)
    for route in routes:
        before = {f"{route.app}/{route.request}": 1.0}
        for stage in route.stages:
            for a, share in before.items():
                for b, weight in stage.groups.items():
                    flows[a, b] += route.rate * share * weight
            before = stage.groups
    return dict(flows)


def _places(plan: Plan) -> dict[str, _Place]:
    """A column for the classes, then one for each first task in the order of a request's life."""
    places = {
        name: _Place(4.0, 4 + n * _ROW, name, wording.rate(flow))
        for n, (name, flow) in enumerate(_classes(plan.routes).items())
    }
    columns = sorted({g.tasks[0] for g in plan.groups}, key=_ORDER.find)
    for column, task in enumerate(columns, 1):
        for row, g in enumerate(g for g in plan.groups if g.tasks[0] == task):
            under = f"{g.replicas} × {g.gpu} {wording.shape(g.tp, g.pp, g.share)}"
            places[g.name] = _Place(4 + column * (_BOX + _GAP), 4 + row * _ROW, g.service, under)
    return places


def _box(place: _Place, kind: str) -> Markup:
    return joined(
        [
            tag(
                "rect",
                x=place.x,
                y=place.y,
                width=_BOX,
                height=_HEIGHT,
                rx=5.0,
                class_=f"box {kind}",
            ),
            words(place.x + 9, place.y + 14, place.label[:28]),
            words(place.x + 9, place.y + 28, place.under, "soft"),
        ]
    )


def _line(a: _Place, b: _Place, width: float, said: str) -> Markup:
    x1, y1, x2, y2 = a.x + _BOX, a.y + _HEIGHT / 2, b.x, b.y + _HEIGHT / 2
    middle = (x1 + x2) / 2
    path = f"M{x1:g} {y1:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}"
    return tag("path", tag("title", text(said)), d=path, class_="flow", stroke_width=1 + 7 * width)


def legend(routes: Sequence[Route]) -> Iterator[str]:
    """The same in words: "chat/short: 7.5/s as E+PD"."""
    for r in routes:
        yield f"{r.app}/{r.request}: {wording.rate(r.rate)} as {r.structure}"
