"""Pictures of a plan's figures as inline SVG: cost against SLO, utilisation, times against their bounds.

Colours are classes of `report.css`, so that the pictures follow the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from cornplug.planner.plan import CurvePoint, Group
from cornplug.planner.reporting import wording
from cornplug.planner.reporting.checks import Check
from cornplug.planner.reporting.markup import Markup, joined, tag, text

_WIDTH = 640.0
_LABELS = 210.0
"""Width of the names at the left of bars."""
_ROW = 24.0
_VALUES = 120.0


def svg(width: float, height: float, label: str, parts: Iterable[Markup]) -> Markup:
    """A picture that shrinks with the page and has a name for who cannot see it."""
    box = f"0 0 {width:g} {height:g}"
    return tag("svg", *parts, width=width, height=height, viewBox=box, role="img", aria_label=label)


def words(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> Markup:
    return tag("text", text(said), x=x, y=y, class_=kind or None, text_anchor=anchor)


def cost_curve(curve: Sequence[CurvePoint]) -> Markup:
    """Dollars an hour over the factor on all bounds (log scale); crosses: no plan."""
    height, left, bottom = 240.0, 64.0, 200.0
    factors = [math.log(p.slo_factor) for p in curve]
    low, span = min(factors), max(max(factors) - min(factors), 1e-9)
    top = ceiling(max((p.cost_per_hour or 0 for p in curve), default=1))

    def x(point: CurvePoint) -> float:
        return left + 20 + (_WIDTH - left - 60) * (math.log(point.slo_factor) - low) / span

    def y(cost: float) -> float:
        return bottom - (bottom - 16) * cost / top

    parts = [_level(left, y(top * n / 4), wording.money(top * n / 4)) for n in range(5)]
    reached = [(x(p), y(p.cost_per_hour)) for p in curve if p.cost_per_hour is not None]
    if len(reached) > 1:
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in reached)
        parts.append(tag("path", d=path, class_="line c0"))
    for p in curve:
        cost = wording.money(p.cost_per_hour) if p.cost_per_hour is not None else "no plan"
        title = tag("title", text(f"bounds × {p.slo_factor:g}: {cost}"))
        parts.append(words(x(p), bottom + 18, f"× {p.slo_factor:g}", "soft", "middle"))
        if p.cost_per_hour is None:
            parts.append(
                tag("text", title, text("✕"), x=x(p), y=bottom - 4, class_="bad", text_anchor="middle")
            )
        else:
            parts.append(tag("circle", title, cx=x(p), cy=y(p.cost_per_hour), r=4.0, class_="dot c0"))
            parts.append(words(x(p), y(p.cost_per_hour) - 9, cost, "", "middle"))
    return svg(_WIDTH, height, "Cost against the SLO", parts)


def utilisation(groups: Sequence[Group]) -> Markup:
    """One bar a group; estimates are hatched by their colour."""
    rows = [
        bar(
            n,
            f"{g.replicas} × {g.name}",
            g.utilisation,
            f"{wording.percent(g.utilisation)} · {wording.mark(g.profile)}",
            "warn" if wording.mark(g.profile) == "ESTIMATE" else "c0",
        )
        for n, g in enumerate(groups)
    ]
    return svg(_WIDTH, _ROW * len(groups) + 8, "Utilisation of each group", [*rows, *_full(len(groups))])


def against_bounds(found: Sequence[Check]) -> Markup:
    """Simulated times as parts of their bound, the bound at 100 %."""
    bounded = [(c, c.bound_s) for c in found if c.bound_s is not None]
    rows = [
        bar(
            n,
            f"{c.demand} {c.quantity} {c.percentile} ≤ {wording.seconds(bound_s)}",
            0.0 if c.simulated_s is None else c.simulated_s / bound_s,
            wording.seconds(c.simulated_s),
            "c1" if c.kept else "bad",
        )
        for n, (c, bound_s) in enumerate(bounded)
    ]
    height = _ROW * len(bounded) + 8
    return svg(_WIDTH, height, "Times against their bounds", [*rows, *_full(len(bounded))])


def bar(row: int, label: str, share: float, value: str, kind: str) -> Markup:
    """A bar of which 1 ends at the line that `_full` draws; longer ones are cut at 115 %."""
    y, length = 4 + row * _ROW, _WIDTH - _LABELS - _VALUES
    width = max(length * min(share, 1.15) / 1.15, 1.0)
    title = tag("title", text(f"{label} {value} ({share:.0%})"))
    return joined(
        [
            words(_LABELS - 10, y + 15, _short(label, 32), "", "end"),
            tag(
                "rect", title, x=_LABELS, y=y + 4, width=width, height=_ROW - 9, rx=2.0, class_=f"fill {kind}"
            ),
            words(_WIDTH - _VALUES + 6, y + 15, value, "soft"),
        ]
    )


def ceiling(value: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `value`."""
    if value <= 0:
        return 1.0
    power = float(10 ** math.floor(math.log10(value)))
    return next(n * power for n in (1.0, 2.0, 5.0, 10.0) if n * power >= value * 0.999999)


def _full(rows: int) -> list[Markup]:
    x = _LABELS + (_WIDTH - _LABELS - _VALUES) / 1.15
    return [tag("line", x1=x, x2=x, y1=2.0, y2=rows * _ROW + 6, class_="limit")] if rows else []


def _level(left: float, y: float, said: str) -> Markup:
    line = tag("line", x1=left, x2=_WIDTH - 10, y1=y, y2=y, class_="grid")
    return joined([line, words(left - 8, y + 4, said, "soft", "end")])


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
