"""Load that engines report in their Prometheus metrics, and its division among request classes.

Two snapshots of the metrics define a window. The metrics of vLLM 0.32, SGLang 0.5.23 and `cornplug encoder`
are read from the engines' `/metrics`, from files with their text, or from the response of a Prometheus
server's `/api/v1/query`. Engines do not report metrics by class, so the running plan's routes determine the
classes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cornplug.errors import ConfigError
from cornplug.host import tls_context
from cornplug.planner.plan import Plan

Series = tuple[str, tuple[tuple[str, str], ...]]
"""(name, sorted labels) of a metric's series."""

FINISHED_METRICS: Final = ("vllm:request_success_total", "sglang:num_requests_total")
REJECTED_METRICS: Final = ("vllm:admission_rejections_total",)
PRESENT_METRICS: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
)
WAITING_METRICS: Final = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
PROMPT_METRICS: Final = ("vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram")
OUTPUT_METRICS: Final = ("vllm:request_generation_tokens", "sglang:generation_tokens_histogram")
TTFT_METRICS: Final = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")
TPOT_METRICS: Final = (
    "vllm:request_time_per_output_token_seconds",
    "sglang:request_time_per_output_token_seconds",
)
CACHED_METRICS: Final = (
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_hits_total",
    "sglang:cached_tokens_total",
)
LOOKUP_METRICS: Final = ("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total")
EMBEDDING_METRIC: Final = "cornplug_encoder_answers_total"

_TIMEOUT_S: Final = 10.0
_HISTOGRAM_METRICS: Final = PROMPT_METRICS + OUTPUT_METRICS + TTFT_METRICS + TPOT_METRICS
_HISTOGRAM_SERIES: Final = tuple(f"{name}{end}" for name in _HISTOGRAM_METRICS for end in ("_bucket", "_sum"))
_USED_SERIES: Final = frozenset(
    FINISHED_METRICS
    + REJECTED_METRICS
    + PRESENT_METRICS
    + CACHED_METRICS
    + LOOKUP_METRICS
    + (EMBEDDING_METRIC,)
    + _HISTOGRAM_SERIES
)
ALL_ENGINES: Final = ""
"""Name of the scope that contains all of the plan's engines."""


@dataclass(frozen=True)
class MetricsSnapshot:
    at_s: float
    """Unix time."""
    values: Mapping[Series, float]


@dataclass(frozen=True)
class HistogramCounts:
    """Histogram of a metric's values in one window. `counts[i]` is the number of values in (bounds[i-1],
    bounds[i]]."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float
    """Sum of all values."""

    @property
    def value_count(self) -> float:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.total / self.value_count

    def quantile(self, q: float) -> float:
        """Return a quantile, interpolated linearly within its bucket, as in Prometheus'
        histogram_quantile."""
        left, low = q * self.value_count, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if left <= count and count:
                return low + (bound - low) * left / count if bound != float("inf") else low
            left, low = left - count, bound if bound != float("inf") else low
        return low


@dataclass(frozen=True)
class ObservedWindow:
    """Load between two snapshots of the same engines."""

    seconds: float
    requests: float
    """Number of requests that arrived: finished requests, rejected requests, and the increase in the number
    of requests in the engines."""
    waiting: float
    """Number of requests in queues at the end of the window."""
    prompt: HistogramCounts | None = None
    """Number of prompt tokens per request, including media tokens, or None if no request was counted."""
    output: HistogramCounts | None = None
    ttft: HistogramCounts | None = None
    tpot: HistogramCounts | None = None
    """Mean seconds per output token of each request."""
    restarted: bool = False
    """Whether an engine's counters were reset, because its process was restarted."""
    cached_share: float | None = None
    """Share of prompt tokens that were cached, or None if no tokens were looked up."""
    embedding_hits: Mapping[str, float] | None = None
    """Share of embeddings that the encoder service did not have to compute, by application."""

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


def read_metrics(source: str) -> MetricsSnapshot:
    """Read a snapshot from an http(s) address or from a file.

    The time of a file's snapshot is the file's modification time. Raises ConfigError if the source cannot be
    read.
    """
    if source.startswith(("http://", "https://")):
        return parse(_get(source), time.time(), source)
    path = Path(source)
    try:
        return parse(path.read_text(encoding="utf-8"), path.stat().st_mtime, source)
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"--metrics {source}", str(e), "Set the URL of an engine's /metrics, or a file with its text."
        ) from e


def parse(body: str, at_s: float, source: str) -> MetricsSnapshot:
    """Return a snapshot with the series in `body` that windows need.

    Raises ConfigError if `body` is not Prometheus text or JSON, or contains none of these series.
    """
    try:
        found = dict(_json(body) if body.lstrip().startswith("{") else _text(body))
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(
            f"--metrics {source}",
            f"is neither Prometheus text nor JSON ({e})",
            "Set the URL of an engine's /metrics.",
        ) from e
    if not found:
        raise ConfigError(
            f"--metrics {source}",
            "has no metric of vLLM 0.32, SGLang 0.5.23 or `cornplug encoder`",
            "Use the /metrics of one of them. SGLang exports metrics only with --enable-metrics.",
        )
    return MetricsSnapshot(at_s, found)


def window_between(before: MetricsSnapshot, after: MetricsSnapshot) -> ObservedWindow:
    """Return the load between two snapshots. Raises ConfigError if the second snapshot is not later."""
    seconds = after.at_s - before.at_s
    if seconds <= 0:
        raise ConfigError(
            "--metrics",
            f"the second snapshot is {-seconds:g} s older than the first snapshot",
            "Set a newer file, or remove the state file.",
        )
    grown = {s: _counter_increase(before.values.get(s, 0.0), v) for s, v in after.values.items()}
    present = _sum(after.values, PRESENT_METRICS) - _sum(before.values, PRESENT_METRICS)
    looked_up = _sum(grown, LOOKUP_METRICS)
    return ObservedWindow(
        seconds=seconds,
        requests=max(_sum(grown, FINISHED_METRICS) + _sum(grown, REJECTED_METRICS) + present, 0.0),
        waiting=_sum(after.values, WAITING_METRICS),
        prompt=_counts(grown, PROMPT_METRICS),
        output=_counts(grown, OUTPUT_METRICS),
        ttft=_counts(grown, TTFT_METRICS),
        tpot=_counts(grown, TPOT_METRICS),
        restarted=any(
            value < before.values.get(series, 0.0)
            for series, value in after.values.items()
            if series[0] in FINISHED_METRICS
        ),
        cached_share=_sum(grown, CACHED_METRICS) / looked_up if looked_up else None,
        embedding_hits=_embedding_hits(grown),
    )


def _get(address: str) -> str:
    try:
        response = httpx.get(address, timeout=_TIMEOUT_S, trust_env=False, verify=tls_context())
        return response.raise_for_status().text
    except httpx.HTTPError as e:
        raise ConfigError(
            f"--metrics {address}",
            str(e) or type(e).__name__,
            "Check that the engine is running, and that this is the URL of its /metrics.",
        ) from e


def _text(body: str) -> Iterator[tuple[Series, float]]:
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            if sample.name in _USED_SERIES:
                yield (sample.name, tuple(sorted(sample.labels.items()))), sample.value


def _json(body: str) -> Iterator[tuple[Series, float]]:
    for row in json.loads(body)["data"]["result"]:
        labels = dict(row["metric"])
        name = labels.pop("__name__")
        if name in _USED_SERIES:
            yield (name, tuple(sorted(labels.items()))), float(row["value"][1])


def _counter_increase(before: float, after: float) -> float:
    """Return the increase of a counter. A counter that decreased was reset when its process was restarted."""
    return after - before if after >= before else after


def _sum(values: Mapping[Series, float], names: Iterable[str]) -> float:
    return sum(value for (name, _), value in values.items() if name in names)


def _counts(grown: Mapping[Series, float], names: tuple[str, ...]) -> HistogramCounts | None:
    """Return the sum of all engines' histograms with these names, or None if nothing was counted.

    The result has the bounds of all histograms' buckets. Cumulative counts are step functions of the bound,
    so they can be added even if the buckets differ.
    """
    stairs: dict[Series, dict[float, float]] = {}
    for (name, labels), value in grown.items():
        if name.removesuffix("_bucket") in names and name.endswith("_bucket"):
            named = dict(labels)
            bound = float(named.pop("le"))
            stairs.setdefault((name, tuple(sorted(named.items()))), {})[bound] = value
    bounds = sorted({b for steps in stairs.values() for b in steps})
    reached = [sum(_cumulative_count(steps, b) for steps in stairs.values()) for b in bounds]
    counts = tuple(max(b - a, 0.0) for a, b in zip([0.0, *reached], reached, strict=False))
    if not sum(counts):
        return None
    return HistogramCounts(tuple(bounds), counts, _sum(grown, {f"{n}_sum" for n in names}))


def _cumulative_count(steps: Mapping[float, float], bound: float) -> float:
    return max((v for b, v in steps.items() if b <= bound), default=0.0)


def _embedding_hits(grown: Mapping[Series, float]) -> Mapping[str, float]:
    computed: dict[str, float] = {}
    total: dict[str, float] = {}
    for (name, labels), value in grown.items():
        if name == EMBEDDING_METRIC:
            named = dict(labels)
            total[named["app"]] = total.get(named["app"], 0.0) + value
            if named["origin"] == "computed":
                computed[named["app"]] = computed.get(named["app"], 0.0) + value
    return {app: 1 - computed.get(app, 0.0) / n for app, n in total.items() if n}


@dataclass(frozen=True)
class ClassShare:
    """Share of one request class in the observed load of a scope."""

    window: ObservedWindow
    rate: float
    """Expected rate of the class in the scope, according to the input."""
    shares: Mapping[str, float]
    """Share of the scope's requests by class, according to the plan's routes."""
    name: str
    """Name of the class."""
    tasks: str
    """Tasks of the scope's engines, for example "P" for the prefill group of a pair. "PD" if the scope is not
    a single group."""

    @property
    def share(self) -> float:
        return self.shares[self.name]

    @property
    def exclusive(self) -> bool:
        """Whether all of the scope's requests belong to this class."""
        return self.share > 1 - 1e-9

    @property
    def counts_outputs(self) -> bool:
        """Whether the scope's engines count each request exactly once, with its complete output."""
        return "D" in self.tasks or self.tasks == "G"

    @property
    def prefills(self) -> bool:
        """Whether the scope's engines prefill.

        Cache hits of an engine that only decodes are not usable, because it counts transferred tokens as
        hits.
        """
        return "P" in self.tasks


def scopes(plan: Plan) -> dict[str, frozenset[str]]:
    """Return the request classes whose load each scope covers.

    A scope is a set of engines with common metrics: all engines, or the engines of an application, a request
    class or a group.
    """
    found: dict[str, frozenset[str]] = {ALL_ENGINES: frozenset()}
    for route in plan.routes:
        name = route.class_name
        for scope in (ALL_ENGINES, route.app, name, *(g for s in route.stages for g in s.groups)):
            found[scope] = found.get(scope, frozenset()) | {name}
    return found


def check_scope(plan: Plan, scope: str) -> None:
    """Raise ConfigError if the plan has no scope with this name, or if the scope's engines count requests
    twice."""
    known = scopes(plan)
    if scope not in known:
        names = ", ".join(name for name in known if name)
        raise ConfigError(f"--metrics {scope}=...", "the plan has no such group or class", f"Known: {names}.")
    if scope in _tasks(plan):
        return
    for route in plan.routes:
        stages = [s.tasks for s in route.stages]
        if route.class_name in known[scope] and any("D" in t and "P" not in t for t in stages):
            groups = ", ".join(g for s in route.stages for g in s.groups)
            raise ConfigError(
                f"--metrics {scope or 'URL'}",
                f"{route.class_name} prefills in one engine and decodes in another. Both count each request",
                f"Set the address of each group, GROUP=URL. The groups are {groups}.",
            )


def class_shares(
    name: str, plan: Plan, rates: Mapping[str, float], windows: Mapping[str, ObservedWindow]
) -> Iterator[ClassShare]:
    """Yield the share of the class `name` in each scope in which it has requests.

    `rates` contains the input's rate of each class, and `windows` the observed load of each scope.
    """
    tasks = _tasks(plan)
    for scope, window in windows.items():
        expected = scope_rates(plan, scope, rates)
        if expected.get(name, 0.0) > 0:
            whole = sum(expected.values())
            parts = {other: rate / whole for other, rate in expected.items()}
            yield ClassShare(window, expected[name], parts, name, tasks.get(scope, "PD"))


def planned_rates(plan: Plan, scope: str) -> dict[str, float]:
    """Return the planned requests per second of each class for a scope's engines."""
    return scope_rates(plan, scope, {o.class_name: o.served for o in plan.latency_forecasts})


def scope_does_task(plan: Plan, scope: str, task: str) -> bool:
    """Return whether a scope's engines do a task ("P" or "D"). A scope with several groups does all tasks."""
    return task in _tasks(plan).get(scope, task)


def sole_group(plan: Plan, scope: str, task: str) -> str | None:
    """Return the group that does a task for all of a scope's requests, or None if several groups or no group
    do the task."""
    if scope in _tasks(plan):
        return scope if scope_does_task(plan, scope, task) else None
    inside = scopes(plan)[scope]
    stages = [stage for r in plan.routes if r.class_name in inside for stage in r.stages]
    found = {group for stage in stages if task in stage.tasks for group in stage.groups}
    return found.pop() if len(found) == 1 else None


def _tasks(plan: Plan) -> dict[str, str]:
    return {g.name: g.tasks for g in plan.groups}


def scope_rates(plan: Plan, scope: str, rates: Mapping[str, float]) -> dict[str, float]:
    """Return the requests per second of each class that a scope would receive if the classes had these
    rates."""
    planned: dict[str, float] = {}
    seen: dict[str, float] = {}
    inside, group = scopes(plan)[scope], scope in _tasks(plan)
    for route in plan.routes:
        name = route.class_name
        planned[name] = planned.get(name, 0.0) + route.rate
        if name in inside:
            weight = max((s.groups.get(scope, 0.0) for s in route.stages), default=0.0) if group else 1.0
            seen[name] = seen.get(name, 0.0) + route.rate * weight
    return {name: rates.get(name, 0.0) * part / planned[name] for name, part in seen.items() if part}
