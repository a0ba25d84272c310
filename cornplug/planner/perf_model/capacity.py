"""The largest rate of one request class that a station can carry within its bounds.

Closed forms (`analytic_capacity.py`) compute it in milliseconds, accurately enough to drop cells that no plan
uses. The simulator (`simulated_capacity.py`) then computes it for the remaining cells.
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
    """Return the requests per second of the class of `samples`, alone, that all of the station's replicas
    carry.

    Without bounds this is the throughput, and with bounds at most that. 0: a single request misses the bounds
    or does not fit in the KV cache. Infinity: the requests need no work here, as all embeddings are cached.

    `burst` is the squared coefficient of variation of the interarrival times. Without `confirm` closed forms
    are used (milliseconds), otherwise a simulation (some tenths of a second). Both are cached.
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
    # Called through the cache, because a cell is screened before it is confirmed.
    screened = _capacity(station, samples, bound, burst, seed, False)
    if not 0 < screened < float("inf"):
        return screened
    return simulated_capacity.confirm(station, samples, bound, burst=burst, seed=seed, screened=screened)
