"""Mean, quantiles and samples of lengths in tokens, items or units. A length is a number, a log-normal
distribution or a histogram."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cornplug.planner.inputs.schema import Histogram, Length, LogNormal

_NORMAL: Final = NormalDist()


def mean(length: Length) -> float:
    """Return the mean length. A log-normal is truncated at its `max`, and the rounding of samples is ignored.

    E[X | X <= m] = mean * Phi(z - sigma) / Phi(z), z = (ln m - mu) / sigma.
    """
    if isinstance(length, int):
        return float(length)
    if isinstance(length, Histogram):
        return float(np.average(length.values, weights=length.weights))
    mu, sigma = _underlying(length)
    if sigma == 0:
        return length.mean
    z = (math.log(length.max) - mu) / sigma
    return length.mean * _NORMAL.cdf(z - sigma) / _NORMAL.cdf(z)


def quantile(length: Length, q: float) -> int:
    """Return the smallest length that a fraction `q` (0 to 1) of all lengths does not exceed."""
    if not 0 <= q <= 1:
        raise ValueError(f"q must be from 0 to 1, not {q}")
    if isinstance(length, int):
        return length
    if isinstance(length, Histogram):
        return _quantile_of(length, q)
    mu, sigma = _underlying(length)
    if sigma == 0:
        return _whole(length.mean)
    below = q * _NORMAL.cdf((math.log(length.max) - mu) / sigma)
    if below <= 0:
        return 1
    return min(_whole(math.exp(mu + sigma * _NORMAL.inv_cdf(min(below, 1 - 1e-16)))), length.max)


def sample(length: Length, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
    """Draw `n` lengths. Samples of a log-normal are rounded, and are at least 1."""
    if isinstance(length, int):
        return np.full(n, length, np.int64)
    if isinstance(length, Histogram):
        weights = np.asarray(length.weights)
        chosen: NDArray[np.int64] = rng.choice(np.asarray(length.values), n, p=weights / weights.sum())
        return chosen
    mu, sigma = _underlying(length)
    lengths = rng.lognormal(mu, sigma, n)
    # The model checks that `max` is at least `mean`, so each round keeps more than half of the samples.
    while (beyond := lengths > length.max).any():
        lengths[beyond] = rng.lognormal(mu, sigma, int(beyond.sum()))
    tokens: NDArray[np.int64] = np.maximum(np.rint(lengths), 1).astype(np.int64)
    return tokens


def _underlying(length: LogNormal) -> tuple[float, float]:
    """Return the mean and the standard deviation of the logarithm of a length."""
    variance = math.log1p(length.cv**2)
    return math.log(length.mean) - variance / 2, math.sqrt(variance)


def _whole(length: float) -> int:
    return max(round(length), 1)


def _quantile_of(histogram: Histogram, q: float) -> int:
    order = np.argsort(histogram.values)
    shares = np.cumsum(np.asarray(histogram.weights)[order])
    # With q = 1, a rounding error in the sums must not lead to an index after the last value.
    at = min(int(np.searchsorted(shares, q * shares[-1] * (1 - 1e-12))), len(order) - 1)
    return histogram.values[int(order[at])]
