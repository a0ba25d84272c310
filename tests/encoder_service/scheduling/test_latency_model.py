"""The cost of a batch, learned from batches."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cornplug.encoder_service.admission import BatchLatencyModel


@example(0.5, 0.0078125, [12, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 13])
@example(0.5, 0.0078125, [*range(10_000, 10_008), 1, 2, 3, 4])
@given(
    st.floats(0, 0.5),
    st.floats(1e-6, 1e-2),
    st.lists(st.integers(1, 20_000), min_size=12, max_size=40, unique=True),
)
def test_latency_model_fits_line_after_slow_warm_up(fixed_s: float, token_s: float, sizes: list[int]) -> None:
    pass_time = BatchLatencyModel()
    for _ in range(2):
        pass_time.observe(1000, 40.0)
    for tokens in sizes:
        pass_time.observe(tokens, fixed_s + token_s * tokens)
    for tokens in sizes[-5:]:
        assert pass_time.predict_s(tokens) == pytest.approx(fixed_s + token_s * tokens, rel=0.05, abs=1e-3)


def test_latency_model_of_one_size_predicts_above_zero() -> None:
    pass_time = BatchLatencyModel()
    assert (pass_time.is_measured, pass_time.predict_s(100)) == (False, 0.0)
    assert pass_time.max_tokens_within(1) == math.inf
    for _ in range(10):
        pass_time.observe(576, 0.1)
    assert pass_time.predict_s(576) == pytest.approx(0.1)
    assert pass_time.predict_s(1152) == pytest.approx(0.2)
    assert pass_time.max_tokens_within(1) == pytest.approx(5760)


def test_latency_model_outlier_moves_little_slowdown_is_followed() -> None:
    pass_time = BatchLatencyModel()
    for _ in range(20):
        pass_time.observe(1000, 0.1)
    pass_time.observe(1000, 30.0)
    assert pass_time.predict_s(1000) < 0.15
    for _ in range(20):
        pass_time.observe(1000, 0.8)
    assert 0.6 < pass_time.predict_s(1000) <= 0.85
    for _ in range(20):
        pass_time.observe(1000, 0.1)
    assert pass_time.predict_s(1000) < 0.2


def test_tokens_within_large_fixed_cost_allows_many_tokens() -> None:
    pass_time = BatchLatencyModel()
    for tokens in (100, 400, 200, 800, 100, 400, 200, 800):
        pass_time.observe(tokens, 0.5 + 0.001 * tokens)
    # Not the 100 tokens that fit into 0.6 s: four fifths of a pass should be work.
    assert pass_time.max_tokens_within(0.6) == pytest.approx(2000, rel=0.05)
