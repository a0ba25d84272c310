"""HTML page of a plan, from `report.html.j2`. The page loads no external resources and runs no code."""

from __future__ import annotations

from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from cornplug.planner.plan import Plan
from cornplug.planner.report import charts, flow_chart, formatting, placement_chart, slo_checks

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def html(plan: Plan) -> str:
    """Return the HTML page of a plan. All text from the plan is escaped."""
    found = slo_checks.of(plan)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            plan=plan,
            policy=POLICY,
            flows=flow_chart.chart(plan),
            legend=list(flow_chart.legend(plan.routes)),
            checks=[(check, *slo_checks.verdict(check)) for check in found],
            times=charts.against_bounds(found),
            curve=charts.cost_curve(plan.explanation.curve) if plan.explanation.curve else None,
            utilisation=charts.utilisation(plan.groups),
            colours=placement_chart.keys(plan),
            nodes=[placement_chart.chart(plan, nodes) for nodes in plan.nodes if nodes.count],
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
        "dollars": formatting.dollars,
        "seconds": formatting.seconds,
        "percent": formatting.percent,
        "proof": formatting.proof,
        "headline": formatting.headline,
        "job": formatting.job,
        "mark": formatting.mark,
        "replicas": formatting.replicas,
        "paid_gpus": formatting.paid_gpus,
        "day_parts": formatting.day_parts,
        "day_cost": formatting.day_cost,
        "px": _px,
    }
    made.globals |= {
        "shape": formatting.shape,
        "box": (flow_chart.BOX, flow_chart.HEIGHT),
        "side": placement_chart.SIDE,
    }
    return made


def _px(length: float) -> str:
    return f"{length:.2f}".rstrip("0").rstrip(".")
