"""Capacity of a station (identical replicas behind one router), computed with closed forms in milliseconds.

The station is modelled as a GI/G/c queue. Its servers do the work that occurs once per request (encode,
prefill, generate). The longer the queue, the more of this work an iteration contains. Decoding uses the
remaining time. The mean wait is Allen and Cunneen's (`wait_mean`), and each sampled request adds its own
time. A bound applies to a percentile of the sum over all samples. The numbers of decoding requests and of
their KV tokens are Poisson distributed as in M/G/infinity. A bound on a percentile therefore requires
capacity for the mean number plus some standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from cornplug.planner.inputs.request_classes import SampledRequest
from cornplug.planner.perf_model.analytic_load import ReplicaLoad, erlang_c, power_of_two_wait
from cornplug.planner.perf_model.analytic_state import AnalyticState, Floats, RequestCosts, request_costs
from cornplug.planner.perf_model.latency_bound import LatencyBound
from cornplug.planner.simulator.stations import Station

WAIT_FACTOR: Final = {"least_work": 1.0, "join_shortest_queue": 3.0, "random": 1.0}
"""Factor by which the wait of Allen and Cunneen is multiplied. The formula's wait is 15 to 40 % too long for
least_work, and 2 to 5 times too short for join_shortest_queue (simulated with 25 to 30 servers and
Splitwise's prompts)."""


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
