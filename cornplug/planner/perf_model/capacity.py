"""Computes a station's capacity: the largest rate of one request class that the station can serve within its
bounds.

Closed forms (`analytic_capacity.py`) compute the capacity in milliseconds, accurately enough to drop cells
that no plan uses. The simulator (`simulated_capacity.py`) then computes the capacity of the cells that a plan
uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from cornplug.planner.inputs.request_classes import SampledRequest
from cornplug.planner.perf_model import analytic_capacity, simulated_capacity
from cornplug.planner.perf_model.latency_bound import LatencyBound
from cornplug.planner.simulator.stations import Station

__all__ = ["LatencyBound", "capacity"]


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
        burst: squared coefficient of variation of the interarrival times.
        confirm: whether to simulate (some tenths of a second). Otherwise closed forms are used
            (milliseconds).

    Results are cached.
    """
    if not samples:
        raise ValueError("a capacity needs samples of a request class")
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
        return analytic_capacity.screen(station, samples, bound, burst)
    # Call this through the cache, because a cell is screened before it is confirmed.
    screened = _capacity(station, samples, bound, burst, seed, False)
    if not 0 < screened < float("inf"):
        return screened
    return simulated_capacity.confirm(station, samples, bound, burst=burst, seed=seed, screened=screened)
