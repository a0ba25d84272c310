"""Service-level objectives of a request class: bounds on percentiles of its times, or a job's deadline."""

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
    wrong,
)

Percentile = Literal["mean", "p50", "p90", "p95", "p99"]
Quantity = Literal["ttft", "tpot", "e2e"]
QUANTITIES: Final[tuple[Quantity, ...]] = ("ttft", "tpot", "e2e")
SENT: Final = 0.98
"""Part of a job's time in which its requests are sent."""
Slowdown = Annotated[float, Field(gt=1, strict=True, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class IdleTimes:
    """Seconds of one request by itself on the idle replica of its SLO, or their means over a class."""

    ttft_s: float
    tpot_s: float
    e2e_s: float

    def at(self, quantity: Quantity) -> float:
        value: float = getattr(self, f"{quantity}_s")
        return value


@dataclass(frozen=True)
class SloBound:
    percentile: Percentile
    value: float
    """Seconds, or times the idle replica's."""
    relative: bool = False

    def seconds(self, idle: IdleTimes | None, quantity: Quantity) -> float:
        """Of a slowdown: those of a mean request."""
        return self.value * idle.at(quantity) if self.relative and idle is not None else self.value


class PercentileBounds(InputTable):
    """Bounds on one more percentile, in `also` of an SLO."""

    percentile: Percentile = "p95"
    """Of the requests, that must keep the bounds."""
    ttft_s: Positive | None = None
    """Seconds from arrival to the first token. Left out: no bound."""
    tpot_s: Positive | None = None
    """Seconds for each further token. Left out: no bound."""
    e2e_s: Positive | None = None
    """Seconds from arrival to the end of the answer. Left out: no bound."""
    ttft_slowdown: Slowdown | None = None
    """Time to the first token over that of the same request by itself on the SLO's `idle` replica."""
    tpot_slowdown: Slowdown | None = None
    """The same of the time for each further token."""
    e2e_slowdown: Slowdown | None = None
    """The same of the whole answer."""

    def bounds(self, quantity: Quantity) -> list[SloBound]:
        """Of this percentile: in seconds, as a slowdown, or both."""
        seconds, slowdown = getattr(self, f"{quantity}_s"), getattr(self, f"{quantity}_slowdown")
        found = [] if seconds is None else [SloBound(self.percentile, seconds)]
        return found if slowdown is None else [*found, SloBound(self.percentile, slowdown, relative=True)]

    @property
    def bounded(self) -> bool:
        return any(self.bounds(quantity) for quantity in QUANTITIES)

    @property
    def relative(self) -> bool:
        """Whether one is a slowdown."""
        return any(bound.relative for quantity in QUANTITIES for bound in self.bounds(quantity))

    def scaled(self, factor: float) -> Self:
        """The same with every bound times `factor`."""
        keys = [f"{quantity}_{unit}" for quantity in QUANTITIES for unit in ("s", "slowdown")]
        bounds = {key: getattr(self, key) for key in keys}
        return self.model_copy(update={k: v * factor for k, v in bounds.items() if v is not None})


class Job(InputTable):
    """A number of requests, all answered by a deadline, in place of a rate."""

    requests: Count
    """How many."""
    deadline_hours: Positive
    """From the first request to the last answer."""

    @property
    def rate(self) -> float:
        """Requests a second: all are sent in `SENT` of the time."""
        return self.requests / (SENT * 3600 * self.deadline_hours)

    @property
    def last_answer_s(self) -> float:
        """Seconds that the last answers have."""
        return (1 - SENT) * 3600 * self.deadline_hours


class IdleReplica(InputTable):
    """The replica by whose times for a lone request slowdowns are measured. It need not be in the pool."""

    gpu: str
    """Device type, of the GPU table or of [[gpus]]."""
    tp: Count = 1
    """Its tensor-parallel degree."""
    engine: Engine | None = None
    """Left out: the LLM's first."""
    quantisation: Quantisation = "none"
    """Of its weights."""


class Slo(PercentileBounds):
    """Bounds on percentiles of the requests' times. An online application needs one bound at least."""

    also: list[PercentileBounds] = Field(default_factory=list)
    """Bounds on other percentiles, which a plan keeps, too:
    `also = [{ percentile = "p99", ttft_s = 3.0 }]`."""
    idle: IdleReplica | None = None
    """The replica by which slowdowns are measured: `idle = { gpu = "A100-80", tp = 8 }`."""

    @property
    def tables(self) -> tuple[PercentileBounds, ...]:
        """All of its bounds; a percentile may have several tables, each with bounds on other times."""
        return (self, *self.also)

    def every(self, quantity: Quantity) -> list[SloBound]:
        """Its bounds on a time. Stages divide the first one; others follow in proportion."""
        return [bound for table in self.tables for bound in table.bounds(quantity)]

    @property
    def bounded(self) -> bool:
        return any(self.every(quantity) for quantity in QUANTITIES)

    @property
    def relative(self) -> bool:
        return any(bound.relative for quantity in QUANTITIES for bound in self.every(quantity))

    def first_s(self, quantity: Quantity, idle: IdleTimes | None = None) -> float | None:
        """Seconds of the first bound; None: not bounded. `idle`: means of the class, if slowdowns count."""
        bounds = [b for b in self.every(quantity) if idle is not None or not b.relative]
        return bounds[0].seconds(idle, quantity) if bounds else None

    def scaled(self, factor: float) -> Self:
        """The same with every bound times `factor`."""
        also = [table.scaled(factor) for table in self.also]
        return super().scaled(factor).model_copy(update={"also": also})

    @model_validator(mode="after")
    def _each_bound_once(self) -> Self:
        for i, table in enumerate(self.also):
            if not table.bounded:
                remedy = "Write ttft_s, tpot_s or e2e_s in it, or leave it out."
                raise wrong("also", f"no bound in table {i + 1} of it", remedy)
        for quantity in QUANTITIES:
            seen = [(bound.percentile, bound.relative) for bound in self.every(quantity)]
            for one in seen:
                if seen.count(one) > 1:
                    problem = f"a second {quantity}_{'slowdown' if one[1] else 's'} for {one[0]}"
                    raise wrong("also", problem, "Leave one of them out, or give it another percentile.")
        return self

    @model_validator(mode="after")
    def _slowdown_of_something(self) -> Self:
        if self.relative and self.idle is None:
            remedy = 'Write idle = { gpu = "A100-80", tp = 1 }, the replica that is slowed down.'
            raise wrong("idle", "missing, by which slowdowns are measured", remedy)
        return self
