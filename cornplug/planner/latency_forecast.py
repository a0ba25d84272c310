"""Forecasts for a plan's request classes, as stored in `plan.json`: latency bounds and simulated times."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class PlanRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestTimes(PlanRecord):
    """Latency statistics, in seconds or as slowdowns.

    A value is None if the class has no such latency, for example TPOT if all outputs have one token.
    """

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    def value_at(self, percentile: str) -> float | None:
        """Return the value of a statistic, for example "mean" or "p50"."""
        value: float | None = getattr(self, percentile)
        return value


class PercentileSlo(PlanRecord):
    """Bounds on one percentile of a class's latencies.

    A slowdown is a multiple of the latency on an idle replica.
    """

    percentile: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    ttft_slowdown: float | None = None
    tpot_slowdown: float | None = None
    e2e_slowdown: float | None = None


class SimulatedSlowdown(PlanRecord):
    """Simulated latencies of a class, divided by the latencies of the same requests on an idle replica."""

    idle: str
    """Name of the idle replica, for example "A100-80 TP8"."""
    ttft: RequestTimes = RequestTimes()
    tpot: RequestTimes = RequestTimes()
    e2e: RequestTimes = RequestTimes()


class ForecastBound(NamedTuple):
    """Bound on a latency at a percentile, in seconds or as a slowdown, and the simulated value."""

    quantity: str
    """"ttft", "tpot" or "e2e"."""
    percentile: str
    bound: float | None
    simulated: float | None
    slowdown: bool


class JobForecast(PlanRecord):
    """Forecast for a job, a fixed number of requests with a deadline."""

    requests: int
    deadline_hours: float
    done_hours: float | None = None
    """Simulated time from the first request to the last response (P99), or None without a simulation."""
    dollars: float
    """Cost of the job in dollars: its share of the plan's cost until the deadline, in proportion to its share
    of each group's load. The cost includes idle GPUs of the groups' nodes."""


class LatencyTargets(PlanRecord):
    """Latency bounds and priority of one request class."""

    app: str
    request: str
    priority: int = 0
    """Scheduling priority relative to other classes. Larger is more urgent."""
    prefix_hit_rate: float = 0.0
    """Share of requests whose shared prefix is cached. A router must send each such request to a replica that
    has the prefix."""
    slo_percentile: str
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_e2e_s: float | None = None
    slo_also: list[PercentileSlo] = Field(default_factory=list)
    """Bounds on other percentiles, and on slowdowns."""
    e2e: RequestTimes = RequestTimes()
    """Simulated E2E latency. Empty if the plan was not simulated."""

    @property
    def percentile_slos(self) -> list[PercentileSlo]:
        """Bounds of the class, one item per percentile. The first item may have no bounds."""
        first = PercentileSlo(
            percentile=self.slo_percentile,
            ttft_s=self.slo_ttft_s,
            tpot_s=self.slo_tpot_s,
            e2e_s=self.slo_e2e_s,
        )
        return [first, *self.slo_also]

    @property
    def ttft_bound_s(self) -> float | None:
        """Loosest TTFT bound in seconds, or None. A request with a larger TTFT misses all TTFT bounds."""
        return max((table.ttft_s for table in self.percentile_slos if table.ttft_s is not None), default=None)


class LatencyForecast(LatencyTargets):
    """Latency bounds of one request class, and the class's latencies in the simulation of the complete
    plan."""

    rate: float
    served: float
    """Requests per second that the plan serves. This is below `rate` only if the objective maximises
    goodput."""
    slowdown: SimulatedSlowdown | None = None
    """Simulated slowdown, if a slowdown is bounded."""
    job: JobForecast | None = None
    ttft: RequestTimes = RequestTimes()
    """Simulated TTFT. `ttft`, `tpot` and `e2e` are empty if the plan was not simulated."""
    tpot: RequestTimes = RequestTimes()

    @property
    def bounds(self) -> list[ForecastBound]:
        """Simulated value and bound (or None) of each latency, at each percentile in `percentile_slos`."""
        slower = self.slowdown or SimulatedSlowdown(idle="")
        return [
            ForecastBound(quantity, table.percentile, bound, times.value_at(table.percentile), slowdown)
            for table in self.percentile_slos
            for quantity, bound, times, slowdown in (
                ("ttft", table.ttft_s, self.ttft, False),
                ("ttft", table.ttft_slowdown, slower.ttft, True),
                ("tpot", table.tpot_s, self.tpot, False),
                ("tpot", table.tpot_slowdown, slower.tpot, True),
                ("e2e", table.e2e_s, self.e2e, False),
                ("e2e", table.e2e_slowdown, slower.e2e, True),
            )
        ]
