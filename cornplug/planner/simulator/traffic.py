"""Requests of a plan's classes, and the stations that they visit, generated for a simulation.

Arrivals are a renewal process with gamma-distributed interarrival times. `burst` is their squared coefficient
of variation: 1 is Poisson, 4 is bursty, and 0.25 is more regular than Poisson. The interarrival times are
quantiles of the distribution in random order (stratified sampling), not a random sample. A run then has
exactly the requested rate and burst, and percentiles vary half as much between seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cornplug.errors import ConfigError
from cornplug.planner.inputs.request_classes import SampledRequest
from cornplug.planner.plan import PlanRoute, RouteStage
from cornplug.planner.simulator.replicas import isolated_latency_s
from cornplug.planner.simulator.simulator import Station, StationJob, StationVisit

Delays = Callable[[str, str, SampledRequest], float]
"""Function of (tasks of the previous stage, tasks of the next stage, request) that returns the seconds
between the stages."""
_WARMUP_LATENCIES = 3.0
_MIN_CLASS_REQUESTS = 500
_MAX_EXTENSION = 3.0
_SAMPLES_PER_QUANTILE = 8


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
        name = f"{route.app}/{route.request}"
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
