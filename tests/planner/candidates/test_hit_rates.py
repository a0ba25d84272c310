"""Che's approximation against an LRU cache, and what any hit rate must obey."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornplug.planner.candidates import samples


@pytest.mark.parametrize(("cached", "expected"), [(100, 0.157), (1000, 0.437), (5000, 0.792)])
def test_che_ten_thousand_items_match_published(cached: int, expected: float) -> None:
    assert samples.lru_hit_rate(10_000, 0.8, cached) == pytest.approx(expected, abs=0.0006)


def test_che_rate_matches_lru_cache() -> None:
    rng = np.random.default_rng(3)
    weight = np.arange(1, 501) ** -0.9
    asked = rng.choice(500, size=40_000, p=weight / weight.sum())
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for n, item in enumerate(asked.tolist()):
        if item in cache:
            cache.move_to_end(item)
            hits += n >= 5_000
        else:
            cache[item] = None
            if len(cache) > 80:
                cache.popitem(last=False)
    assert hits / 35_000 == pytest.approx(samples.lru_hit_rate(500, 0.9, 80), abs=0.01)


@given(st.integers(1, 10**7), st.floats(0, 2), st.floats(0, 1), st.floats(0, 1))
def test_che_larger_cache_hits_no_less(catalogue: int, zipf: float, one: float, other: float) -> None:
    small, large = sorted((one, other))
    low = samples.lru_hit_rate(catalogue, zipf, small * catalogue)
    high = samples.lru_hit_rate(catalogue, zipf, large * catalogue)
    assert 0 <= low <= high + 1e-9 <= 1 + 2e-9


def test_che_uniform_popularity_hits_cached_share() -> None:
    assert samples.lru_hit_rate(1_000_000, 0.0, 250_000) == pytest.approx(0.25, abs=1e-6)


def test_che_bins_match_exact_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    binned = samples.lru_hit_rate(60_000, 0.8, 9_000)
    monkeypatch.setattr(samples, "_ITEMS_WITH_OWN_BIN", 60_000)
    samples.lru_hit_rate.cache_clear()
    assert binned == pytest.approx(samples.lru_hit_rate(60_000, 0.8, 9_000), abs=1e-4)


def test_che_empty_catalogue_is_refused() -> None:
    with pytest.raises(ValueError, match="catalogue of 0"):
        samples.lru_hit_rate(0, 0.8, 1)
