"""Computes hit rates of an LRU cache under Zipf requests, for use before there is traffic to measure.

Source: Che, Tung and Wang 2002. An item stays in the cache for a characteristic time t after its last use.
This time is the same for all items, so the hit probability of an item with request rate p is 1 - exp(-p t).
The time t is chosen so that the expected number of cached items equals the cache's size.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_EACH: Final = 10_000
"""Number of most popular items that have their own bins. All other items share 200 bins per decade of ranks,
with similar probabilities."""


def items(cache_bytes: float, item_bytes: float) -> int:
    """Return the number of items of this size that fit into a cache."""
    return int(cache_bytes // item_bytes)


@lru_cache(maxsize=4096)
def che(catalogue: int, zipf: float, cached: float) -> float:
    """Return the hit rate of an LRU cache that can hold `cached` items of a catalogue of `catalogue` items.

    Requests are independent, and item k of the catalogue is requested with a probability proportional to
    k^-zipf. A cache for the complete catalogue has a hit rate of 1, because first uses are not counted.
    """
    if catalogue < 1 or zipf < 0:
        raise ValueError(f"invalid catalogue of {catalogue} items with Zipf exponent {zipf:g}")
    if cached <= 0:
        return 0.0
    if cached >= catalogue:
        return 1.0
    probability, count = _popularity(catalogue, zipf)
    time = _characteristic_time(probability, count, cached)
    return float(np.dot(probability * count, -np.expm1(-probability * time)))


def _popularity(catalogue: int, zipf: float) -> tuple[Floats, Floats]:
    """Return (probability of each item in a bin, number of items in the bin) for all bins, as two arrays."""
    edges = np.arange(1.0, min(catalogue, _EACH) + 2)
    if catalogue > _EACH:
        bins = max(int(200 * math.log10(catalogue / _EACH)), 1)
        edges = np.unique(np.concatenate([edges, np.rint(np.geomspace(_EACH + 1, catalogue + 1, bins + 1))]))
    count = np.diff(edges)
    weight = ((edges[:-1] + edges[1:] - 1) / 2) ** -zipf
    return weight / np.dot(weight, count), count


def _characteristic_time(probability: Floats, count: Floats, cached: float) -> float:
    """Return the number of requests after which an unused item is evicted, by bisection of its logarithm."""
    low, high = math.log(cached), math.log(cached)
    while np.dot(count, -np.expm1(-probability * math.exp(high))) < cached:
        high += 2.0
    for _ in range(60):
        middle = (low + high) / 2
        if np.dot(count, -np.expm1(-probability * math.exp(middle))) < cached:
            low = middle
        else:
            high = middle
    return math.exp(high)
