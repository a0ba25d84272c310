"""Forecasts for a plan's request classes, as stored in `plan.json`: latency bounds and simulated times."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class PlanRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestTimes(PlanRecord):
    """Times in seconds, or slowdowns. None if the class has no such time, as TPOT with one-token outputs."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    def at(self, percentile: str) -> float | None:
        """Return the value for "mean", "p50", ..."""
        value: float | None = getattr(self, percentile)
        return value


class PercentileSlo(PlanRecord):
    """Bounds on one percentile of a class's latencies, in seconds or as multiples of the idle replica's
    latency."""

    percentile: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    ttft_slowdown: float | None = None
    tpot_slowdown: float | None = None
    e2e_slowdown: float | None = None


class SimulatedSlowdown(PlanRecord):
    """Latencies of a class divided by those of the same requests alone on an idle replica."""

    idle: str
    """Idle replica, for example "A100-80 TP8"."""
    ttft: RequestTimes = RequestTimes()
    tpot: RequestTimes = RequestTimes()
    e2e: RequestTimes = RequestTimes()


class ForecastBound(NamedTuple):
    """Bound at a percentile in seconds or as a slowdown, with the simulated value."""

    quantity: str
    """"ttft", "tpot" or "e2e"."""
    percentile: str
    bound: float | None
    simulated: float | None
    slowdown: bool


class JobForecast(PlanRecord):
    """Forecast for a fixed number of requests with a deadline."""

    requests: int
    deadline_hours: float
    done_hours: float | None = None
    """Simulated time from the first request to the last response (P99). None without a simulation."""
    dollars: float
    """Share of the plan's cost until the deadline, in proportion to the job's share of each group's load.
    Includes idle GPUs of the groups' nodes."""


class LatencyForecast(PlanRecord):
    """Latency bounds of one request class, and its latencies in the simulation of the whole plan."""

    app: str
    request: str
    rate: float
    served: float
    """Rate that is served. Below `rate` only if the objective maximises goodput."""
    priority: int = 0
    """Scheduling priority relative to other classes. Larger is more urgent."""
    prefix_hit_rate: float = 0.0
    """Share of requests whose shared prefix is cached. A router must send them to a replica that has it."""
    slo_percentile: str
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_e2e_s: float | None = None
    slo_also: list[PercentileSlo] = Field(default_factory=list)
    """Bounds on other percentiles, and on slowdowns."""
    slowdown: SimulatedSlowdown | None = None
    """Simulated slowdown, if a slowdown is bounded."""
    job: JobForecast | None = None
    ttft: RequestTimes = RequestTimes()
    """Simulated latencies. The three fields are empty if the plan was not simulated."""
    tpot: RequestTimes = RequestTimes()
    e2e: RequestTimes = RequestTimes()

    @property
    def slo(self) -> list[PercentileSlo]:
        """All bound tables of the class. The first table may have no bounds."""
        first = PercentileSlo(
            percentile=self.slo_percentile,
            ttft_s=self.slo_ttft_s,
            tpot_s=self.slo_tpot_s,
            e2e_s=self.slo_e2e_s,
        )
        return [first, *self.slo_also]

    @property
    def bounds(self) -> list[ForecastBound]:
        """Simulated value of each latency at each bounded percentile, with its bound if there is one."""
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
        """Loosest TTFT bound. A later request misses all of them."""
        return max((table.ttft_s for table in self.slo if table.ttft_s is not None), default=None)
