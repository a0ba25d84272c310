"""Forecasts of a plan's request classes, as `plan.json` holds them: bounds and simulated times."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class PlanRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestTimes(PlanRecord):
    """Seconds, or a slowdown. None where a class has no such time (TPOT of one-token answers)."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    def at(self, percentile: str) -> float | None:
        """Of "mean", "p50", ..."""
        value: float | None = getattr(self, percentile)
        return value


class PercentileSlo(PlanRecord):
    """Bounds on one percentile of a class's times, in seconds, or as times the idle replica's."""

    percentile: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    ttft_slowdown: float | None = None
    tpot_slowdown: float | None = None
    e2e_slowdown: float | None = None


class SimulatedSlowdown(PlanRecord):
    """Times of a class over those of the same requests by themselves on an idle replica."""

    idle: str
    """The replica: "A100-80 TP8"."""
    ttft: RequestTimes = RequestTimes()
    tpot: RequestTimes = RequestTimes()
    e2e: RequestTimes = RequestTimes()


class ForecastBound(NamedTuple):
    """A class's time at a percentile: seconds, or a slowdown."""

    quantity: str
    """ttft, tpot or e2e."""
    percentile: str
    bound: float | None
    simulated: float | None
    slowdown: bool


class JobForecast(PlanRecord):
    """A number of requests with a deadline."""

    requests: int
    deadline_hours: float
    done_hours: float | None = None
    """From the first request to the last answer (P99), as simulated; None where the plan was not."""
    dollars: float
    """Part of the plan's cost until the deadline: of each group's GPUs, with those of a node that nothing
    uses, as much as the job has of the group's load."""


class LatencyForecast(PlanRecord):
    """Bounds of one request class, and its times in the simulation of the whole plan."""

    app: str
    request: str
    rate: float
    served: float
    """Of `rate`; below it only when goodput is maximised."""
    priority: int = 0
    """Of its requests where those of other classes meet them; larger is more urgent."""
    prefix_hit_rate: float = 0.0
    """Share of requests whose shared prefix is in a cache: a router must send those to where it is."""
    slo_percentile: str
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_e2e_s: float | None = None
    slo_also: list[PercentileSlo] = Field(default_factory=list)
    """Bounds on other percentiles, and slowdowns."""
    slowdown: SimulatedSlowdown | None = None
    """Where one is bounded."""
    job: JobForecast | None = None
    ttft: RequestTimes = RequestTimes()
    """These three hold no figure where the plan was not simulated."""
    tpot: RequestTimes = RequestTimes()
    e2e: RequestTimes = RequestTimes()

    @property
    def slo(self) -> list[PercentileSlo]:
        """All of its bounds; the first table may have none."""
        first = PercentileSlo(
            percentile=self.slo_percentile,
            ttft_s=self.slo_ttft_s,
            tpot_s=self.slo_tpot_s,
            e2e_s=self.slo_e2e_s,
        )
        return [first, *self.slo_also]

    @property
    def bounds(self) -> list[ForecastBound]:
        """Each time at each of its percentiles, with its bound where there is one."""
        slower = self.slowdown or SimulatedSlowdown(idle="")
        return [
            ForecastBound(quantity, table.percentile, bound, times.at(table.percentile), slowdown)
            for table in self.slo
            for quantity, bound, times, slowdown in (
                ("ttft", table.ttft_s, self.ttft, False),
                ("ttft", table.ttft_slowdown, slower.ttft, True),
                ("tpot", table.tpot_s, self.tpot, False),
                ("tpot", table.tpot_slowdown, slower.tpot, True),
                ("e2e", table.e2e_s, self.e2e, False),
                ("e2e", table.e2e_slowdown, slower.e2e, True),
            )
        ]

    @property
    def ttft_bound_s(self) -> float | None:
        """The loosest one on TTFT: a request that is later misses them all."""
        return max((table.ttft_s for table in self.slo if table.ttft_s is not None), default=None)
