"""Tables for request classes in a plan's input: their load, lengths, media and latency targets.

A latency target is a set of bounds on percentiles of request times, or a job's deadline. `stage_bound`
derives the bounds on one stage from the SLO of a class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isinf
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, JsonValue, ValidationError, model_validator

from cornplug.planner.inputs.field_types import (
    Count,
    Engine,
    InputPath,
    InputTable,
    Length,
    Name,
    NonNegative,
    Positive,
    Quantisation,
    Share,
    field_error,
)

Percentile = Literal["mean", "p50", "p90", "p95", "p99"]
Quantity = Literal["ttft", "tpot", "e2e"]
QUANTITIES: Final[tuple[Quantity, ...]] = ("ttft", "tpot", "e2e")
SEND_SHARE: Final = 0.98
"""Fraction of the time until a job's deadline in which all of its requests are sent."""
Slowdown = Annotated[float, Field(gt=1, strict=True, allow_inf_nan=False)]
_HOURLY_SCHEMA: Final[dict[str, JsonValue]] = {"minItems": 24, "maxItems": 24}
BoundKind = tuple[str, bool]
"""(percentile, whether the bound is a slowdown)."""


@dataclass(frozen=True, slots=True)
class IdleTimes:
    """Times of a request that runs alone on the reference replica, or the means of these times for a request
    class."""

    ttft_s: float
    tpot_s: float
    e2e_s: float

    def time_of(self, quantity: Quantity) -> float:
        """Return the seconds of one of the three times."""
        value: float = getattr(self, f"{quantity}_s")
        return value


@dataclass(frozen=True)
class SloBound:
    percentile: Percentile
    value: float
    """Bound in seconds, or if `relative` as a multiple of the time on the idle reference replica."""
    relative: bool = False

    def seconds(self, idle: IdleTimes | None, quantity: Quantity) -> float:
        """Return the bound in seconds. A relative bound is multiplied by the time in `idle`."""
        return self.value * idle.time_of(quantity) if self.relative and idle is not None else self.value


class PercentileBounds(InputTable):
    """Bounds on an additional percentile."""

    percentile: Percentile = "p95"
    """Percentile (or mean) of the request times that must meet the bounds."""
    ttft_s: Positive | None = None
    """Maximum seconds from arrival to the first token."""
    tpot_s: Positive | None = None
    """Maximum seconds for each further token."""
    e2e_s: Positive | None = None
    """Maximum seconds from arrival to the end of the response."""
    ttft_slowdown: Slowdown | None = None
    """Maximum time to the first token, as a multiple of the time on the `idle` replica without other
    requests."""
    tpot_slowdown: Slowdown | None = None
    """Maximum time for each further token, as a multiple of the time on the `idle` replica."""
    e2e_slowdown: Slowdown | None = None
    """Maximum time of the response, as a multiple of the time on the `idle` replica."""

    def bounds(self, quantity: Quantity) -> list[SloBound]:
        """Return this table's bounds on a time: a bound in seconds, a slowdown, both, or an empty list."""
        seconds, slowdown = getattr(self, f"{quantity}_s"), getattr(self, f"{quantity}_slowdown")
        found = [] if seconds is None else [SloBound(self.percentile, seconds)]
        return found if slowdown is None else [*found, SloBound(self.percentile, slowdown, relative=True)]

    @property
    def has_bounds(self) -> bool:
        return any(self.bounds(quantity) for quantity in QUANTITIES)

    @property
    def has_slowdowns(self) -> bool:
        """Whether the table has a bound that is a slowdown."""
        return any(bound.relative for quantity in QUANTITIES for bound in self.bounds(quantity))

    def scaled(self, factor: float) -> Self:
        """Return a copy with every bound multiplied by `factor`."""
        keys = [f"{quantity}_{unit}" for quantity in QUANTITIES for unit in ("s", "slowdown")]
        bounds = {key: getattr(self, key) for key in keys}
        return self.model_copy(update={k: v * factor for k, v in bounds.items() if v is not None})


class Job(InputTable):
    """Number of requests with a common deadline."""

    requests: Count
    """Number of requests."""
    deadline_hours: Positive
    """Hours from the first request to the last response."""

    @property
    def rate(self) -> float:
        """Requests per second at which all requests are sent within the fraction `SEND_SHARE` of the time
        until the deadline."""
        return self.requests / (SEND_SHARE * 3600 * self.deadline_hours)

    @property
    def last_response_s(self) -> float:
        """Seconds from the time when all requests have been sent until the deadline."""
        return (1 - SEND_SHARE) * 3600 * self.deadline_hours


class IdleReplica(InputTable):
    """Reference replica for slowdowns, which need not be in the pool."""

    gpu: str
    """GPU type."""
    tp: Count = 1
    """Tensor-parallel degree."""
    engine: Engine | None = None
    """Engine, by default the first engine of the LLM."""
    quantisation: Quantisation = "none"
    """Quantisation of the weights."""


class Slo(PercentileBounds):
    """Bounds on percentiles of request times. Each bound is optional, but an online application needs at
    least one bound."""

    also: list[PercentileBounds] = Field(default_factory=list)
    """Bounds on other percentiles: `also = [{ percentile = "p99", ttft_s = 3.0 }]`."""
    idle: IdleReplica | None = None
    """Reference replica for slowdowns: `idle = { gpu = "A100-80", tp = 8 }`."""

    @property
    def tables(self) -> tuple[PercentileBounds, ...]:
        """This table and the tables in `also`. Several tables may have the same percentile if they bound
        different times."""
        return (self, *self.also)

    def all_bounds(self, quantity: Quantity) -> list[SloBound]:
        """Return the bounds on a time in all tables. The plan divides the first bound among a request's
        stages, and the other bounds in the same proportions."""
        return [bound for table in self.tables for bound in table.bounds(quantity)]

    @property
    def has_bounds(self) -> bool:
        return any(self.all_bounds(quantity) for quantity in QUANTITIES)

    @property
    def has_slowdowns(self) -> bool:
        return any(bound.relative for quantity in QUANTITIES for bound in self.all_bounds(quantity))

    def first_bound_s(self, quantity: Quantity, idle: IdleTimes | None = None) -> float | None:
        """Return the first bound on a time in seconds, or None if there is no bound.

        `idle` are the class's mean times on the reference replica, with which slowdowns are converted to
        seconds.
        """
        bounds = [b for b in self.all_bounds(quantity) if idle is not None or not b.relative]
        return bounds[0].seconds(idle, quantity) if bounds else None

    def scaled(self, factor: float) -> Self:
        """Return a copy with every bound multiplied by `factor`."""
        also = [table.scaled(factor) for table in self.also]
        return super().scaled(factor).model_copy(update={"also": also})

    @model_validator(mode="after")
    def _each_bound_once(self) -> Self:
        for i, table in enumerate(self.also):
            if not table.has_bounds:
                remedy = "Add ttft_s, tpot_s or e2e_s to the table, or remove it."
                raise field_error("also", f"table {i + 1} has no bound", remedy)
        for quantity in QUANTITIES:
            seen = [(bound.percentile, bound.relative) for bound in self.all_bounds(quantity)]
            for one in seen:
                if seen.count(one) > 1:
                    problem = f"a second {quantity}_{'slowdown' if one[1] else 's'} for {one[0]}"
                    raise field_error("also", problem, "Remove one of them, or change its percentile.")
        return self

    @model_validator(mode="after")
    def _check_idle_replica(self) -> Self:
        if self.has_slowdowns and self.idle is None:
            remedy = 'Add the reference replica, such as idle = { gpu = "A100-80", tp = 1 }.'
            raise field_error("idle", "missing, but the slowdowns need it", remedy)
        return self


class RequestMedia(InputTable):
    """Media items that an encoder turns into prompt tokens."""

    encoder: Name
    """Component of kind "encoder"."""
    items: Length = 1
    """Media items per request."""
    tokens: Length
    """Prompt tokens per item."""
    hit_rate: Share | None = None
    """Fraction of items with a cached embedding, by default computed from `catalogue` and `zipf`."""
    catalogue: Count | None = None
    """Number of different items from which requests choose. By default, all items are different."""
    zipf: Positive = 0.8
    """Exponent of the Zipf law for the popularity of items."""


class SharedPrefix(InputTable):
    """Tokens at the start of the prompt that other requests share."""

    tokens: Count
    """Length of the prefix."""
    hit_rate: Share | None = None
    """Fraction of requests with a cached prefix, by default computed from `distinct` and `zipf`."""
    distinct: Count = 1
    """Number of different prefixes."""
    zipf: Positive = 0.8
    """Exponent of the Zipf law for the popularity of prefixes."""


class RampGeneration(InputTable):
    """Images or speech generated from the response."""

    generator: Name
    """Component of kind "generator"."""
    units: Length = 1
    """Images or seconds of speech per request."""


class RequestSpec(InputTable):
    """Requests of one kind, which are planned together."""

    name: Name
    """Name of the class, unique in its application."""
    rate: Positive
    """Mean requests per second. A class has either `rate`, `rate_by_hour` or `job`."""
    rate_by_hour: list[NonNegative] | None = Field(default=None, json_schema_extra=_HOURLY_SCHEMA)
    """Mean requests per second in each hour of the day. The plan carries the highest rate."""
    job: Job | None = None
    """Requests with a deadline: `job = { requests = 500000, deadline_hours = 8 }`."""
    peak: Annotated[float, Field(ge=1, strict=True)] = 1.0
    """Planned rate as a multiple of the mean rate."""
    growth_per_minute: NonNegative = 0.0
    """Fraction by which an online rate may grow in a minute. The plan keeps capacity for this growth."""
    burst: Positive = 1.0
    """Squared coefficient of variation of the times between arrivals (Poisson: 1)."""
    prompt: Length = 512
    """Text tokens in the prompt, including the shared prefix."""
    output: Length = 128
    """Tokens in the response."""
    trace: InputPath | None = None
    """File with prompt and output lengths, in place of `prompt` and `output`."""
    trace_format: Literal["azure", "mooncake", "csv"] = "csv"
    """Format of the trace. "csv" has the columns at_s, prompt_tokens, output_tokens."""
    media: list[RequestMedia] = Field(default_factory=list)
    """Images, audio clips or videos in a request."""
    prefix: SharedPrefix | None = None
    """Start of the prompt that other requests share."""
    generates: RampGeneration | None = None
    """Work of a generator after the response."""
    slo: Slo | None = None
    """Latency targets, by default the application's."""
    weight: Positive = 1.0
    """Weight of one request in the goodput."""

    @model_validator(mode="before")
    @classmethod
    def _rate_of_hours(cls, table: Any) -> Any:
        """Set `rate` to the highest rate of all hours. Rates that are not numbers are reported by the
        validation of the field."""
        if not isinstance(table, dict) or table.get("rate_by_hour") is None:
            return table
        hours = table["rate_by_hour"]
        known = isinstance(hours, list) and all(type(rate) in (int, float) for rate in hours)
        if known and len(hours) != _HOURLY_SCHEMA["minItems"]:
            problem = f"{len(hours)} rates for the 24 hours of a day"
            raise field_error("rate_by_hour", problem, "Write 24 rates, starting at midnight.")
        highest = max(hours) if known else 1.0
        if highest == 0:
            raise field_error("rate_by_hour", "the rate of every hour is 0", "Set at least one rate above 0.")
        for other in ("job", "rate"):
            if table.get(other) not in (None, highest):
                raise field_error(
                    other, "rate_by_hour already sets the rate", f"Remove {other} or rate_by_hour."
                )
        return {**table, "rate": highest}

    @model_validator(mode="before")
    @classmethod
    def _rate_of_job(cls, table: Any) -> Any:
        """Set `rate` to the rate of the job. Errors in the job's table are reported by the validation of that
        table."""
        if not isinstance(table, dict) or table.get("job") is None:
            return table
        try:
            rate = Job.model_validate(table["job"]).rate
        except ValidationError:
            rate = 1.0
        if table.get("rate", rate) != rate:
            raise field_error("rate", "the job already sets the rate", "Remove rate.")
        return {**table, "rate": rate}

    @model_validator(mode="after")
    def _check_length_sources(self) -> Self:
        duplicates = sorted({"prompt", "output"} & self.model_fields_set)
        if self.trace is not None and duplicates:
            raise field_error(
                duplicates[0],
                "the trace already sets the lengths",
                f"Remove {' and '.join(duplicates)}, or trace.",
            )
        return self


@dataclass(frozen=True)
class LatencyBound:
    """Bounds on one percentile of a station's times, and in `also` on other percentiles. A bound of None
    means no bound."""

    percentile: str
    """"mean", "p50", "p90", "p95" or "p99"."""
    seconds: float | None = None
    """Bound on the time to the first token if the station prefills, otherwise on the time until a request
    leaves."""
    tpot_s: float | None = None
    """Bound on the time per token if the station decodes."""
    also: tuple[LatencyBound, ...] = ()
    """Bounds on other percentiles. The `also` of these bounds is empty."""
    relative: bool = False
    """Whether `seconds` and `tpot_s` are multiples of the idle TTFT and TPOT of the same request."""

    @property
    def all_bounds(self) -> tuple[LatencyBound, ...]:
        """Bounds on all percentiles. Each item bounds one percentile."""
        return (self, *self.also)

    @property
    def has_bounds(self) -> bool:
        return any(one.seconds is not None or one.tpot_s is not None for one in self.all_bounds)

    @property
    def quantile(self) -> float | None:
        """Percentile as a share, for example 0.95 for "p95". None for the mean."""
        return None if self.percentile == "mean" else int(self.percentile[1:]) / 100

    def statistic_of(self, times: NDArray[np.float64]) -> float:
        """Return the percentile (or the mean) of times, or 0 if `times` is empty."""
        if not times.size:
            return 0.0
        return float(np.mean(times) if self.quantile is None else np.quantile(times, self.quantile))


def stage_bound(slo: Slo, seconds: float, tpot_s: float, idle: IdleTimes | None = None) -> LatencyBound:
    """Return the bounds of a class on a stage in a tier of `seconds` and `tpot_s` (inf means no bound).

    A tier is a pair of bounds, derived from the first bound of each quantity (`Slo.all_bounds`). Bounds at
    other percentiles are proportional. For example, if the SLO has 1 s at P50 and 3 s at P99, a stage with
    0.4 s at P50 has 1.2 s at P99. The simulation of the complete plan verifies these bounds. `idle` contains
    the class's mean latencies on the idle replica if slowdowns are bounded.
    """
    first = dict(_stage_bounds(slo, "ttft", seconds, idle))
    tokens = dict(_stage_bounds(slo, "tpot", tpot_s, idle))
    bounds = [
        LatencyBound(kind[0], first.get(kind), tokens.get(kind), relative=kind[1])
        for kind in dict.fromkeys([*first, *tokens])
    ] or [LatencyBound(slo.percentile)]
    head = bounds[0]
    return LatencyBound(head.percentile, head.seconds, head.tpot_s, tuple(bounds[1:]), head.relative)


def _stage_bounds(
    slo: Slo, quantity: Quantity, value: float, idle: IdleTimes | None
) -> Iterator[tuple[BoundKind, float]]:
    """Yield the bound on a stage at each percentile. `value` is the bound at the first percentile.

    If the SLO has no bound on the quantity, the bounds are proportional to the end-to-end bounds.
    """
    if isinf(value):
        return
    told: Quantity = quantity if slo.all_bounds(quantity) else "e2e"
    whole = slo.first_bound_s(told, idle)
    if whole is None:  # The tier is from another class, but this class's requests must also meet it.
        yield (slo.percentile, False), value
        return
    for bound in slo.all_bounds(told):
        part = value * bound.seconds(idle, told) / whole
        if bound.relative and idle is not None:
            part /= max(idle.time_of(quantity), 1e-9)
        yield (bound.percentile, bound.relative), part
