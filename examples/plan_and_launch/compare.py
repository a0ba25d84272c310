"""Two plans side by side: their costs and users' latencies.

    python examples/plan_and_launch/compare.py [PLAN.json] [HAND_MADE.json]

Needs no solver and no GPU: a plan's file says it all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cornplug.planner.plan import LatencyForecast, Plan
from cornplug.planner.report.formatting import format_dollars, format_percent, format_seconds

HERE = Path(__file__).parent


def main(argv: Sequence[str]) -> int:
    """Print the comparison; 0."""
    paths = [Path(arg) for arg in argv] or [HERE / "plan" / "plan.json", HERE / "hand-made" / "plan.json"]
    ours, hand_made = (Plan.load(path) for path in paths)
    show(ours, hand_made, Console())
    return 0


def show(ours: Plan, hand_made: Plan, console: Console) -> None:
    """Machines, replicas, percentiles, and the difference in cost."""
    table = Table("", ours.name, hand_made.name)
    table.add_row("cost", format_dollars(ours.cost_per_hour), format_dollars(hand_made.cost_per_hour))
    table.add_row("machines", _machines(ours), _machines(hand_made))
    for part in ("E", "G"):
        table.add_row(_PARTS[part], _replicas(ours, part), _replicas(hand_made, part))
    table.add_row("engines", _engines(ours), _engines(hand_made))
    table.add_section()
    others = {(o.app, o.request): o for o in hand_made.latency_forecasts}
    for forecast in ours.latency_forecasts:
        name = f"{forecast.app}/{forecast.request}, P95"
        table.add_row(name, _times(forecast), _times(others[forecast.app, forecast.request]))
    console.print(table)
    saved = hand_made.cost_per_hour - ours.cost_per_hour
    console.print(
        f"{ours.name} saves {format_dollars(saved)}, {format_percent(saved / hand_made.cost_per_hour)} of "
        f"{format_dollars(hand_made.cost_per_hour)}, with every bound kept by both.",
        highlight=False,
    )
    if any("roofline" in group.profile for group in (*ours.groups, *hand_made.groups)):
        console.print("Times are estimates from the GPU table, of both: measure them before you buy.")


_PARTS = {"E": "encoder services", "G": "speech servers"}


def _machines(plan: Plan) -> str:
    return "\n".join(f"{n.count} x {n.gpus} {n.gpu}" for n in plan.nodes)


def _replicas(plan: Plan, task: str) -> str:
    """Of groups that do nothing but this."""
    found = [g for g in plan.groups if g.tasks == task]
    return "\n".join(f"{g.replicas} x {g.share:g} {g.gpu}" for g in found) or "-"


def _engines(plan: Plan) -> str:
    found = [g for g in plan.groups if set(g.tasks) & set("PD")]
    weights = {g.name: "bf16" if g.quantisation == "none" else g.quantisation for g in found}
    return "\n".join(f"{g.replicas} x {g.service} on {g.gpu}, {weights[g.name]}" for g in found)


def _times(forecast: LatencyForecast) -> str:
    return f"TTFT {format_seconds(forecast.ttft.p95)}, all {format_seconds(forecast.e2e.p95)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
