"""Sizes and labels of a report's bars and cost curve, which `report.html.j2` draws.

A `kind` is a CSS class in `report.css`, so that the charts follow the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cornplug.planner.plan import CurvePoint, ReplicaGroup
from cornplug.planner.report import formatting
from cornplug.planner.report.slo_checks import SloCheck

_LEFT, _RIGHT, _TOP, _BOTTOM = 84.0, 600.0, 16.0, 200.0
"""Edges of the area with a cost curve's points, in the units of the SVG."""


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


def utilisation(groups: Sequence[ReplicaGroup]) -> list[Bar]:
    """Return a bar with the utilisation of each group. Groups with estimated times have a warning colour."""
    return [
        Bar(
            f"{g.replicas} × {g.name}",
            g.utilisation,
            f"{formatting.percent(g.utilisation)} · {formatting.mark(g.profile)}",
            "warn" if formatting.mark(g.profile) == "ESTIMATE" else "c0",
        )
        for g in groups
    ]


def against_bounds(found: Sequence[SloCheck]) -> list[Bar]:
    """Return a bar for each bound, with the simulated time as a fraction of the bound."""
    return [
        Bar(
            f"{c.demand} {c.name} ≤ {c.bound_text}",
            0.0 if c.simulated is None else c.simulated / c.bound,
            c.simulated_text,
            "c1" if c.kept else "bad",
        )
        for c in found
        if c.bound is not None
    ]


def cost_curve(curve: Sequence[CurvePoint]) -> Curve:
    """Return the curve of dollars per hour over the factor that multiplies all bounds (log scale)."""
    factors = [math.log(p.slo_factor) for p in curve]
    low, span = min(factors), max(max(factors) - min(factors), 1e-9)
    top = ceiling(max((p.cost_per_hour or 0 for p in curve), default=1))

    def height(cost: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * cost / top

    points = [
        Point(
            f"{p.slo_factor:g}",
            "no plan" if p.cost_per_hour is None else formatting.dollars(p.cost_per_hour),
            _LEFT + (_RIGHT - _LEFT) * (factor - low) / span,
            None if p.cost_per_hour is None else height(p.cost_per_hour),
        )
        for p, factor in zip(curve, factors, strict=True)
    ]
    reached = [f"{p.x:.1f} {p.y:.1f}" for p in points if p.y is not None]
    levels = [(height(top * n / 4), formatting.dollars(top * n / 4)) for n in range(5)]
    return Curve(levels, points, "M" + "L".join(reached) if len(reached) > 1 else "")


def ceiling(value: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is not below `value`."""
    if value <= 0:
        return 1.0
    power = float(10 ** math.floor(math.log10(value)))
    return next(n * power for n in (1.0, 2.0, 5.0, 10.0) if n * power >= value * 0.999999)
