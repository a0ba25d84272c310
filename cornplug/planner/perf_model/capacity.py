"""Capacity of a station: the largest rate of one request class that the station can serve within its bounds.

A station consists of identical replicas behind one router. Closed forms compute its capacity in milliseconds,
accurately enough to drop cells that no plan uses. The capacity of the cells that a plan uses is then
determined by simulation. The same samples and the same interarrival times, scaled, are simulated at every
rate (common random numbers), so that two runs differ only in their rate.

For the closed forms, the station is modelled as a GI/G/c queue. Its servers do the work that occurs once
per request (encode, prefill, generate). The longer the queue, the more of this work an iteration contains.
Decoding uses the remaining time. The mean wait is Allen and Cunneen's (`wait_mean`), and each sampled
request adds its own time. A bound applies to a percentile of the sum over all samples. The numbers of
decoding requests and of their KV tokens are Poisson distributed as in M/G/infinity. A bound on a percentile
therefore requires capacity for the mean number plus some standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cornplug.planner.inputs.request_sampling import SampledRequest
from cornplug.planner.inputs.request_tables import LatencyBound
from cornplug.planner.perf_model.analytic_load import (
    AnalyticState,
    Floats,
    ReplicaLoad,
    RequestCosts,
    erlang_c,
    power_of_two_wait,
    request_costs,
)
from cornplug.planner.perf_model.simulator import simulate
from cornplug.planner.perf_model.stations import JobOutcomes, Station, StationJob, StationVisit

WAIT_FACTOR: Final = {"least_work": 1.0, "join_shortest_queue": 3.0, "random": 1.0}
"""Factor by which the wait of Allen and Cunneen is multiplied. The formula's wait is 15 to 40 % too long for
least_work, and 2 to 5 times too short for join_shortest_queue (simulated with 25 to 30 servers and
Splitwise's prompts)."""
MAX_SIMULATIONS: Final = 8
CLOSE_RATIO: Final = 1.03
"""Ratio between the lowest failing and the highest passing rate at which the search ends."""
MAX_JOBS: Final = 4000
_JOBS_BY_PERCENTILE: Final = {"mean": 1000, "p50": 1000, "p90": 1200, "p95": 1500, "p99": 3000}
_NO_DECODE_JOB_FACTOR: Final = 2
"""Factor by which the number of jobs is multiplied if nothing decodes, because queues without decoding have
longer correlations and are cheaper to simulate."""
_WARMUP_SHARE: Final = 0.2
"""Share of the jobs at the beginning that are not counted, because the station is not in a steady state
yet."""


def screen(
    station: Station, samples: Sequence[SampledRequest], bound: LatencyBound, burst: float = 1.0
) -> float:
    """Return the capacity of all replicas in requests per second, from closed forms.

    The arguments and the result are described in `capacity.capacity`.
    """
    sizes = request_costs(tuple(samples))
    if not _fits(station, sizes):
        return 0.0
    replica = ReplicaLoad(station, sizes, max(map(_sigmas, bound.all_bounds)))

    def meets(rate: float) -> bool:
        state = replica.state_at(rate / station.schedulers)
        return state is not None and all(
            _meets(station, state, one, rate, burst, sizes) for one in bound.all_bounds
        )

    if replica.isolated_latency_s == 0:
        return math.inf
    return _search_largest_rate(meets, 0.02 / replica.isolated_latency_s * station.schedulers)


def _meets(
    station: Station,
    state: AnalyticState,
    bound: LatencyBound,
    rate: float,
    burst: float,
    sizes: RequestCosts,
) -> bool:
    every = np.ones_like(sizes.prompts)
    first = sizes.idle_ttft if bound.relative else every
    on_time = bound.seconds is None or _on_time(station, state, bound, bound.seconds * first, rate, burst)
    if not on_time or bound.tpot_s is None:
        return on_time
    tokens = bound.tpot_s * (sizes.idle_tpot if bound.relative else every)
    if bound.quantile is None:
        several = sizes.outputs > 1
        return not several.any() or state.tpot_mean <= float(tokens[several].mean())
    return state.share_slower_than(tokens) <= 1 - bound.quantile


def _wait_statistics(router: str, servers: int, rate: float, service_s: float) -> tuple[float, float]:
    """Return (share of requests that wait, mean wait of these requests in seconds).

    The service times are assumed to be exponential.
    """
    load = rate * service_s
    if router == "power_of_two" and servers > 1:
        waits, mean = power_of_two_wait(load / servers)
        return waits, mean * service_s / waits if waits else 0.0
    longer = WAIT_FACTOR[router] if servers > 1 else 1.0
    return erlang_c(servers, load), longer / (servers / service_s - rate)


def _on_time(
    station: Station, state: AnalyticState, bound: LatencyBound, seconds: Floats, rate: float, burst: float
) -> bool:
    """Return whether the percentile of a request's wait and own time is within its bound.

    `seconds` contains the bound of each sample.
    """
    service_s = float(state.service_s.mean())
    if service_s == 0:
        return bound.statistic_of(state.own_s / seconds) <= 1
    servers, cv2 = station.schedulers, float(state.service_s.var()) / service_s**2
    if station.router == "random":
        # Each replica has its own queue, and receives a random part of the arrivals.
        servers, rate = station.groups, rate / station.replicas
        burst = 1 + (burst - 1) / station.replicas
    if rate * service_s >= servers:
        return False
    waits, mean = _wait_statistics(station.router, servers, rate, service_s)
    mean *= (burst + cv2) / 2
    if bound.quantile is None:
        return float(((state.own_s + waits * mean) / seconds).mean()) <= 1
    left = seconds - state.own_s
    late = np.where(left < 0, 1.0, waits * np.exp(-np.maximum(left, 0.0) / max(mean, 1e-12)))
    return float(late.mean()) <= 1 - bound.quantile


def _sigmas(bound: LatencyBound) -> float:
    """Return how much more than the mean number of requests must fit to meet a bound, in standard deviations.

    Without a bound, the mean number must fit, so the result is 0.
    """
    if bound.seconds is None and bound.tpot_s is None:
        return 0.0
    return {"p90": 1.282, "p95": 1.645, "p99": 2.326}.get(bound.percentile, 0.5)


def _fits(station: Station, sizes: RequestCosts) -> bool:
    """Return whether each request alone fits into the KV cache of a replica."""
    if station.steps is None or "G" in station.tasks:
        return True
    held = sizes.prompts + sizes.outputs if "D" in station.tasks else sizes.prompts
    return bool(held.max() <= station.kv_tokens)


def _search_largest_rate(meets: Callable[[float], bool], rate: float) -> float:
    """Return the largest rate that meets the bounds, with an accuracy of 2 %.

    The search begins with `rate`, which must be very low. Returns 0 if this rate does not meet the bounds.
    """
    if not meets(rate):
        return 0.0
    step = 16.0
    while step > 1.02:
        while meets(rate * step):
            rate *= step
        step = math.sqrt(step)
    return rate


def capacity(
    station: Station,
    samples: Sequence[SampledRequest],
    bound: LatencyBound,
    *,
    burst: float = 1.0,
    seed: int = 0,
    confirm: bool = True,
) -> float:
    """Return the largest rate, in requests per second, that all of the station's replicas can serve together.

    The station serves only the class of `samples`. Without bounds, this is the throughput. The rate is 0 if a
    single request misses the bounds or does not fit into the KV cache. It is infinite if the requests need no
    work at this station, for example because all embeddings are cached.

    Args:
        burst: Squared coefficient of variation of the interarrival times.
        confirm: Whether to simulate (some tenths of a second). Otherwise closed forms are used
            (milliseconds).

    Results are cached.
    """
    if not samples:
        raise ValueError("samples is empty")
    return _capacity(replace(station, name=""), tuple(samples), bound, burst, seed, confirm)


@lru_cache(maxsize=16_384)
def _capacity(
    station: Station,
    samples: tuple[SampledRequest, ...],
    bound: LatencyBound,
    burst: float,
    seed: int,
    confirm: bool,
) -> float:
    if not confirm:
        return screen(station, samples, bound, burst)
    # Call this through the cache, because a cell is screened before it is confirmed.
    screened = _capacity(station, samples, bound, burst, seed, False)
    if not 0 < screened < float("inf"):
        return screened
    return _simulated_capacity(station, samples, bound, burst=burst, seed=seed, screened=screened)


def _simulated_capacity(
    station: Station,
    samples: Sequence[SampledRequest],
    bound: LatencyBound,
    *,
    burst: float,
    seed: int,
    screened: float,
) -> float:
    """Return the largest rate of all replicas that meets the bounds in simulation, in requests per second. 0
    means that no rate meets the bounds.

    The search begins with `screened`, the rate from closed forms.
    """
    most = _saturated_throughput(station, samples, seed=seed)
    if not bound.has_bounds:
        return most
    load_test = _LoadTest.create(station, samples, bound, burst, seed, min(screened, most))
    return _search(load_test, min(screened, 0.97 * most), most)


def _saturated_throughput(station: Station, samples: Sequence[SampledRequest], *, seed: int = 0) -> float:
    """Return the throughput of the station, in requests per second, if all requests are present at the
    beginning.

    One replica is simulated, because replicas with separate queues do not affect each other.
    """
    one = replace(station, replicas=1)
    count = min(max(1000, 3 * station.groups * _max_decoding_requests(station, samples)), MAX_JOBS)
    jobs = [StationJob(0.0, 0, request, (StationVisit(0),)) for request in _shuffled(samples, count, seed)]
    seconds = simulate([one], jobs, seed=seed).stage_s[:, 0]
    # Ignore requests without work at this station, whose embeddings are cached or whose only token is
    # computed.
    ends = np.sort(seconds[seconds > 0])
    if not ends.size:
        return math.inf
    return _completion_rate(ends, "D" in station.tasks) * count / len(ends) * station.replicas


def _completion_rate(ends: NDArray[np.float64], decodes: bool) -> float:
    """Return the number of requests that end per second.

    If requests decode, the times in which the batch fills and empties are excluded.
    """
    first, last = int(0.25 * len(ends)), int(0.75 * len(ends))
    if decodes and ends[last] > ends[first]:
        return (last - first) / float(ends[last] - ends[first])
    return len(ends) / float(ends[-1])


def _max_decoding_requests(station: Station, samples: Sequence[SampledRequest]) -> int:
    """Return the maximum number of requests that decode together in one group."""
    if "D" not in station.tasks or "G" in station.tasks:
        return 1
    held = sum(d.prompt_tokens + d.output_tokens for d in samples) / len(samples)
    return int(min(station.max_batch, max(station.kv_tokens / held, 1)))


def _shuffled(samples: Sequence[SampledRequest], count: int, seed: int) -> list[SampledRequest]:
    """Return `count` samples in random order. The numbers of their occurrences differ by at most one."""
    rng = np.random.default_rng(seed)
    rounds = [rng.permutation(len(samples)) for _ in range(math.ceil(count / len(samples)))]
    return [samples[i] for i in np.concatenate(rounds)[:count]]


@dataclass(frozen=True)
class _LoadTest:
    """Simulation of a station that can be run at any rate."""

    station: Station
    scale: float
    """Ratio between the rate of the complete station and the rate of the simulated replicas."""
    samples: tuple[SampledRequest, ...]
    at_s: NDArray[np.float64]
    """Arrival times for a rate of one request per second."""
    bound: LatencyBound
    seed: int

    @classmethod
    def create(
        cls,
        station: Station,
        samples: Sequence[SampledRequest],
        bound: LatencyBound,
        burst: float,
        seed: int,
        rate: float,
    ) -> _LoadTest:
        """Create a simulation that is long enough for a steady state, so that requests are replaced several
        times.

        If this requires too many requests, fewer replicas are simulated. Fewer replicas balance their load
        less, so the resulting capacity is conservative.
        """
        needed = 6 * rate * _lifetime_s(station, samples)
        replicas = station.replicas
        if needed > MAX_JOBS:
            replicas = max(int(replicas * MAX_JOBS / needed), 1)
        scale = station.replicas / replicas
        longest = max(_JOBS_BY_PERCENTILE[one.percentile] for one in bound.all_bounds)
        least = longest * (1 if "D" in station.tasks else _NO_DECODE_JOB_FACTOR)
        count = int(min(max(least, needed / scale, 25 * replicas * station.groups), MAX_JOBS))
        return cls(
            replace(station, replicas=replicas),
            scale,
            tuple(_shuffled(samples, count, seed)),
            _arrivals(count, burst, seed + 1),
            bound,
            seed,
        )

    def worst_bound_ratio(self, rate: float) -> float:
        """Return the largest ratio of a simulated time to its bound at a rate. A ratio above 1 means that the
        bound is missed."""
        at_s = self.at_s * (self.scale / rate)
        jobs = [
            StationJob(float(at), 0, request, (StationVisit(0),))
            for at, request in zip(at_s, self.samples, strict=True)
        ]
        outcome = simulate([self.station], jobs, seed=self.seed)
        end = self._end(outcome, at_s)
        return max(
            max(self._stage_ratio(outcome, one), self._tpot_ratio(outcome, end, one))
            for one in self.bound.all_bounds
        )

    def _stage_ratio(self, outcome: JobOutcomes, bound: LatencyBound) -> float:
        if bound.seconds is None:
            return 0.0
        times = outcome.ttft if "P" in self.station.tasks else outcome.stage_s[:, 0]
        if bound.relative:
            times = times / np.array([d.idle.ttft_s if d.idle else np.nan for d in self.samples])
        return bound.statistic_of(times[self._first_counted :]) / bound.seconds

    def _tpot_ratio(self, outcome: JobOutcomes, end: int, bound: LatencyBound) -> float:
        if bound.tpot_s is None or "D" not in self.station.tasks:
            return 0.0
        tpot = outcome.tpot
        if bound.relative:
            tpot = tpot / np.array([d.idle.tpot_s if d.idle else np.nan for d in self.samples])
        tpot = tpot[self._first_counted : end]
        return bound.statistic_of(tpot[~np.isnan(tpot)]) / bound.tpot_s

    @staticmethod
    def _end(outcome: JobOutcomes, at_s: NDArray[np.float64]) -> int:
        """Return the index after the last request that is counted.

        Requests that are present when the last request arrives are not counted, because their batch shrinks.
        At most a third of the requests is excluded.
        """
        end = np.searchsorted(at_s, at_s[-1] - float(np.median(outcome.e2e)))
        return max(int(end), 2 * len(at_s) // 3)

    @property
    def _first_counted(self) -> int:
        return int(_WARMUP_SHARE * len(self.samples))


def _arrivals(count: int, burst: float, seed: int) -> NDArray[np.float64]:
    """Return arrival times with gamma-distributed interarrival times, and a mean rate of exactly one per
    second.

    The sampled times are rescaled, because their own mean rate would deviate by 1 / sqrt(count).
    """
    at_s: NDArray[np.float64] = np.cumsum(np.random.default_rng(seed).gamma(1 / burst, burst, count))
    at_s *= count / at_s[-1]
    return at_s


def _lifetime_s(station: Station, samples: Sequence[SampledRequest]) -> float:
    """Return the mean time in seconds that a request decodes, in a batch between empty and full."""
    if "D" not in station.tasks or "G" in station.tasks or station.steps is None:
        return 0.0
    steps = sum(d.output_tokens - 1 for d in samples) / len(samples)
    many = _max_decoding_requests(station, samples)
    return steps * (station.steps.decode(many) + station.steps.decode(1)) / 2


def _search(load_test: _LoadTest, rate: float, max_rate: float) -> float:
    """Return the largest rate that meets the bounds in simulation.

    The search begins at the rate that the analytic screening found. Once it has a passing and a failing
    rate, it interpolates between their logarithms.
    """
    good, bad = 0.0, max_rate
    ease, stress = 0.0, math.inf
    factor = 1.15
    for _ in range(MAX_SIMULATIONS):
        found = load_test.worst_bound_ratio(rate)
        if found <= 1:
            good, ease = rate, found
        else:
            bad, stress = rate, found
        if good and bad / good < CLOSE_RATIO:
            break
        if not good:
            rate, factor = bad / factor, factor**1.5
        elif stress == math.inf:
            rate, factor = min(good * factor, math.sqrt(good * max_rate)), factor**1.5
        else:
            share = math.log(1 / max(ease, 1e-3)) / math.log(stress / max(ease, 1e-3))
            # Keep a distance from both ends of the interval, so that both ends move.
            rate = good * (bad / good) ** min(max(share, 0.2), 0.8)
    return good
