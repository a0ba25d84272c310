"""Latency targets of a request class: bounds on percentiles of request times, or a job's deadline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from cornplug.planner.inputs.field_types import (
    Count,
    Engine,
    InputTable,
    Positive,
    Quantisation,
    field_error,
)

Percentile = Literal["mean", "p50", "p90", "p95", "p99"]
Quantity = Literal["ttft", "tpot", "e2e"]
QUANTITIES: Final[tuple[Quantity, ...]] = ("ttft", "tpot", "e2e")
SEND_SHARE: Final = 0.98
"""Fraction of the time until a job's deadline in which all of its requests are sent."""
Slowdown = Annotated[float, Field(gt=1, strict=True, allow_inf_nan=False)]


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
