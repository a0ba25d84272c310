"""Replacement of assumed values in a plan's input by observed values.

Assumed values are rates, lengths and hit rates. Engines do not report request classes. If several classes use
the same engines, the load is divided among the classes by the running plan's routes. Their rates change by
one factor, and their lengths by another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

from cornplug.planner import observed_load
from cornplug.planner.inputs import request_sampling
from cornplug.planner.inputs.schema import Application, Histogram, Length, LogNormal, RequestSpec
from cornplug.planner.observed_load import ClassShare, HistogramCounts, ObservedWindow
from cornplug.planner.plan import Plan

TOLERANCE: Final = 0.05
"""Relative difference above which a value is changed. The difference must also exceed twice its standard
error."""
LENGTH_TOLERANCE: Final = 0.1
EXPECTED_RATE: Final = "expected rate"


@dataclass(frozen=True)
class FigureDifference:
    """Value of the input that differs from the metrics."""

    demand: str
    what: str
    """"rate", "prompt", "output", "prefix", "embedding", or "expected rate" for a rate that is expected
    soon."""
    planned: float
    observed: float


def update_applications(
    applications: Sequence[Application], plan: Plan, windows: Mapping[str, ObservedWindow]
) -> tuple[list[Application], tuple[FigureDifference, ...]]:
    """Return the applications with observed values, and the values that changed.

    `windows` contains the observed load of each scope. Raises ConfigError if a scope is not in the plan, or
    if the scope's engines count requests twice.
    """
    for scope in windows:
        observed_load.check_scope(plan, scope)
    differences: list[FigureDifference] = []
    known = {f"{a.name}/{r.name}": r for a in applications for r in a.requests}
    rates = {name: r.rate for name, r in known.items()}
    apps = []
    for app in applications:
        requests = []
        for request in app.requests:
            name = f"{app.name}/{request.name}"
            shares = list(observed_load.class_shares(name, plan, rates, windows))
            changes = _changes(app.name, name, known, shares, differences) if shares else {}
            requests.append(request.model_copy(update=changes))
        apps.append(app.model_copy(update={"requests": requests}))
    return apps, tuple(differences)


def observed_rates(
    applications: Sequence[Application], plan: Plan, windows: Mapping[str, ObservedWindow]
) -> dict[str, float]:
    """Return the observed requests per second of the classes whose engines have metrics."""
    known = {f"{a.name}/{r.name}": r for a in applications for r in a.requests}
    rates = {name: r.rate for name, r in known.items()}
    found = {}
    for name, rate in rates.items():
        shares = [s for s in observed_load.class_shares(name, plan, rates, windows) if s.counts_outputs]
        if shares:
            found[name] = rate * _growth(shares)
    return found


def apply_expected_rates(
    applications: Sequence[Application], expected_rates: Mapping[str, float]
) -> tuple[list[Application], tuple[FigureDifference, ...]]:
    """Return the applications with the rates that are expected soon if they are higher, and the changed
    rates."""
    differences, apps = list[FigureDifference](), []
    for app in applications:
        requests = []
        for request in app.requests:
            name = f"{app.name}/{request.name}"
            rate = expected_rates.get(name, 0.0)
            if rate > request.rate * (1 + TOLERANCE):
                differences.append(FigureDifference(name, EXPECTED_RATE, request.rate, rate))
                request = request.model_copy(update={"rate": rate})
            requests.append(request)
        apps.append(app.model_copy(update={"requests": requests}))
    return apps, tuple(differences)


def _growth(shares: Sequence[ClassShare]) -> float:
    """Return the ratio of a class's observed rate to the input's rate."""
    return sum(s.window.rate * s.share for s in shares) / sum(s.rate for s in shares)


def _changes(
    app: str,
    name: str,
    known: Mapping[str, RequestSpec],
    shares: Sequence[ClassShare],
    differences: list[FigureDifference],
) -> dict[str, object]:
    """Return the fields of a request class that differ from the metrics, with their observed values."""
    request = known[name]
    changes: dict[str, object] = {}
    answering = [s for s in shares if s.counts_outputs]
    if answering:
        changes |= _rate(name, request, answering, differences)
        if request.trace is None:
            changes |= _lengths(name, known, answering, differences)
    changes |= _prefix(name, request, [s for s in shares if s.prefills], differences)
    changes |= _media(app, name, request, shares, differences)
    return changes


def _rate(
    name: str, request: RequestSpec, shares: Sequence[ClassShare], differences: list[FigureDifference]
) -> dict[str, object]:
    # The relative standard error of a Poisson-like count is the inverse root of the count.
    number = max(sum(s.window.requests * s.share for s in shares), 1.0)
    rate = request.rate * _growth(shares)
    if rate <= 0 or abs(rate / request.rate - 1) <= max(TOLERANCE, 2 * sqrt(request.burst / number)):
        return {}
    differences.append(FigureDifference(name, "rate", request.rate, rate))
    return {"rate": rate}


def _lengths(
    name: str,
    requests: Mapping[str, RequestSpec],
    shares: Sequence[ClassShare],
    differences: list[FigureDifference],
) -> dict[str, object]:
    """Return the changed lengths of a class.

    If several classes use the same engines, their lengths are scaled by the ratio of the observed to the
    planned joint mean. If only one class uses the engines, it gets the observed histogram.
    """
    changes: dict[str, object] = {}
    for what in ("prompt", "output"):
        seen = [(counts, s) for s in shares if (counts := getattr(s.window, what)) is not None]
        if not seen:
            continue
        number = sum(counts.value_count for counts, _ in seen)
        ratio = sum(counts.total for counts, _ in seen) / sum(
            counts.value_count * part * _tokens(requests[other], what)
            for counts, s in seen
            for other, part in s.shares.items()
        )
        if abs(ratio - 1) <= max(LENGTH_TOLERANCE, 2 / sqrt(number)):
            continue
        request = requests[name]
        planned: Length = getattr(request, what)
        expected = request_sampling.mean_length(planned)
        beside = _tokens(request, what) - expected
        mean = max((expected + beside) * ratio - beside, 1.0)
        differences.append(FigureDifference(name, what, expected, mean))
        exclusive = all(s.exclusive for _, s in seen) and not beside
        changes[what] = _histogram([c for c, _ in seen]) if exclusive else _scaled(planned, mean / expected)
    return changes


def _tokens(request: RequestSpec, what: str) -> float:
    """Return the mean number of tokens as the engine counts them. A prompt includes its media tokens."""
    if what == "output":
        return request_sampling.mean_length(request.output)
    media = sum(
        request_sampling.mean_length(m.items) * request_sampling.mean_length(m.tokens) for m in request.media
    )
    return request_sampling.mean_length(request.prompt) + media


def _histogram(seen: Sequence[HistogramCounts]) -> Histogram:
    """Return a histogram whose values are the centres of the buckets, scaled to the observed mean."""
    weights: dict[float, float] = {}
    for counts in seen:
        low = 0.0
        for bound, count in zip(counts.bounds, counts.counts, strict=True):
            high = bound if bound != float("inf") else 2 * low
            if count:
                weights[(low + high) / 2] = weights.get((low + high) / 2, 0.0) + count
            low = high
    number = sum(weights.values())
    mean = sum(c.total for c in seen) / number
    factor = mean / (sum(v * w for v, w in weights.items()) / number)
    values = {max(round(v * factor), 1): 0.0 for v in weights}
    for v, w in weights.items():
        values[max(round(v * factor), 1)] += w
    return Histogram(values=list(values), weights=list(values.values()))


def _scaled(length: Length, factor: float) -> Length:
    if isinstance(length, int):
        return max(round(length * factor), 1)
    if isinstance(length, LogNormal):
        most = max(length.max, round(length.mean * factor) + 1)
        return length.model_copy(update={"mean": length.mean * factor, "max": most})
    return length.model_copy(update={"values": [max(round(v * factor), 1) for v in length.values]})


def _prefix(
    name: str, request: RequestSpec, shares: Sequence[ClassShare], differences: list[FigureDifference]
) -> dict[str, object]:
    """Return the changed hit rate of a class's prefix, from the cached tokens of its engines.

    Hit rates that are computed from a catalogue are not changed, because they depend on the cache sizes that
    a plan chooses.
    """
    seen = [(s.window.cached_share, s.window.requests) for s in shares if s.window.cached_share is not None]
    if not seen or request.prefix is None or request.prefix.hit_rate is None:
        return {}
    tokens = _tokens(request, "prompt")
    share = sum(c * n for c, n in seen) / max(sum(n for _, n in seen), 1e-9)
    hit = min(share * tokens / min(request.prefix.tokens, tokens), 1.0)
    if abs(hit - request.prefix.hit_rate) <= TOLERANCE:
        return {}
    differences.append(FigureDifference(name, "prefix", request.prefix.hit_rate, hit))
    return {"prefix": request.prefix.model_copy(update={"hit_rate": hit})}


def _media(
    app: str,
    name: str,
    request: RequestSpec,
    shares: Sequence[ClassShare],
    differences: list[FigureDifference],
) -> dict[str, object]:
    hits = [h[app] for s in shares if (h := s.window.embedding_hits) and app in h]
    if not hits:
        return {}
    hit = sum(hits) / len(hits)
    media = []
    for item in request.media:
        if item.hit_rate is None or abs(hit - item.hit_rate) <= TOLERANCE:
            media.append(item)
            continue
        differences.append(FigureDifference(name, "embedding", item.hit_rate, hit))
        media.append(item.model_copy(update={"hit_rate": hit}))
    return {"media": media}
