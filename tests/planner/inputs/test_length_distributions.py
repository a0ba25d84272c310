"""Lengths: samples agree with the mean and quantiles that formulas give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cornplug.planner.inputs import request_sampling
from cornplug.planner.inputs.schema import Histogram, Length, LogNormal

LENGTHS: dict[str, Length] = {
    "number": 600,
    "log-normal": LogNormal(mean=1155, cv=0.96),
    "cut off": LogNormal(mean=2048, cv=1.5, max=4096),
    "no spread": LogNormal(mean=300, cv=0),
    "histogram": Histogram(values=[1000, 10, 100], weights=[1, 2, 7]),
}


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_sample_drawn_lengths_match_mean_and_quantiles(length: Length) -> None:
    drawn = request_sampling.sample_lengths(length, np.random.default_rng(1), 200_000)
    assert drawn.dtype == np.int64
    assert drawn.mean() == pytest.approx(request_sampling.mean_length(length), rel=0.01)
    for q in (0.05, 0.5, 0.95, 0.99):
        assert np.quantile(drawn, q, method="inverted_cdf") == pytest.approx(
            request_sampling.length_quantile(length, q), rel=0.03, abs=1
        )


def test_log_normal_with_max_stays_below_it() -> None:
    cut = LogNormal(mean=2048, cv=1.5, max=2048)
    assert request_sampling.sample_lengths(cut, np.random.default_rng(0), 10_000).max() <= 2048
    assert request_sampling.length_quantile(cut, 1.0) == 2048
    assert request_sampling.mean_length(cut) < 1100, "the tail that is drawn again takes its mean along"


def test_log_normal_without_max_keeps_mean() -> None:
    assert request_sampling.mean_length(LogNormal(mean=600, cv=1)) == pytest.approx(600, rel=1e-6)


def test_histogram_quantiles_at_ends_are_extreme_values() -> None:
    thirds = Histogram(values=[3, 1, 2], weights=[0.1, 0.1, 0.1])
    assert [request_sampling.length_quantile(thirds, q) for q in (0.0, 1 / 3, 0.5, 1.0)] == [1, 1, 2, 3]


def test_quantile_of_percentage_is_refused() -> None:
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        request_sampling.length_quantile(512, 95)


def test_log_normal_max_below_mean_is_refused() -> None:
    with pytest.raises(ValidationError, match="max: 100 is below the mean, 600"):
        LogNormal(mean=600, max=100)


@settings(max_examples=40)
@given(mean=st.floats(1, 1e5), cv=st.floats(0, 4), q=st.floats(0, 1))
def test_quantile_any_log_normal_grows_within_range(mean: float, cv: float, q: float) -> None:
    length = LogNormal(mean=mean, cv=cv, max=200_000)
    assert (
        1
        <= request_sampling.length_quantile(length, q)
        <= request_sampling.length_quantile(length, 1.0)
        <= 200_000
    )
