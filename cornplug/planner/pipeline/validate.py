"""Validation of a plan by simulating all request classes on all of the plan's stations.

The simulation determines the latencies of each request class and missed bounds. Runs are repeated with
other random numbers until the 95th percentiles of all classes are precise enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cornplug.planner.candidates.replica_configs import PRIORITY
from cornplug.planner.candidates.request_paths import EMBEDDING_EDGE_S
from cornplug.planner.candidates.samples import kv_bytes_per_token
from cornplug.planner.inputs.component_shapes import ELEMENT_BYTES
from cornplug.planner.inputs.request_sampling import RequestClass, SampledRequest
from cornplug.planner.inputs.schema import LLMShape
from cornplug.planner.optimizer.optimization_problem import PoolSolution
from cornplug.planner.perf_model.simulator import (
    ClassTraffic,
    Delays,
    TrafficClass,
    build_traffic,
    jobs_of,
    simulate,
    simulation_window,
)
from cornplug.planner.perf_model.stations import QueuePeak, Station, StationJob
from cornplug.planner.pipeline.build_plan import group_name, job_done_hours
from cornplug.planner.pipeline.formulate import FormulatedProblem, nic_bytes_s
from cornplug.planner.plan import LatencyForecast, Plan, PlannedGroup, PlanRoute, QueueForecast, RequestTimes

PRECISION: Final = 0.02
"""Relative standard error of the 95th percentiles below which no further run is needed."""
_NO_TIMES: Final = (math.nan, math.nan, math.nan)
MIN_RUNS: Final = 4
MAX_RUNS: Final = 16
SIMULATED_REQUESTS: Final = 4000
"""Number of requests of one class in a simulation. The 99th percentile then depends on 40 requests."""
NOISE: Final = 0.02
"""Relative noise of a percentile with this number of requests. Smaller misses are ignored."""


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


@dataclass(frozen=True)
class SloMiss:
    """Bound that a class misses in simulation."""

    demand: str
    quantity: str
    """"ttft", "tpot" or "e2e"."""
    percentile: str
    bound: float
    """Bound in seconds or as a slowdown."""
    simulated: float
    slowdown: bool = False

    @property
    def excess_ratio(self) -> float:
        return self.simulated / self.bound


@dataclass(frozen=True)
class ValidationRun:
    plan: Plan
    """Plan with simulated times in its latency forecasts."""
    misses: tuple[SloMiss, ...]


def validate(problem: FormulatedProblem, solution: PoolSolution, plan: Plan) -> ValidationRun:
    """Return the plan with simulated times, and the bounds that these times miss.

    Classes that visit a service for which only the throughput is known have no times.
    """
    stations = _stations(problem, solution)
    timed = [r for r in plan.routes if all(g in stations for s in r.stages for g in s.groups)]
    whole = {r.class_name for r in timed} - {r.class_name for r in plan.routes if r not in timed}
    routes = [r for r in timed if r.class_name in whole]
    if not routes:
        return ValidationRun(plan, ())
    rates = {n: sum(r.rate for r in routes if r.class_name == n) for n in problem.classes if n in whole}
    classes = {
        name: _traffic_class(problem, solution, problem.classes[name], rate) for name, rate in rates.items()
    }
    found = simulate_plan(
        stations, routes, classes, delays(problem), requests=SIMULATED_REQUESTS, seed=problem.rules.seed + 2
    )
    forecasts = [_with_times(f, found.times) for f in plan.latency_forecasts]
    groups = [_with_queue(g, found.queues.get(g.name)) for g in plan.groups]
    misses = tuple(m for f in forecasts for m in _misses(f))
    return ValidationRun(plan.model_copy(update={"latency_forecasts": forecasts, "groups": groups}), misses)


def _stations(problem: FormulatedProblem, solution: PoolSolution) -> dict[str, Station]:
    """Return the simulator's stations for the groups whose times are known."""
    return {
        group_name(cell): problem.cells[cell].station(replicas)
        for cell, replicas in solution.replicas.items()
        if replicas and problem.cells[cell].has_times
    }


def _traffic_class(
    problem: FormulatedProblem, solution: PoolSolution, request_class: RequestClass, rate: float
) -> TrafficClass:
    samples = problem.samples.for_class(request_class, problem.scenario(request_class.name, solution.levels))
    priority = PRIORITY[request_class.app.workload]
    return TrafficClass(request_class.name, rate, request_class.request.burst, samples, priority)


def delays(problem: FormulatedProblem) -> Callable[[str, str, SampledRequest], float]:
    """Return a function that returns the seconds between two stages of a request.

    This is the time to fetch an embedding or to transfer KV.
    """
    table = problem.cell_builder.gpus
    slowest = min(nic_bytes_s(n, table[n.gpu]) for n in problem.nodes)
    per_token = max((kv_bytes_per_token(c) for c in problem.components if c.kind == "llm"), default=0)

    hidden = max((c.shape.hidden for c in problem.components if isinstance(c.shape, LLMShape)), default=0)

    def seconds(before: str, after: str, request: SampledRequest) -> float:
        if before == "E":
            # A token consists of at least one patch.
            moved = sum(request.patches) * hidden * ELEMENT_BYTES
            return EMBEDDING_EDGE_S + moved / slowest if request.patches else 0.0
        return request.prompt_tokens * per_token / slowest if after == "D" else 0.0

    return seconds


def _with_queue(group: PlannedGroup, peak: QueuePeak | None) -> PlannedGroup:
    if peak is None or not peak.requests:
        return group
    queue = QueueForecast(requests=peak.requests, prompt_tokens=peak.prompt_tokens)
    return group.model_copy(update={"queue": queue})


def _with_times(forecast: LatencyForecast, found: Mapping[str, SimulatedTimes]) -> LatencyForecast:
    times = found.get(forecast.class_name)
    if times is None:
        return forecast
    slowdown = forecast.slowdown
    if slowdown is not None:
        known = dict(zip(("ttft", "tpot", "e2e"), times.slowdowns, strict=True))
        slowdown = slowdown.model_copy(update=known)
    job = forecast.job
    if job is not None:
        done = job_done_hours(job, forecast.served, times.e2e.p99)
        job = job.model_copy(update={"done_hours": done})
    update = {"ttft": times.ttft, "tpot": times.tpot, "e2e": times.e2e, "slowdown": slowdown, "job": job}
    return forecast.model_copy(update=update)


def _misses(forecast: LatencyForecast) -> list[SloMiss]:
    name = forecast.class_name
    return [
        SloMiss(name, of.quantity, of.percentile, of.bound, of.simulated, of.slowdown)
        for of in forecast.bounds
        if of.bound is not None and of.simulated is not None and of.simulated > of.bound * (1 + NOISE)
    ]
