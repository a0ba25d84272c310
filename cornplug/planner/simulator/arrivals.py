"""Generates arrival times of a renewal process with gamma-distributed interarrival times.

`burst` is the squared coefficient of variation of the interarrival times: 1 is Poisson, 4 is bursty, and 0.25
is more regular than Poisson.

The interarrival times are quantiles of the distribution in random order (stratified sampling), not a random
sample. A run then has exactly the requested rate and burst, and percentiles vary half as much between seeds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SAMPLES_PER_QUANTILE = 8


def times(rate: float, burst: float, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the ascending times in seconds of the first `n` arrivals at `rate` per second. The first time is
    0."""
    gaps = _gaps(burst, n, rng) / rate
    return np.cumsum(gaps) - gaps[0] if n else gaps


def within(rate: float, burst: float, seconds: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the ascending times in seconds of the arrivals in [0, `seconds`).

    The process is closed to a circle and cut at a random point, so that a bursty process does not always
    begin with a burst.
    """
    n = int(rate * seconds + rng.random())
    at = (np.cumsum(_gaps(burst, n, rng)) * seconds / max(n, 1) + rng.random() * seconds) % seconds
    return np.sort(at)


def evenly(choices: int, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return `n` numbers below `choices` in random order. The numbers of their occurrences differ by at most
    one."""
    rounds = [rng.permutation(choices) for _ in range(-(-n // choices))]
    return rng.permutation(np.concatenate(rounds)[:n]) if rounds else np.empty(0, dtype=np.int64)


def _gaps(burst: float, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return interarrival times at rate 1, with a mean of exactly 1."""
    sample = np.sort(rng.gamma(1.0 / burst, burst, n * _SAMPLES_PER_QUANTILE))
    gaps = sample[_SAMPLES_PER_QUANTILE // 2 :: _SAMPLES_PER_QUANTILE]
    return rng.permutation(gaps / gaps.mean() if n else gaps)
