"""Simulation of all request classes of a plan on all of the plan's stations.

Runs are repeated with other random numbers until the 95th percentiles of all classes are precise enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cornplug.planner.latency_forecast import RequestTimes
from cornplug.planner.plan import PlanRoute
from cornplug.planner.simulator.simulator import Station, StationJob, simulate
from cornplug.planner.simulator.stations import QueuePeak
from cornplug.planner.simulator.traffic import (
    ClassTraffic,
    Delays,
    TrafficClass,
    build_traffic,
    jobs_of,
    simulation_window,
)

__all__ = ["Delays", "SimulatedPlan", "SimulatedTimes", "TrafficClass", "simulate_plan", "times_of"]

PRECISION: Final = 0.02
"""Relative standard error of the 95th percentiles below which no further run is needed."""
_NO_TIMES: Final = (math.nan, math.nan, math.nan)
MIN_RUNS: Final = 4
MAX_RUNS: Final = 16


@dataclass(frozen=True)
class SimulatedTimes:
    """Simulated latencies of one class in seconds."""

    ttft: RequestTimes
    tpot: RequestTimes
    e2e: RequestTimes
    slowdowns: tuple[RequestTimes, RequestTimes, RequestTimes]
    """Slowdowns of TTFT, TPOT and E2E. Empty if the requests have no idle latencies."""
    finished: float
    """Number of requests per second that finished while requests arrived. It is below the arrival rate if the
    plan is overloaded.
    """


@dataclass(frozen=True)
class SimulatedPlan:
    times: dict[str, SimulatedTimes]
    """Simulated latencies by request class."""
    queues: dict[str, QueuePeak]
    """Peak of the queues in all runs, by station."""


@dataclass(frozen=True)
class _EndToEndRun:
    """Latencies of a class in one run, in seconds, with one entry per request.

    An entry is NaN if the request has no such latency.
    """

    ttft: NDArray[np.float64]
    tpot: NDArray[np.float64]
    e2e: NDArray[np.float64]
    idle: NDArray[np.float64]
    """TTFT, TPOT and E2E of each request if it runs alone on the idle replica of its SLO, shape (requests,
    3). NaN if the SLO has no idle replica.
    """
    finished: float
    """Number of requests per second that finished while requests arrived."""


def times_of(samples: NDArray[np.float64]) -> RequestTimes:
    """Return the mean and percentiles of the samples that are not NaN."""
    known = samples[~np.isnan(samples)]
    if not len(known):
        return RequestTimes()
    p50, p90, p95, p99 = map(float, np.quantile(known, [0.5, 0.9, 0.95, 0.99]))
    return RequestTimes(mean=float(known.mean()), p50=p50, p90=p90, p95=p95, p99=p99)


def simulate_plan(
    stations: Mapping[str, Station],
    routes: Sequence[PlanRoute],
    classes: Mapping[str, TrafficClass],
    delays: Delays,
    *,
    requests: int,
    seed: int,
    max_runs: int = MAX_RUNS,
) -> SimulatedPlan:
    """Simulate a plan in which all classes share the stations.

    There are 4 to `max_runs` runs. Each run counts about `requests` requests, divided among the classes in
    proportion to their rates. Requests before the first and after the last counted request are simulated but
    not counted. A request's group at a stage is chosen randomly by weight.

    Raises ConfigError if a route's class or group does not exist, or if a request's KV does not fit on a
    replica.
    """
    places = list(stations.values())
    all_traffic = build_traffic(stations, routes, classes, delays)
    queues = dict.fromkeys(stations, QueuePeak())
    times = _repeat_runs(
        lambda run: _simulate_run(
            places, all_traffic, requests, np.random.default_rng([1, seed, run]), queues
        ),
        max_runs,
    )
    return SimulatedPlan(times, queues)


def _simulate_run(
    stations: Sequence[Station],
    all_traffic: Sequence[ClassTraffic],
    requests: int,
    rng: np.random.Generator,
    queues: dict[str, QueuePeak],
) -> dict[str, _EndToEndRun]:
    """Simulate one run, return the latencies by class, and update `queues` if queues were longer."""
    if not all_traffic:
        return {}
    counted, warm = simulation_window(stations, all_traffic, requests)
    jobs = sorted(
        (job for kind, t in enumerate(all_traffic) for job in jobs_of(t, kind, counted + 2 * warm, rng)),
        key=lambda job: job.at_s,
    )
    outcome = simulate(stations, jobs, seed=int(rng.integers(1 << 31)))
    for station, name in zip(stations, queues, strict=True):
        queues[name] |= outcome.queues[station.name]
    at = np.array([job.at_s for job in jobs])
    idle = np.array([_idle(job) for job in jobs]).reshape(-1, 3)
    done = at + outcome.e2e
    times = {}
    for kind, t in enumerate(all_traffic):
        mine = outcome.kind == kind
        rows = mine & (at >= warm) & (at < warm + counted)
        ended = mine & (done >= warm) & (done < warm + counted)
        times[t.traffic_class.name] = _EndToEndRun(
            outcome.ttft[rows],
            outcome.tpot[rows],
            outcome.e2e[rows],
            idle[rows],
            float(ended.sum() / counted),
        )
    return times


def _idle(job: StationJob) -> tuple[float, float, float]:
    idle = job.request.idle
    if idle is None:
        return _NO_TIMES
    return idle.ttft_s, idle.tpot_s or math.nan, idle.e2e_s


# Repeated -----------------------------------------------------------------------------------


def _repeat_runs(
    run_once: Callable[[int], dict[str, _EndToEndRun]], max_runs: int
) -> dict[str, SimulatedTimes]:
    runs = [run_once(0)]
    while len(runs) < max_runs and (len(runs) < MIN_RUNS or _error(runs) > PRECISION):
        runs.append(run_once(len(runs)))
    return {name: _pool_runs([run[name] for run in runs]) for name in runs[0]}


def _pool_runs(runs: Sequence[_EndToEndRun]) -> SimulatedTimes:
    times = [np.concatenate([getattr(run, what) for run in runs]) for what in ("ttft", "tpot", "e2e")]
    idle = np.concatenate([run.idle for run in runs])
    ttft, tpot, e2e = (times_of(one / idle[:, i]) for i, one in enumerate(times))
    finished = float(np.mean([run.finished for run in runs]))
    return SimulatedTimes(
        times_of(times[0]), times_of(times[1]), times_of(times[2]), (ttft, tpot, e2e), finished
    )


def _error(runs: Sequence[Mapping[str, _EndToEndRun]]) -> float:
    """Return the largest relative standard error of the 95th percentiles of all classes."""
    worst = 0.0
    for name in runs[0]:
        for what in ("ttft", "tpot", "e2e"):
            p95 = [times_of(getattr(run[name], what)).p95 for run in runs]
            known = np.array([value for value in p95 if value is not None])
            if len(known) > 1 and known.mean() > 0:
                worst = max(worst, float(known.std(ddof=1) / np.sqrt(len(known)) / known.mean()))
    return worst
