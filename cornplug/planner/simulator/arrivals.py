"""When requests come: a renewal process with gamma-distributed times between arrivals.

`burst` is the squared coefficient of variation of those times: 1 is Poisson, 4 is bursty, 0.25 is
more even than chance.

The times between arrivals are the distribution's quantiles in random order, not a sample of it
(stratified sampling): the rate and the burst of a run are then exactly those asked for, without
chance, and percentiles of a simulation spread half as much from seed to seed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SAMPLES_PER_QUANTILE = 8


def times(rate: float, burst: float, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Seconds, ascending, of the first `n` arrivals at `rate` a second, one of them at 0."""
    gaps = _gaps(burst, n, rng) / rate
    return np.cumsum(gaps) - gaps[0] if n else gaps


def within(rate: float, burst: float, seconds: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Seconds, ascending, of the arrivals in [0, `seconds`).

    The process is closed to a circle and cut anywhere, so that no moment of it is special: a
    bursty process does not begin with a burst.
    """
    n = int(rate * seconds + rng.random())
    at = (np.cumsum(_gaps(burst, n, rng)) * seconds / max(n, 1) + rng.random() * seconds) % seconds
    return np.sort(at)


def evenly(choices: int, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`n` numbers below `choices` in random order, each as often as any other, give or take one."""
    rounds = [rng.permutation(choices) for _ in range(-(-n // choices))]
    return rng.permutation(np.concatenate(rounds)[:n]) if rounds else np.empty(0, dtype=np.int64)


def _gaps(burst: float, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Times between arrivals at rate 1, with the mean exactly 1."""
    sample = np.sort(rng.gamma(1.0 / burst, burst, n * _SAMPLES_PER_QUANTILE))
    gaps = sample[_SAMPLES_PER_QUANTILE // 2 :: _SAMPLES_PER_QUANTILE]
    return rng.permutation(gaps / gaps.mean() if n else gaps)
