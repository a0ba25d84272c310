"""Bounds on percentiles of a stage's times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LatencyBound:
    """Bounds at one percentile, None without."""

    percentile: str
    """"mean", "p50", "p90", "p95" or "p99"."""
    seconds: float | None = None
    """Bound on the time to the first token if the station prefills, otherwise on the time until leaving."""
    tpot_s: float | None = None
    """Bound per token if the station decodes."""
    also: tuple[LatencyBound, ...] = ()
    """Bounds on other percentiles, which have no `also`."""
    relative: bool = False
    """Whether `seconds` and `tpot_s` are multiples of the idle TTFT and TPOT of the same request."""

    @property
    def each(self) -> tuple[LatencyBound, ...]:
        """All bounds, one percentile each."""
        return (self, *self.also)

    @property
    def bounded(self) -> bool:
        return any(one.seconds is not None or one.tpot_s is not None for one in self.each)

    @property
    def share(self) -> float | None:
        """0.95 for "p95", None for the mean."""
        return None if self.percentile == "mean" else int(self.percentile[1:]) / 100

    def of(self, times: NDArray[np.float64]) -> float:
        """Return the percentile (or mean) of times, or 0 if there are none."""
        if not times.size:
            return 0.0
        return float(np.mean(times) if self.share is None else np.quantile(times, self.share))
