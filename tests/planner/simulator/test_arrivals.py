"""Arrivals have the rate and the burst that were asked for, from the first one on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornplug.planner.perf_model import simulator


@pytest.mark.parametrize("burst", [0.25, 1.0, 4.0])
def test_rate_and_burst_are_those_asked_for(burst: float) -> None:
    at = simulator.arrival_times(5.0, burst, 20_000, np.random.default_rng(0))
    gaps = np.diff(at)
    assert gaps.mean() == pytest.approx(0.2, rel=1e-3)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(burst, rel=0.03)


@given(st.floats(0.01, 50), st.floats(0.1, 6), st.floats(0.1, 40), st.integers(0, 99))
def test_arrivals_within_a_time_are_in_order_and_inside(
    rate: float, burst: float, seconds: float, seed: int
) -> None:
    at = simulator.arrivals_within(rate, burst, seconds, np.random.default_rng(seed))
    assert (np.diff(at) >= 0).all()
    assert ((at >= 0) & (at < seconds)).all()


def test_arrivals_bursty_process_starts_at_mean_rate() -> None:
    """As many arrivals in the first second as in any other, over many runs."""
    rng = np.random.default_rng(1)
    runs = [simulator.arrivals_within(4.0, 6.0, 10.0, rng) for _ in range(2000)]
    per_second = np.mean([np.histogram(at, bins=10, range=(0, 10))[0] for at in runs], axis=0)
    np.testing.assert_allclose(per_second, 4.0, rtol=0.08)
    assert per_second.sum() == pytest.approx(40.0, rel=0.001)


def test_evenly_draws_each_as_often_as_any_other() -> None:
    got = simulator.sample_evenly(7, 24, np.random.default_rng(0))
    assert sorted(np.bincount(got, minlength=7)) == [3, 3, 3, 3, 4, 4, 4]
    assert sorted(got) != list(got)
    assert len(simulator.sample_evenly(7, 0, np.random.default_rng(0))) == 0
