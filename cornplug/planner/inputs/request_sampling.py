"""Request classes, which are the demands on the pool, and samples of their requests.

Requests are sampled from the length distributions or the trace of a class. A length is a number, a log-normal
distribution or a histogram. A trace has the arrival times and the numbers of prompt and output tokens of
recorded requests, in one of the formats "azure" (Azure LLM inference traces 2023 and 2024, CSV), "mooncake"
(Mooncake's FAST'25 traces, JSON lines) and "csv" (columns at_s, prompt_tokens and output_tokens).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from cornplug.errors import ConfigError
from cornplug.planner.inputs.request_tables import IdleTimes, PercentileBounds
from cornplug.planner.inputs.schema import (
    Application,
    Histogram,
    Length,
    LogNormal,
    RequestMedia,
    RequestSpec,
    Slo,
)

_NORMAL: Final = NormalDist()
TraceFormat = Literal["azure", "mooncake", "csv"]
T = TypeVar("T")
_JSON_LINES_REMEDY: Final = "Mooncake traces contain one JSON object per line."


@dataclass(frozen=True)
class RequestClass:
    """Request class: the requests of an application that one of its `requests` tables describes."""

    app: Application
    request: RequestSpec

    @property
    def name(self) -> str:
        """Name of the demand: "application/request"."""
        return f"{self.app.name}/{self.request.name}"

    @property
    def slo(self) -> Slo:
        """Latency targets of the class. For a job without a bound on the E2E time, the targets include a
        bound for the last responses."""
        slo, job = self.request.slo or self.app.slo, self.request.job
        if job is None or slo.all_bounds("e2e"):
            return slo
        last = PercentileBounds(percentile="p99", e2e_s=job.last_response_s)
        return slo.model_copy(update={"also": [*slo.also, last]})

    @property
    def rate(self) -> float:
        """Requests per second that the plan must carry."""
        return self.request.rate * self.request.peak

    @property
    def has_hourly_rates(self) -> bool:
        """Whether the input has a rate for each hour of the day."""
        return self.request.rate_by_hour is not None

    def share_at(self, hour: int) -> float:
        """Return the rate in an hour of the day as a fraction of `rate`, or 1 if the input has a single rate.

        If an observed rate replaces the input's rate, all hours scale with it.
        """
        hours = self.request.rate_by_hour
        return 1.0 if hours is None else hours[hour] / max(hours)

    @property
    def online(self) -> bool:
        return self.app.workload == "online"


def request_classes(applications: Iterable[Application]) -> dict[str, RequestClass]:
    """Return all request classes by name, in the order of the applications."""
    classes = [RequestClass(app, request) for app in applications for request in app.requests]
    return {c.name: c for c in classes}


class RequestSamples(tuple["SampledRequest", ...]):
    """Sampled requests of a class. The hash is computed only once, because the samples are part of the key
    for cached capacities."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """Sizes of one request, drawn from its class's distributions."""

    prompt_tokens: int
    """Number of all prompt tokens: text, shared prefix and media."""
    cached_tokens: int
    """Number of prompt tokens whose KV is in a cache."""
    patches: tuple[int, ...]
    """Number of patches of each media item that must be encoded. Items whose embedding is cached are
    omitted."""
    output_tokens: int
    """Number of generated tokens. At least 1, because prefill generates the first token."""
    units: float
    """Units of work for a generator, or 0 if the request needs none."""
    idle: IdleTimes | None = None
    """Times of the request if it runs alone on the reference replica, or None if the class's SLO bounds no
    slowdown."""

    @property
    def computed_tokens(self) -> int:
        """Number of prompt tokens that prefill computes. At least 1, because the engines always compute the
        last token."""
        return max(self.prompt_tokens - self.cached_tokens, 1)


@dataclass(frozen=True)
class HitRates:
    """Hit rates of the caches that the samples assume."""

    embedding: Mapping[str, float]
    """Fraction of media items whose embedding is cached, by encoder. 0 for encoders that are missing."""
    prefix: float
    """Fraction of requests whose shared prefix is cached."""


def sample_requests(
    request: RequestSpec,
    rng: np.random.Generator,
    n: int,
    *,
    patches_per_token: Mapping[str, int],
    hits: HitRates,
) -> list[SampledRequest]:
    """Draw `n` requests. The tokens of media items are part of the prompt, whether or not the items'
    embeddings are cached.

    `patches_per_token` is by encoder, with a default of 1. The shared prefix is at the start of the prompt's
    text, so after a hit at most the text's KV is cached. Raises the same errors as `read_trace`.
    """
    text, output = _text_and_output(request, rng, n)
    tokens = text.copy()
    patches: list[list[int]] = [[] for _ in range(n)]
    for media in request.media:
        per_token = patches_per_token.get(media.encoder, 1)
        hit_rate = hits.embedding.get(media.encoder, 0.0)
        owner, item_tokens = _items(media, rng, n)
        np.add.at(tokens, owner, item_tokens)
        missed = rng.random(len(owner)) >= hit_rate
        for i, size in zip(owner[missed].tolist(), (item_tokens[missed] * per_token).tolist(), strict=True):
            patches[i].append(size)
    cached = _sample_cached_tokens(request, rng, text, hits.prefix)
    units = sample_lengths(request.generates.units, rng, n) if request.generates else np.zeros(n)
    return [
        SampledRequest(prompt_tokens, cached_tokens, tuple(items), output_tokens, float(work))
        for prompt_tokens, cached_tokens, items, output_tokens, work in zip(
            tokens.tolist(), cached.tolist(), patches, output.tolist(), units.tolist(), strict=True
        )
    ]


def _text_and_output(
    request: RequestSpec, rng: np.random.Generator, n: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if request.trace is None:
        return (
            sample_lengths(request.prompt, rng, n),
            np.maximum(sample_lengths(request.output, rng, n), 1),
        )
    trace = read_trace(request.trace, request.trace_format)
    # Use both lengths of the same recorded request, because prompt and output may be correlated.
    rows = rng.integers(len(trace.at_s), size=n)
    return trace.prompt_tokens[rows], trace.output_tokens[rows]


def _items(
    media: RequestMedia, rng: np.random.Generator, n: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw the media items of `n` requests. Returns two arrays with an entry for each item: the index of the
    item's request, and the item's number of tokens."""
    owner = np.repeat(np.arange(n), sample_lengths(media.items, rng, n))
    return owner, sample_lengths(media.tokens, rng, len(owner))


def _sample_cached_tokens(
    request: RequestSpec, rng: np.random.Generator, text: NDArray[np.int64], hit_rate: float
) -> NDArray[np.int64]:
    if request.prefix is None:
        return np.zeros_like(text)
    shared = np.minimum(text, request.prefix.tokens)
    return np.where(rng.random(len(text)) < hit_rate, shared, 0)


def mean_length(length: Length) -> float:
    """Return the mean length. A log-normal is truncated at its `max`, and the rounding of samples is ignored.

    E[X | X <= m] = mean * Phi(z - sigma) / Phi(z), z = (ln m - mu) / sigma.
    """
    if isinstance(length, int):
        return float(length)
    if isinstance(length, Histogram):
        return float(np.average(length.values, weights=length.weights))
    mu, sigma = _log_parameters(length)
    if sigma == 0:
        return length.mean
    z = (math.log(length.max) - mu) / sigma
    return length.mean * _NORMAL.cdf(z - sigma) / _NORMAL.cdf(z)


def length_quantile(length: Length, q: float) -> int:
    """Return the smallest length that a fraction `q` (0 to 1) of all lengths does not exceed."""
    if not 0 <= q <= 1:
        raise ValueError(f"q must be from 0 to 1, not {q}")
    if isinstance(length, int):
        return length
    if isinstance(length, Histogram):
        return _quantile_of(length, q)
    mu, sigma = _log_parameters(length)
    if sigma == 0:
        return _round_length(length.mean)
    below = q * _NORMAL.cdf((math.log(length.max) - mu) / sigma)
    if below <= 0:
        return 1
    return min(_round_length(math.exp(mu + sigma * _NORMAL.inv_cdf(min(below, 1 - 1e-16)))), length.max)


def sample_lengths(length: Length, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
    """Draw `n` lengths. Samples of a log-normal are rounded, and are at least 1."""
    if isinstance(length, int):
        return np.full(n, length, np.int64)
    if isinstance(length, Histogram):
        weights = np.asarray(length.weights)
        chosen: NDArray[np.int64] = rng.choice(np.asarray(length.values), n, p=weights / weights.sum())
        return chosen
    mu, sigma = _log_parameters(length)
    lengths = rng.lognormal(mu, sigma, n)
    # The model checks that `max` is at least `mean`, so each round keeps more than half of the samples.
    while (beyond := lengths > length.max).any():
        lengths[beyond] = rng.lognormal(mu, sigma, int(beyond.sum()))
    tokens: NDArray[np.int64] = np.maximum(np.rint(lengths), 1).astype(np.int64)
    return tokens


def _log_parameters(length: LogNormal) -> tuple[float, float]:
    """Return the mean and the standard deviation of the logarithm of a length."""
    variance = math.log1p(length.cv**2)
    return math.log(length.mean) - variance / 2, math.sqrt(variance)


def _round_length(length: float) -> int:
    return max(round(length), 1)


def _quantile_of(histogram: Histogram, q: float) -> int:
    order = np.argsort(histogram.values)
    shares = np.cumsum(np.asarray(histogram.weights)[order])
    # With q = 1, a rounding error in the sums must not lead to an index after the last value.
    at = min(int(np.searchsorted(shares, q * shares[-1] * (1 - 1e-12))), len(order) - 1)
    return histogram.values[int(order[at])]


@dataclass(frozen=True, eq=False)
class RequestTrace:
    """Recorded requests. Each array has an entry for each request, in order of arrival."""

    at_s: NDArray[np.float64]
    """Seconds since the first request."""
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]


@dataclass(frozen=True)
class _TraceLayout:
    columns: tuple[str, str, str]
    """Names of the columns with the arrival time, the prompt tokens and the output tokens."""
    parse_time: Callable[[Any], float]
    """Converts an arrival time in the file to seconds."""


def _azure_seconds(text: str) -> float:
    return datetime.fromisoformat(text.strip()).timestamp()


_LAYOUTS: Final[Mapping[TraceFormat, _TraceLayout]] = {
    "azure": _TraceLayout(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure_seconds),
    "mooncake": _TraceLayout(("timestamp", "input_length", "output_length"), lambda ms: float(ms) / 1000),
    "csv": _TraceLayout(("at_s", "prompt_tokens", "output_tokens"), float),
}


def read_trace(path: Path, format: TraceFormat) -> RequestTrace:
    """Read the trace in a file. The result is cached until the file changes.

    Raises ConfigError with the file, line and column of an error.
    """
    try:
        stat = path.stat()
    except OSError as e:
        raise ConfigError(str(path), f"cannot read the trace: {e.strerror}", "Correct the path.") from e
    return _read(path, format, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=32)
def _read(path: Path, format: TraceFormat, _changed_ns: int, _size: int) -> RequestTrace:
    layout = _LAYOUTS[format]
    try:
        with path.open(encoding="utf-8-sig", newline="") as f:
            rows = list(_json_rows(f, path) if format == "mooncake" else _csv_rows(f, path, layout))
    except UnicodeDecodeError as e:
        raise ConfigError(
            str(path), "the trace is not a text file", "Decompress it if it is compressed."
        ) from e
    if not rows:
        raise ConfigError(str(path), "the trace has no requests", "Use a file with at least one request.")
    at, prompt, output = zip(*(_parse_request(path, line, row, layout) for line, row in rows), strict=True)
    at_s = np.asarray(at)
    order = np.argsort(at_s, kind="stable")
    return RequestTrace(
        at_s[order] - at_s.min(), np.asarray(prompt, np.int64)[order], np.asarray(output, np.int64)[order]
    )


def _csv_rows(
    file: Iterator[str], path: Path, layout: _TraceLayout
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(file)
    lacking = [name for name in layout.columns if name not in (reader.fieldnames or ())]
    if lacking:
        raise ConfigError(
            f"{path}:1",
            f"no column {', '.join(lacking)}; the first line has {', '.join(reader.fieldnames or ())}",
            f"Make the first line {','.join(layout.columns)}, or set another trace_format.",
        )
    for row in reader:
        yield reader.line_num, row


def _json_rows(file: Iterator[str], path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as e:
            raise ConfigError(f"{path}:{line}", f"invalid JSON: {e.msg}", _JSON_LINES_REMEDY) from e
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{line}", "not a JSON object", _JSON_LINES_REMEDY)
        yield line, row


def _parse_request(
    path: Path, line: int, row: Mapping[str, Any], layout: _TraceLayout
) -> tuple[float, int, int]:
    at, prompt, output = layout.columns
    return (
        _cell(path, line, row, at, layout.parse_time, "a time"),
        _cell(path, line, row, prompt, _tokens, "a number of tokens"),
        # A request without output tokens counts as one token, because engines generate at least one.
        max(_cell(path, line, row, output, _tokens, "a number of tokens"), 1),
    )


def _tokens(value: Any) -> int:
    tokens = int(value)
    if tokens < 0:
        raise ValueError(value)
    return tokens


def _cell(
    path: Path, line: int, row: Mapping[str, Any], column: str, parse: Callable[[Any], T], what: str
) -> T:
    try:
        return parse(row[column])
    except KeyError as e:
        raise ConfigError(f"{path}:{line} {column}", "missing", f"Write {what} in every line.") from e
    except (ValueError, TypeError) as e:
        raise ConfigError(f"{path}:{line} {column}", f"{row[column]!r} is not {what}", "Correct it.") from e
