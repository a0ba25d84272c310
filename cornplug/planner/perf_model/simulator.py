"""Discrete-event simulation of requests that visit stations of engine replicas, and its generated requests.

An event is a request's arrival at a station, or the end of a replica's piece of work. Consecutive decode
iterations of an engine are one piece of work, so the simulation of a request does not take longer if its
output is longer. Requests that arrive at the same time share an iteration or a batch. Failures, preemption
for lack of KV (admission reserves KV), and the router's latency are not simulated.

A station consists of identical replicas behind one router. The router chooses a replica for each request by
one of these policies, and the first replica among equal replicas:

- power_of_two: the replica with fewer requests, of two random replicas, as in vllm-router and sglang-router.
- random: a random replica.
- least_work: the replica with the fewest seconds of unfinished work (`load`).
- join_shortest_queue: the replica with the fewest requests.

Real routers have only the information that the first two policies use. The others are for comparison.

Arrivals are a renewal process with gamma-distributed interarrival times. `burst` is their squared coefficient
of variation: 1 is Poisson, 4 is bursty, and 0.25 is more regular than Poisson. The interarrival times are
quantiles of the distribution in random order (stratified sampling), not a random sample. A run then has
exactly the requested rate and burst, and percentiles vary half as much between seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import heappop, heappush
from itertools import pairwise
from operator import or_
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cornplug.errors import ConfigError
from cornplug.planner.inputs.request_sampling import SampledRequest
from cornplug.planner.perf_model.engine_replica import EngineReplica
from cornplug.planner.perf_model.stations import (
    EncoderReplica,
    EventAgenda,
    JobOutcomes,
    QueuePeak,
    SerialReplica,
    SimulatedReplica,
    Station,
    StationJob,
    StationVisit,
    TokenLog,
    isolated_latency_s,
    off_device_s,
)
from cornplug.planner.plan import PlanRoute, RouteStage

_RANDOM_BLOCK: Final = 512
"""Number of random numbers that a station draws in one call."""
Delays = Callable[[str, str, SampledRequest], float]
"""Function of (tasks of the previous stage, tasks of the next stage, request) that returns the seconds
between the stages."""
_WARMUP_LATENCIES = 3.0
_MIN_CLASS_REQUESTS = 500
_MAX_EXTENSION = 3.0
_SAMPLES_PER_QUANTILE = 8


def simulate(stations: Sequence[Station], jobs: Sequence[StationJob], *, seed: int = 0) -> JobOutcomes:
    """Simulate all jobs until they finish, and return their latencies.

    If a station is overloaded, jobs wait as long as necessary. The jobs must be sorted by `at_s`.
    `off_device_s` of the first station that prefills is added once to a job's TTFT and end-to-end latency.

    Raises ConfigError if a job's KV does not fit on a replica, and ValueError if the jobs are not sorted.
    """
    if any(b.at_s < a.at_s for a, b in pairwise(jobs)):
        raise ValueError("jobs must be sorted by at_s")
    agenda = EventAgenda()
    log = TokenLog(*_span(jobs), [job.priority for job in jobs])
    rng = np.random.default_rng(seed)
    dispatches = [RouterDispatch(station, agenda, log, rng) for station in stations]
    run = _EventLoop(jobs, dispatches, agenda)
    run.run()
    return _outcome(jobs, stations, dispatches, log, run)


def _span(jobs: Sequence[StationJob]) -> tuple[float, float]:
    return (jobs[0].at_s, jobs[-1].at_s) if jobs else (0.0, 0.0)


class _EventLoop:
    """Event loop of a simulation. Records the times at which each job arrived at and left its stations."""

    def __init__(
        self, jobs: Sequence[StationJob], dispatches: Sequence[RouterDispatch], agenda: EventAgenda
    ) -> None:
        self._jobs, self._dispatches, self._agenda = jobs, dispatches, agenda
        self.arrivals: list[list[float]] = [[] for _ in jobs]
        self.departures: list[list[float]] = [[] for _ in jobs]
        self.end = [float("nan")] * len(jobs)

    def run(self) -> None:
        events = self._agenda.events
        for i, job in enumerate(self._jobs):
            while events and events[0][0] < job.at_s:
                self._step()
            self._start_next_visit(i, job.at_s)
        while events:
            self._step()

    def _step(self) -> None:
        now, _, replica, token = heappop(self._agenda.events)
        if replica is None:
            self._arrive(token, now)
            return
        for i in replica.wake(now, token):
            self.departures[i].append(now)
            self._start_next_visit(i, now)

    def _start_next_visit(self, i: int, now: float) -> None:
        """Start a job's next visit, or end the job."""
        visits = self._jobs[i].visits
        done = len(self.departures[i])
        if done == len(visits):
            self.end[i] = now
            return
        delay = visits[done].delay_s
        if delay or done:
            heappush(self._agenda.events, (now + delay, next(self._agenda.sequence), None, i))
        else:
            self._arrive(i, now)

    def _arrive(self, i: int, now: float) -> None:
        job = self._jobs[i]
        self.arrivals[i].append(now)
        self._dispatches[job.visits[len(self.departures[i])].station].arrive(now, i, job.request)


def _outcome(
    jobs: Sequence[StationJob],
    stations: Sequence[Station],
    dispatches: Sequence[RouterDispatch],
    log: TokenLog,
    loop: _EventLoop,
) -> JobOutcomes:
    at = np.array([job.at_s for job in jobs])
    output = np.array([job.request.output_tokens for job in jobs], dtype=np.int64)
    overhead = np.array([_overhead(job, stations) for job in jobs])
    end, first, last = np.array(loop.end), np.array(log.first_token), np.array(log.last_token)
    first_known = np.where(np.isnan(first), at, first)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(output > 1, (last - first_known) / (output - 1), np.nan)
    span = max(log.until - log.since, 0.0)
    return JobOutcomes(
        kind=np.array([job.kind for job in jobs], dtype=np.int64),
        ttft=np.where(np.isnan(first), end, first) - at + overhead,
        tpot=tpot,
        e2e=end - at + overhead,
        stage_s=_stage_times(loop.arrivals, loop.departures),
        busy={d.station.name: d.busy_s / (span * d.station.replicas) if span else 0.0 for d in dispatches},
        queues={d.station.name: d.queue_peak for d in dispatches},
    )


def _overhead(job: StationJob, stations: Sequence[Station]) -> float:
    for visit in job.visits:
        station = stations[visit.station]
        if station.steps is not None and "P" in station.tasks:
            return off_device_s(station, job.request)
    return 0.0


def _stage_times(arrivals: list[list[float]], departures: list[list[float]]) -> NDArray[np.float64]:
    width = max((len(row) for row in arrivals), default=0)
    times = np.full((len(arrivals), width), np.nan)
    for i, (row_in, row_out) in enumerate(zip(arrivals, departures, strict=True)):
        for k, (a, b) in enumerate(zip(row_in, row_out, strict=True)):
            times[i, k] = b - a
    return times


class RouterDispatch:
    def __init__(
        self, station: Station, agenda: EventAgenda, log: TokenLog, rng: np.random.Generator
    ) -> None:
        self.station = station
        self._rng = rng
        self._random_numbers: list[float] = []
        self._replicas = [_replica(station, agenda, log) for _ in range(station.replicas)]

    def arrive(self, now: float, job: int, request: SampledRequest) -> None:
        self._choose(now).arrive(now, job, request)

    @property
    def busy_s(self) -> float:
        return sum(replica.busy_s for replica in self._replicas)

    @property
    def queue_peak(self) -> QueuePeak:
        return reduce(or_, (replica.queue_peak for replica in self._replicas))

    def _choose(self, now: float) -> SimulatedReplica:
        if len(self._replicas) == 1:
            return self._replicas[0]
        if self.station.router == "random":
            return self._replicas[self._random_index(len(self._replicas))]
        if self.station.router == "power_of_two":
            return self._shorter_of_two()
        if self.station.router == "join_shortest_queue":
            return min(self._replicas, key=lambda replica: replica.outstanding)
        return self._least_work(now)

    def _shorter_of_two(self) -> SimulatedReplica:
        """Choose the less loaded of two different random replicas. On a tie, choose the replica that was
        drawn first."""
        i, k = self._random_index(len(self._replicas)), self._random_index(len(self._replicas) - 1)
        one, other = self._replicas[i], self._replicas[k + (k >= i)]
        return one if one.outstanding <= other.outstanding else other

    def _random_index(self, n: int) -> int:
        """Return a random index below `n`.

        Random numbers are drawn in blocks, because a call of numpy's generator takes as long as a simulated
        request.
        """
        if not self._random_numbers:
            self._random_numbers = self._rng.random(_RANDOM_BLOCK).tolist()
        return int(self._random_numbers.pop() * n)

    def _least_work(self, now: float) -> SimulatedReplica:
        best, least = self._replicas[0], float("inf")
        for replica in self._replicas:
            load = replica.load(now)
            if load < least:
                best, least = replica, load
                if not load:
                    break
        return best


def _replica(station: Station, agenda: EventAgenda, log: TokenLog) -> SimulatedReplica:
    if "G" in station.tasks:
        return SerialReplica(station, agenda, log)
    if station.tasks == "E":
        return EncoderReplica(station, agenda, log)
    return EngineReplica(station, agenda, log)


@dataclass(frozen=True)
class TrafficClass:
    """Requests of one class "application/request"."""

    name: str
    rate: float
    """Number of arrivals per second. The rates of the plan's routes are used only to divide these requests
    among paths."""
    burst: float
    """Squared coefficient of variation of the interarrival times."""
    samples: Sequence[SampledRequest]
    """Sampled requests, which are equally likely."""
    priority: int = 0
    """Priority in an engine's queue. Larger priorities are served first."""


@dataclass(frozen=True)
class RouteStop:
    """Stage of a route. Each request visits one of its stations, chosen randomly by weight."""

    tasks: str
    stations: tuple[int, ...]
    weights: tuple[float, ...]
    delays_s: NDArray[np.float64]
    """Delay in seconds before the stage, for each of the class's samples."""

    def choose_stations(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        if len(self.stations) == 1:
            return np.full(n, self.stations[0], dtype=np.int64)
        return rng.choice(np.array(self.stations, dtype=np.int64), n, p=self.weights)


@dataclass(frozen=True)
class TrafficPath:
    share: float
    stops: tuple[RouteStop, ...]


@dataclass(frozen=True)
class ClassTraffic:
    """Request class with the paths of its requests."""

    traffic_class: TrafficClass
    paths: tuple[TrafficPath, ...]

    def choose_paths(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return rng.choice(len(self.paths), n, p=[path.share for path in self.paths])


def build_traffic(
    stations: Mapping[str, Station],
    routes: Sequence[PlanRoute],
    classes: Mapping[str, TrafficClass],
    delays: Delays,
) -> list[ClassTraffic]:
    """Return the classes that have a route, in the order of `classes`.

    Raises ConfigError if the class or a group of a route does not exist.
    """
    places = {name: i for i, name in enumerate(stations)}
    by_class: dict[str, list[PlanRoute]] = {}
    for route in routes:
        name = route.class_name
        if name not in classes:
            raise ConfigError(f"routes: {name}", "no such request class", f"Known: {', '.join(classes)}.")
        if route.rate > 0:
            by_class.setdefault(name, []).append(route)
    return [
        ClassTraffic(of, tuple(_path(of, route, by_class[name], places, delays) for route in by_class[name]))
        for name, of in classes.items()
        if name in by_class
    ]


def _path(
    traffic_class: TrafficClass,
    route: PlanRoute,
    routes_of_class: Sequence[PlanRoute],
    station_indices: Mapping[str, int],
    delays: Delays,
) -> TrafficPath:
    stops = []
    for i, stage in enumerate(route.stages):
        before = route.stages[i - 1] if i else None
        stops.append(_stop(traffic_class, stage, before, station_indices, delays))
    return TrafficPath(route.rate / sum(r.rate for r in routes_of_class), tuple(stops))


def _stop(
    traffic_class: TrafficClass,
    stage: RouteStage,
    before: RouteStage | None,
    station_indices: Mapping[str, int],
    delays: Delays,
) -> RouteStop:
    unknown = [group for group in stage.groups if group not in station_indices]
    if unknown:
        raise ConfigError(
            f"routes: {traffic_class.name}",
            f'no group "{unknown[0]}"',
            f"Known: {', '.join(station_indices)}.",
        )
    total = sum(stage.groups.values())
    between = [
        delays(before.tasks, stage.tasks, request) if before else 0.0 for request in traffic_class.samples
    ]
    return RouteStop(
        stage.tasks,
        tuple(station_indices[group] for group in stage.groups),
        tuple(weight / total for weight in stage.groups.values()),
        np.array(between),
    )


def simulation_window(
    stations: Sequence[Station], all_traffic: Sequence[ClassTraffic], requests: int
) -> tuple[float, float]:
    """Return (time in which requests are counted, warm-up time before and after it), in seconds.

    About `requests` requests arrive in the counted time. If a class would have fewer than 500 of them, the
    time is up to 3 times longer. The warm-up is 3 times a request's mean isolated latency plus a tenth of the
    counted time, but not longer than the counted time.
    """
    rates = [t.traffic_class.rate for t in all_traffic]
    counted = requests / sum(rates)
    counted = min(max(counted, _MIN_CLASS_REQUESTS / min(rates)), _MAX_EXTENSION * counted)
    isolated_s = max(
        sum(
            weight
            * float(
                np.mean(
                    [isolated_latency_s(stations[at], request) for request in t.traffic_class.samples[:100]]
                )
            )
            for stop in path.stops
            for at, weight in zip(stop.stations, stop.weights, strict=True)
        )
        for t in all_traffic
        for path in t.paths
    )
    return counted, min(0.1 * counted + _WARMUP_LATENCIES * isolated_s, counted)


def jobs_of(t: ClassTraffic, kind: int, seconds: float, rng: np.random.Generator) -> list[StationJob]:
    """Return a class's requests in `seconds` seconds, with random samples, paths and groups."""
    at = arrivals_within(t.traffic_class.rate, t.traffic_class.burst, seconds, rng)
    n = len(at)
    paths, samples = t.choose_paths(n, rng), sample_evenly(len(t.traffic_class.samples), n, rng)
    chosen = [[stop.choose_stations(n, rng).tolist() for stop in path.stops] for path in t.paths]
    between = [[stop.delays_s.tolist() for stop in path.stops] for path in t.paths]
    return [
        StationJob(
            time,
            kind,
            t.traffic_class.samples[d],
            tuple(StationVisit(to[i], delay[d]) for to, delay in zip(chosen[w], between[w], strict=True)),
            t.traffic_class.priority,
        )
        for i, (time, w, d) in enumerate(zip(at.tolist(), paths.tolist(), samples.tolist(), strict=True))
    ]


def arrival_times(rate: float, burst: float, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the ascending times in seconds of the first `n` arrivals at `rate` per second. The first time is
    0."""
    gaps = _gaps(burst, n, rng) / rate
    return np.cumsum(gaps) - gaps[0] if n else gaps


def arrivals_within(
    rate: float, burst: float, seconds: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return the ascending times in seconds of the arrivals in [0, `seconds`).

    The sequence of intervals starts at a random point of the process, so that a bursty process does not
    always begin with a burst.
    """
    n = int(rate * seconds + rng.random())
    at = (np.cumsum(_gaps(burst, n, rng)) * seconds / max(n, 1) + rng.random() * seconds) % seconds
    return np.sort(at)


def sample_evenly(choices: int, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return `n` numbers below `choices` in random order. The numbers of their occurrences differ by at most
    one."""
    rounds = [rng.permutation(choices) for _ in range(-(-n // choices))]
    return rng.permutation(np.concatenate(rounds)[:n]) if rounds else np.empty(0, dtype=np.int64)


def _gaps(burst: float, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return interarrival times at rate 1, with a mean of exactly 1."""
    sample = np.sort(rng.gamma(1.0 / burst, burst, n * _SAMPLES_PER_QUANTILE))
    gaps = sample[_SAMPLES_PER_QUANTILE // 2 :: _SAMPLES_PER_QUANTILE]
    return rng.permutation(gaps / gaps.mean() if n else gaps)
