"""Bounds on percentiles of a station's times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
    def each(self) -> tuple[LatencyBound, ...]:
        """Bounds on all percentiles, with one item for each percentile."""
        return (self, *self.also)

    @property
    def bounded(self) -> bool:
        return any(one.seconds is not None or one.tpot_s is not None for one in self.each)

    @property
    def share(self) -> float | None:
        """Percentile as a share, for example 0.95 for "p95". None for the mean."""
        return None if self.percentile == "mean" else int(self.percentile[1:]) / 100

    def of(self, times: NDArray[np.float64]) -> float:
        """Return the percentile (or the mean) of times, or 0 if `times` is empty."""
        if not times.size:
            return 0.0
        return float(np.mean(times) if self.share is None else np.quantile(times, self.share))
