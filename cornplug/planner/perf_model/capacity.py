"""The largest rate of one request class that a station carries under its bounds.

Closed forms (`analytic_capacity.py`) find it in milliseconds, well enough to drop cells that no plan
uses; the simulator (`simulated_capacity.py`) then finds it for the cells that are kept.
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
    """Requests a second of the class of `samples`, alone, that all of the station's replicas carry.

    Without bounds that is their throughput, all busy; with bounds it is at most that.
    0: not even a lone request meets the bounds, or one does not fit the KV cache. Infinite: the
    requests need nothing here (all their embeddings are cached).

    Args:
        burst: squared coefficient of variation of the times between arrivals.
        confirm: False: by closed forms alone, milliseconds; True: by simulation, some tenths of a
            second. Both are remembered for equal arguments.
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
    # By way of the cache: a cell is confirmed after it was screened.
    screened = _capacity(station, samples, bound, burst, seed, False)
    if not 0 < screened < float("inf"):
        return screened
    return simulated_capacity.confirm(station, samples, bound, burst=burst, seed=seed, screened=screened)
