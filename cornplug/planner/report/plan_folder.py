"""Folder to which a plan is written: plan.json, an HTML report, command lines, and files for Prometheus.

A later run replaces only the files that an earlier run wrote. The HTML page loads no external resources and
runs no code. The files for Prometheus are recording rules with the plan's forecasts, and targets with the
engines' addresses. The dashboard `deploy/grafana/plan.json` shows the forecasts next to the engines' own
metrics, joined by the label `cornplug_group`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from cornplug.errors import ConfigError
from cornplug.planner.latency_forecast import LatencyForecast
from cornplug.planner.launch import command_list
from cornplug.planner.launch.addresses import ReplicaAddress, replica_addresses
from cornplug.planner.launch.kv_transfer import Transfer
from cornplug.planner.plan import Plan, PlannedGroup, PlanRoute
from cornplug.planner.report import charts, formatting

MANIFEST_FILE: Final = ".cornplug-plan.json"
"""File that lists the names of the files that a run wrote."""
CONTENT_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
RULES_FILE, TARGETS_FILE = "prometheus-rules.yml", "prometheus-targets.json"
GROUP_LABEL: Final = "cornplug_group"
RATE_SERIES, SECONDS_SERIES, BOUND_SERIES = (
    "cornplug_plan_requests_per_second",
    "cornplug_plan_seconds",
    "cornplug_plan_slo_seconds",
)
SERIES_LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    RATE_SERIES: (GROUP_LABEL,),
    SECONDS_SERIES: (GROUP_LABEL, "app", "request", "quantity", "percentile"),
    BOUND_SERIES: (GROUP_LABEL, "app", "request", "quantity", "percentile"),
}
"""Label names of each recorded series."""
_PERCENTILES: Final = ("mean", "p50", "p90", "p95", "p99")
_Rule = tuple[str, float, dict[str, str]]
"""Series, value and labels of a recording rule."""


def write(plan: Plan, folder: Path, *, transfer: Transfer = "nixl") -> tuple[list[Path], str]:
    """Write plan.json, report.html, commands.txt with its files, and the files for Prometheus.

    Returns the paths of the files, and the reason why commands could not be written, or "" if they were
    written. Raises ConfigError if a file with one of the names exists and was not written by an earlier run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Write to a subfolder first, so that a failure leaves the old plan intact. Then move each file to its
    # path.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as made:
        new = Path(made)
        plan.save(new / "plan.json")
        (new / "report.html").write_text(html_report(plan), encoding="utf-8")
        without = ""
        try:
            command_list.write(plan, new, transfer=transfer)
            write_prometheus_files(plan, new)
        except ConfigError as e:
            without = str(e)
        return _replace(folder, new), without


def _replace(folder: Path, new: Path) -> list[Path]:
    before = _read_manifest(folder)
    names = sorted(path.name for path in new.iterdir())
    for name in names:
        if (folder / name).exists() and name not in before:
            raise ConfigError(
                f"-o {folder}",
                f"{name} already exists and was not written by a plan",
                "Choose another folder.",
            )
    (folder / MANIFEST_FILE).write_text(json.dumps(sorted({*before, *names})) + "\n", encoding="utf-8")
    for name in names:
        os.replace(new / name, folder / name)
    for name in before - set(names):
        (folder / name).unlink(missing_ok=True)
    (folder / MANIFEST_FILE).write_text(json.dumps(names) + "\n", encoding="utf-8")
    return [folder / name for name in names]


def _read_manifest(folder: Path) -> set[str]:
    path = folder / MANIFEST_FILE
    if not path.exists():
        return set()
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"-o {folder}", f"{MANIFEST_FILE} cannot be read ({e})", "Choose another folder."
        ) from e
    # cornplug writes only plain file names. Ignore paths, so that no file outside the folder is deleted.
    return {name for name in names if Path(name).name == name}


def html_report(plan: Plan) -> str:
    """Return the HTML page of a plan. All text from the plan is escaped."""
    found = formatting.slo_checks(plan)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            plan=plan,
            policy=CONTENT_POLICY,
            flows=charts.flow_chart(plan),
            legend=list(charts.flow_legend(plan.routes)),
            checks=[(check, *formatting.verdict(check)) for check in found],
            times=charts.bound_bars(found),
            curve=charts.cost_curve(plan.explanation.curve) if plan.explanation.curve else None,
            utilisation=charts.utilisation(plan.groups),
            colours=charts.group_colours(plan),
            nodes=[charts.placement_chart(plan, nodes) for nodes in plan.nodes if nodes.count],
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
        "mark": formatting.profile_origin,
        "replicas": formatting.replicas,
        "paid_gpus": formatting.unneeded_gpu_notes,
        "day_parts": formatting.day_parts,
        "day_cost": formatting.day_cost,
        "px": _px,
    }
    made.globals |= {
        "shape": formatting.shape,
        "box": (charts.BOX_WIDTH, charts.BOX_HEIGHT),
        "side": charts.GPU_SIDE,
    }
    return made


def _px(length: float) -> str:
    return f"{length:.2f}".rstrip("0").rstrip(".")


def write_prometheus_files(plan: Plan, folder: Path) -> None:
    """Write the recording rules and the targets to the folder.

    Raises ConfigError if the plan's replicas are not placed.
    """
    targets = _targets(replica_addresses(plan))
    (folder / RULES_FILE).write_text(_rules(plan), encoding="utf-8")
    (folder / TARGETS_FILE).write_text(targets, encoding="utf-8")


def _targets(placed: Sequence[ReplicaAddress]) -> str:
    """Return the file for `file_sd_configs` with the addresses of all processes that serve /metrics (rank 0
    of each replica)."""
    by_group: dict[str, list[str]] = defaultdict(list)
    for site in placed:
        if site.group.engine != "external" and site.rank == 0:
            by_group[site.group.name].append(f"{site.host}:{site.port}")
    found = [{"targets": addresses, "labels": {GROUP_LABEL: name}} for name, addresses in by_group.items()]
    return json.dumps(found, indent=2) + "\n"


def _rules(plan: Plan) -> str:
    lines = ["groups:", "  - name: cornplug-plan", "    rules:"]
    for series, value, labels in (*_rates(plan), *_times(plan)):
        lines += [f"      - record: {series}", f"        expr: vector({value:.6g})", "        labels:"]
        # Every JSON string is a YAML string.
        lines += [f"          {name}: {json.dumps(text)}" for name, text in labels.items()]
    return "\n".join(lines) + "\n"


def _rates(plan: Plan) -> Iterator[_Rule]:
    """Yield the requests per second of each group that generates output. A dashboard compares these rates
    with the engines' counters."""
    rates: dict[str, float] = defaultdict(float)
    for route in plan.routes:
        for group, share in _decoding_groups(plan, route):
            rates[group.name] += route.rate * share
    for name, rate in rates.items():
        yield RATE_SERIES, rate, {GROUP_LABEL: name}


def _times(plan: Plan) -> Iterator[_Rule]:
    """Yield TTFT and TPOT of each request class, for each group whose engines measure them. Engines that only
    decode measure only TPOT.
    """
    forecasts = {(one.app, one.request): one for one in plan.latency_forecasts}
    seen = dict.fromkeys(
        (group.name, "P" in group.tasks, route.app, route.request)
        for route in plan.routes
        for group, _ in _decoding_groups(plan, route)
    )
    for name, whole, app, request in seen:
        labels = {GROUP_LABEL: name, "app": app, "request": request}
        for quantity in ("ttft", "tpot") if whole else ("tpot",):
            yield from _class_rules(forecasts[app, request], quantity, {**labels, "quantity": quantity})


def _class_rules(forecast: LatencyForecast, quantity: str, labels: dict[str, str]) -> Iterator[_Rule]:
    times = forecast.ttft if quantity == "ttft" else forecast.tpot
    for percentile in _PERCENTILES:
        value = times.value_at(percentile)
        if value is not None:
            yield SECONDS_SERIES, value, {**labels, "percentile": percentile}
    for of in forecast.bounds:
        if of.quantity == quantity and of.bound is not None and not of.slowdown:
            yield BOUND_SERIES, of.bound, {**labels, "percentile": of.percentile}


def _decoding_groups(plan: Plan, route: PlanRoute) -> Iterator[tuple[PlannedGroup, float]]:
    """Yield the groups whose engines generate the route's output, each with its share of the route's
    requests."""
    groups = {group.name: group for group in plan.groups}
    for stage in route.stages:
        for name, share in stage.groups.items():
            if "D" in groups[name].tasks and groups[name].engine != "external":
                yield groups[name], share
