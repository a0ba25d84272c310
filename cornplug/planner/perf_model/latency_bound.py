"""Bounds on percentiles of a station's times, and the bounds on one stage from a class's SLO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isinf

import numpy as np
from numpy.typing import NDArray

from cornplug.planner.inputs.slo import IdleTimes, Quantity, Slo

BoundKind = tuple[str, bool]
"""(percentile, whether the bound is a slowdown)."""


@dataclass(frozen=True)
class LatencyBound:
    """Bounds on one percentile of a station's times, and in `also` on other percentiles. A bound of None
    means no bound."""

    percentile: str
    """"mean", "p50", "p90", "p95" or "p99"."""
    seconds: float | None = None
    """Bound on the time to the first token if the station prefills, otherwise on the time until a request
    leaves."""
    tpot_s: float | None = None
    """Bound on the time per token if the station decodes."""
    also: tuple[LatencyBound, ...] = ()
    """Bounds on other percentiles. The `also` of these bounds is empty."""
    relative: bool = False
    """Whether `seconds` and `tpot_s` are multiples of the idle TTFT and TPOT of the same request."""

    @property
    def all_bounds(self) -> tuple[LatencyBound, ...]:
        """Bounds on all percentiles. Each item bounds one percentile."""
        return (self, *self.also)

    @property
    def has_bounds(self) -> bool:
        return any(one.seconds is not None or one.tpot_s is not None for one in self.all_bounds)

    @property
    def quantile(self) -> float | None:
        """Percentile as a share, for example 0.95 for "p95". None for the mean."""
        return None if self.percentile == "mean" else int(self.percentile[1:]) / 100

    def statistic_of(self, times: NDArray[np.float64]) -> float:
        """Return the percentile (or the mean) of times, or 0 if `times` is empty."""
        if not times.size:
            return 0.0
        return float(np.mean(times) if self.quantile is None else np.quantile(times, self.quantile))


def stage_bound(slo: Slo, seconds: float, tpot_s: float, idle: IdleTimes | None = None) -> LatencyBound:
    """Return the bounds of a class on a stage in a tier of `seconds` and `tpot_s` (inf means no bound).

    A tier is a pair of bounds, derived from the first bound of each quantity (`Slo.all_bounds`). Bounds at
    other percentiles are proportional. For example, if the SLO has 1 s at P50 and 3 s at P99, a stage with
    0.4 s at P50 has 1.2 s at P99. The simulation of the complete plan verifies these bounds. `idle` contains
    the class's mean latencies on the idle replica if slowdowns are bounded.
    """
    first = dict(_stage_bounds(slo, "ttft", seconds, idle))
    tokens = dict(_stage_bounds(slo, "tpot", tpot_s, idle))
    bounds = [
        LatencyBound(kind[0], first.get(kind), tokens.get(kind), relative=kind[1])
        for kind in dict.fromkeys([*first, *tokens])
    ] or [LatencyBound(slo.percentile)]
    head = bounds[0]
    return LatencyBound(head.percentile, head.seconds, head.tpot_s, tuple(bounds[1:]), head.relative)


def _stage_bounds(
    slo: Slo, quantity: Quantity, value: float, idle: IdleTimes | None
) -> Iterator[tuple[BoundKind, float]]:
    """Yield the bound on a stage at each percentile. `value` is the bound at the first percentile.

    If the SLO has no bound on the quantity, the bounds are proportional to the end-to-end bounds.
    """
    if isinf(value):
        return
    told: Quantity = quantity if slo.all_bounds(quantity) else "e2e"
    whole = slo.first_bound_s(told, idle)
    if whole is None:  # The tier is from another class, but this class's requests must also meet it.
        yield (slo.percentile, False), value
        return
    for bound in slo.all_bounds(told):
        part = value * bound.seconds(idle, told) / whole
        if bound.relative and idle is not None:
            part /= max(idle.time_of(quantity), 1e-9)
        yield (bound.percentile, bound.relative), part
