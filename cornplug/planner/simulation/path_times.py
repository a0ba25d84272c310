"""Times of one request class's requests, each along its whole path."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PathTimes:
    """One entry a request, seconds; NaN where a request has no such time."""

    ttft: NDArray[np.float64]
    tpot: NDArray[np.float64]
    e2e: NDArray[np.float64]
    finished: float
    """Requests a second that were done while requests arrived."""
