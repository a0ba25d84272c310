"""Files for Prometheus: recording rules with a plan's forecasts, and targets with the engines' addresses.

The dashboard `deploy/grafana/plan.json` shows the forecasts next to the engines' own metrics, joined by the
label `cornplug_group`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from cornplug.planner.latency_forecast import LatencyForecast
from cornplug.planner.launch.addresses import ReplicaAddress, sites
from cornplug.planner.plan import Plan, PlanRoute, ReplicaGroup

RULES, TARGETS = "prometheus-rules.yml", "prometheus-targets.json"
GROUP: Final = "cornplug_group"
RATE, SECONDS, BOUND = (
    "cornplug_plan_requests_per_second",
    "cornplug_plan_seconds",
    "cornplug_plan_slo_seconds",
)
LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    RATE: (GROUP,),
    SECONDS: (GROUP, "app", "request", "quantity", "percentile"),
    BOUND: (GROUP, "app", "request", "quantity", "percentile"),
}
"""Label names of each recorded series."""
_PERCENTILES: Final = ("mean", "p50", "p90", "p95", "p99")
Rule = tuple[str, float, dict[str, str]]
"""Series, value and labels of a recording rule."""


def write(plan: Plan, folder: Path) -> None:
    """Write the rules and the targets to the folder. Raises ConfigError as `sites` does."""
    targets = _targets(sites(plan))
    (folder / RULES).write_text(_rules(plan), encoding="utf-8")
    (folder / TARGETS).write_text(targets, encoding="utf-8")


def _targets(placed: Sequence[ReplicaAddress]) -> str:
    """Return the content for `file_sd_configs`: the addresses of all engines that serve /metrics, which are
    rank 0 of each replica."""
    by_group: dict[str, list[str]] = defaultdict(list)
    for site in placed:
        if site.group.engine != "external" and site.rank == 0:
            by_group[site.group.name].append(f"{site.host}:{site.port}")
    found = [{"targets": addresses, "labels": {GROUP: name}} for name, addresses in by_group.items()]
    return json.dumps(found, indent=2) + "\n"


def _rules(plan: Plan) -> str:
    lines = ["groups:", "  - name: cornplug-plan", "    rules:"]
    for series, value, labels in (*_rates(plan), *_times(plan)):
        lines += [f"      - record: {series}", f"        expr: vector({value:.6g})", "        labels:"]
        # Every JSON string is a YAML string.
        lines += [f"          {name}: {json.dumps(text)}" for name, text in labels.items()]
    return "\n".join(lines) + "\n"


def _rates(plan: Plan) -> Iterator[Rule]:
    """Yield the requests per second of each group that generates output, to compare with the counters of its
    engines."""
    rates: dict[str, float] = defaultdict(float)
    for route in plan.routes:
        for group, share in _answering(plan, route):
            rates[group.name] += route.rate * share
    for name, rate in rates.items():
        yield RATE, rate, {GROUP: name}


def _times(plan: Plan) -> Iterator[Rule]:
    """Yield TTFT and TPOT of each request class, for each group whose engines measure them. Engines that only
    decode measure only TPOT.
    """
    forecasts = {(one.app, one.request): one for one in plan.latency_forecasts}
    seen = dict.fromkeys(
        (group.name, "P" in group.tasks, route.app, route.request)
        for route in plan.routes
        for group, _ in _answering(plan, route)
    )
    for name, whole, app, request in seen:
        labels = {GROUP: name, "app": app, "request": request}
        for quantity in ("ttft", "tpot") if whole else ("tpot",):
            yield from _of_class(forecasts[app, request], quantity, {**labels, "quantity": quantity})


def _of_class(forecast: LatencyForecast, quantity: str, labels: dict[str, str]) -> Iterator[Rule]:
    times = forecast.ttft if quantity == "ttft" else forecast.tpot
    for percentile in _PERCENTILES:
        value = times.at(percentile)
        if value is not None:
            yield SECONDS, value, {**labels, "percentile": percentile}
    for of in forecast.bounds:
        if of.quantity == quantity and of.bound is not None and not of.slowdown:
            yield BOUND, of.bound, {**labels, "percentile": of.percentile}


def _answering(plan: Plan, route: PlanRoute) -> Iterator[tuple[ReplicaGroup, float]]:
    """Yield the groups whose engines generate the route's output, each with its share of the route's
    requests."""
    groups = {group.name: group for group in plan.groups}
    for stage in route.stages:
        for name, share in stage.groups.items():
            if "D" in groups[name].tasks and groups[name].engine != "external":
                yield groups[name], share
