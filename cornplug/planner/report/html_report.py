"""A plan as one HTML page, `report.html.j2`: it loads nothing from elsewhere and runs nothing."""

from __future__ import annotations

from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from cornplug.planner.plan import Plan
from cornplug.planner.reporting import charts, checks, flow_chart, packing_chart, wording

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def html(plan: Plan) -> str:
    """The page. Everything that a plan names is escaped."""
    found = checks.of(plan)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            plan=plan,
            policy=POLICY,
            flows=flow_chart.chart(plan),
            legend=list(flow_chart.legend(plan.routes)),
            checks=[(check, *checks.verdict(check)) for check in found],
            times=charts.against_bounds(found),
            curve=charts.cost_curve(plan.why.curve) if plan.why.curve else None,
            utilisation=charts.utilisation(plan.groups),
            colours=packing_chart.keys(plan),
            nodes=[packing_chart.chart(plan, nodes) for nodes in plan.nodes if nodes.count],
        )
    )


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "money": wording.money,
        "seconds": wording.seconds,
        "percent": wording.percent,
        "proof": wording.proof,
        "headline": wording.headline,
        "mark": wording.mark,
        "px": _px,
    }
    made.globals |= {
        "shape": wording.shape,
        "box": (flow_chart.BOX, flow_chart.HEIGHT),
        "side": packing_chart.SIDE,
    }
    return made


def _px(length: float) -> str:
    return f"{length:.2f}".rstrip("0").rstrip(".")
