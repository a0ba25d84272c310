"""Folder to which a plan is written: plan.json, an HTML report, command lines, and files for Prometheus.

A later run replaces only the files that an earlier run wrote. The HTML page loads no external resources and
runs no code. The files for Prometheus are recording rules with the plan's forecasts, and targets with the
engines' addresses. The dashboard `deploy/grafana/plan.json` shows the forecasts next to the engines' own
metrics, joined by the label `cornplug_group`.

A load test of the plan has a trace for each request class, commands that replay the traces, and expected
times. `vllm bench serve` replays each trace with the trace's arrival times, on both vLLM and SGLang. Traces
have the lengths, bursts and prefix hits of the plan's input. Media are replaced by text tokens, so encoders
have no load.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from cornplug.errors import ConfigError
from cornplug.planner.inputs import request_sampling
from cornplug.planner.inputs.request_sampling import RequestClass, SampledRequest, request_classes
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.launch import command_lines
from cornplug.planner.launch.connections import ReplicaAddress, Transfer, replica_addresses
from cornplug.planner.perf_model import simulator
from cornplug.planner.plan import LatencyForecast, Plan, PlannedGroup, PlanRoute
from cornplug.planner.report import charts, formatting

TRACE_SECONDS: Final = 120.0
"""Duration of a trace in seconds. It is adjusted so that a trace has at least `MIN_REQUESTS` and at most
`MAX_REQUESTS` requests."""
MIN_REQUESTS: Final = 200
MAX_REQUESTS: Final = 5000
"""Maximum number of requests in one trace."""
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


@dataclass(frozen=True)
class LoadTest:
    """Load test that sends the requests of one class to one address."""

    demand: str
    file: str
    trace: str
    """JSON lines with the arrival time, lengths and hash ids of each request."""
    command: str
    expected: str
    """Rate, number of requests and expected times, in words."""


def load_tests(plan_input: PlanInput, plan: Plan, *, transfer: Transfer = "nixl") -> list[LoadTest]:
    """Return a load test for each request class and each of the class's addresses in routes.json. Classes
    without the address of a language model have no load test.

    Raises ConfigError if the plan has no placement.
    """
    routes = json.loads(command_lines.files(plan, transfer=transfer)["routes.json"])
    classes = request_classes(plan_input.applications)
    return [
        _load_test(plan_input, plan, classes[name], i, entry["url"], entry["weight"])
        for name, found in routes.items()
        for i, entry in enumerate(found["to"], 1)
    ]


def write_load_tests(tests: Sequence[LoadTest], folder: Path) -> str:
    """Write the traces to the folder, and return a shell script that replays them, with the expected times as
    comments."""
    folder.mkdir(parents=True, exist_ok=True)
    for test in tests:
        (folder / test.file).write_text(test.trace, encoding="utf-8")
    lines = ["# Run all commands together. The plan's times are for all classes at once."]
    for test in tests:
        lines += [
            "",
            f"# {test.demand}: {test.expected}",
            f"{test.command} --dataset-path {command_lines.quote(str(folder / test.file))} &",
        ]
    return "\n".join([*lines, "", "wait"])


def _load_test(
    plan_input: PlanInput, plan: Plan, request_class: RequestClass, number: int, url: str, weight: float
) -> LoadTest:
    forecast = next(f for f in plan.latency_forecasts if f.class_name == request_class.name)
    rate = forecast.served * weight
    n = round(min(max(rate * TRACE_SECONDS, MIN_REQUESTS), MAX_REQUESTS))
    rng = np.random.default_rng([plan_input.rules.seed, number])
    hits = request_sampling.HitRates({}, forecast.prefix_hit_rate)
    requests = request_sampling.sample_requests(
        request_class.request, rng, n, patches_per_token={}, hits=hits
    )
    at_s = simulator.arrival_times(rate, request_class.request.burst, n, rng).tolist()
    return LoadTest(
        request_class.name,
        f"{request_class.app.name}-{request_class.request.name}-{number}.jsonl",
        "".join(json.dumps(line) + "\n" for line in _lines(requests, at_s)),
        " ".join(map(command_lines.quote, _argv(_served_model(plan, request_class), url, n))),
        f"{formatting.format_rate(rate)}, {n} requests; {_expected(plan, request_class.name)}",
    )


def _lines(requests: Sequence[SampledRequest], at_s: Sequence[float]) -> Iterator[dict[str, object]]:
    """Yield the lines of a trace. Requests that hit the prefix cache begin with the same hash ids. Every
    other hash id occurs only once.
    """
    unused = 1_000_000
    for request, at in zip(requests, at_s, strict=True):
        shared = request.cached_tokens // command_lines.TRACE_CHUNK_TOKENS
        new = -(-request.prompt_tokens // command_lines.TRACE_CHUNK_TOKENS) - shared
        yield {
            "at_s": round(at, 4),
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
            "hash_ids": [*range(shared), *range(unused, unused + new)],
        }
        unused += new


def _argv(model: str, url: str, requests: int) -> list[str]:
    return [
        *("vllm", "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", url, "--model", model, "--num-prompts", str(requests), "--ignore-eos"),
        *("--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,90,95,99"),
        *("--dataset-name", "timed_trace", "--self-timed"),
        *("--timed-trace-chunk-hash-size", str(command_lines.TRACE_CHUNK_TOKENS)),
        *("--timed-trace-label-timestamp", "at_s", "--timed-trace-label-hash-ids", "hash_ids"),
        *("--timed-trace-label-input-length", "prompt_tokens"),
        *("--timed-trace-label-output-length", "output_tokens"),
    ]


def _served_model(plan: Plan, request_class: RequestClass) -> str:
    """Return the model's name in the engines to which the class's requests are sent."""
    return next(g.model for g in plan.groups if request_class.app.llm in g.components and "P" in g.tasks)


def _expected(plan: Plan, demand: str) -> str:
    found = []
    for check in formatting.slo_checks(plan):
        if check.demand == demand:
            bound = "" if check.bound is None else f" (bound {check.bound_text})"
            percentile = formatting.format_percentile(check.percentile)
            found.append(f"{percentile} {check.quantity} {check.simulated_text}{bound}")
    return "expect " + ", ".join(found) if found else "times unknown"


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
            command_lines.write(plan, new, transfer=transfer)
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
        "dollars": formatting.format_dollars,
        "seconds": formatting.format_seconds,
        "percent": formatting.format_percent,
        "proof": formatting.describe_proof,
        "headline": formatting.headline,
        "job": formatting.describe_job,
        "mark": formatting.profile_origin,
        "replicas": formatting.format_replicas,
        "paid_gpus": formatting.unneeded_gpu_notes,
        "day_parts": formatting.day_parts,
        "day_cost": formatting.day_cost,
        "px": _px,
    }
    made.globals |= {
        "shape": formatting.format_shape,
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
