"""Closed forms against published figures and each other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornplug.planner.inputs import request_sampling
from cornplug.planner.perf_model import analytic_load

from .. import closed_forms

# Splitwise's code trace on H100 machines at 70 requests/s: mean prompt time and its spread.
SERVICE_S, SERVICE_CV2 = 0.313, 1.13


@pytest.mark.parametrize(
    ("servers", "p95", "p99"), [(25, 0.228, 0.401), (27, 0.096, 0.201), (30, 0.013, 0.080)]
)
def test_wait_percentile_at_splitwise_load_matches_published(servers: int, p95: float, p99: float) -> None:
    for share, expected in ((0.95, p95), (0.99, p99)):
        wait = closed_forms.wait_percentile(servers, 70, SERVICE_S, share, service_cv2=SERVICE_CV2)
        assert wait == pytest.approx(expected, rel=0.05, abs=0.001)
        left = closed_forms.wait_exceeds(servers, 70, SERVICE_S, wait, service_cv2=SERVICE_CV2)
        assert left == pytest.approx(1 - share)


def test_queueing_staffing_of_splitwise_load_matches_published() -> None:
    servers = [closed_forms.staffing(21.84, beta, service_cv2=1.13) for beta in (0, 0.5, 1, 1.5, 2)]
    assert servers == [22, 25, 27, 30, 32]
    with pytest.raises(ValueError, match=r"21\.84 erlangs need more .* there are 21"):
        analytic_load.erlang_c(21, 21.84)


def test_kv_demand_of_splitwise_trace_matches_published() -> None:
    # planner.md's mean of 152,866 tokens and standard deviation of 24,556, from Azure's trace.
    trace = request_sampling.read_trace(Path(__file__).parents[1] / "cases" / "splitwise_code.csv", "csv")
    held = (trace.prompt_tokens + trace.output_tokens).astype(float)
    seconds = trace.output_tokens * 0.03574
    by_time = held * seconds / seconds.mean()
    mean, variance = closed_forms.kv_demand(70, by_time.mean(), (held * by_time).mean(), seconds.mean())
    assert mean == pytest.approx(152_866, rel=0.01)
    assert math.sqrt(variance) == pytest.approx(24_556, rel=0.01)
    kv_tokens = (8 * 85_899_345_920 - 329e9) / 4_014_080
    assert kv_tokens == pytest.approx(89_235, abs=1)
    assert [closed_forms.kv_replicas(152_866, 24_556**2, kv_tokens, s) for s in (0, 1, 2, 3)] == [2, 2, 3, 3]


@pytest.mark.parametrize(("servers", "p95", "p99"), [(25, 1.60, 2.33), (27, 1.28, 1.93), (30, 1.11, 1.56)])
def test_two_choices_wait_at_splitwise_load_matches_simulation(servers: int, p95: float, p99: float) -> None:
    """The simulator's waits of `test_splitwise.py`'s requests; least work has 0.22 and 0.38 s at 25."""
    waits, mean = analytic_load.power_of_two_wait(70 * SERVICE_S / servers)
    mean_of_those = mean * SERVICE_S * (1 + SERVICE_CV2) / 2 / waits
    for share, expected in ((0.95, p95), (0.99, p99)):
        assert mean_of_those * math.log(waits / (1 - share)) == pytest.approx(expected, rel=0.15)


def test_queueing_one_server_matches_textbook() -> None:
    assert analytic_load.erlang_c(1, 0.7) == pytest.approx(0.7)
    assert analytic_load.wait_mean(1, 0.7, 1.0) == pytest.approx(0.7 / 0.3)
    assert analytic_load.wait_mean(1, 0.5, 1.0, service_cv2=0.0) == pytest.approx(0.5), "M/D/1: half of M/M/1"
    assert closed_forms.wait_exceeds(1, 0.5, 1.0, 2.0, arrival_cv2=0, service_cv2=0) == 0.0, (
        "D/D/1 never waits"
    )
    assert closed_forms.wait_percentile(4, 0.1, 1.0, 0.95) == 0.0, "fewer than 5 % wait at all"


@given(st.integers(1, 300), st.floats(0.01, 0.99))
def test_erlang_c_more_servers_wait_less(servers: int, utilisation: float) -> None:
    load = servers * utilisation
    assert 0 <= analytic_load.erlang_c(servers + 1, load) <= analytic_load.erlang_c(servers, load) <= 1


def test_queueing_ttft_of_tp_and_pp_matches_distserve() -> None:
    assert closed_forms.ttft_tensor(1.0, 0.5, 1.5) == pytest.approx(0.833, abs=0.0005)
    assert closed_forms.ttft_pipeline(1.0, 0.5) == pytest.approx(1.083, abs=0.0005)
    assert closed_forms.ttft_tensor(1.0, 1.2, 1.5) == pytest.approx(2.000, abs=0.0005)
    assert closed_forms.ttft_pipeline(1.0, 1.2) == pytest.approx(1.375, abs=0.0005)
    assert closed_forms.ttft_single(2.0, 0.25) == pytest.approx(
        2 + analytic_load.wait_mean(1, 0.25, 2, service_cv2=0)
    )


@pytest.mark.parametrize(
    ("speedup", "load"), [(1.2, 0.434), (1.3, 0.611), (1.5, 0.936), (1.7, 1.257), (1.9, 1.626)]
)
def test_queueing_crossover_of_tp_and_pp_matches_distserve(speedup: float, load: float) -> None:
    assert closed_forms.crossover(speedup) == pytest.approx(load, rel=0.005)


def test_queueing_crossover_without_or_with_perfect_speedup_is_refused() -> None:
    for speedup in (1.0, 2.0):
        with pytest.raises(ValueError, match="between 1 and 2"):
            closed_forms.crossover(speedup)


def test_batch_size_is_arrivals_during_one_batch() -> None:
    batch = closed_forms.batch_size(50, 0.02, 0.01, 32)
    assert batch == pytest.approx(50 * (0.02 + 0.01 * batch))
    with pytest.raises(ValueError, match=r"97/s overload a batch server of 94\.1"):
        closed_forms.batch_size(97, 0.02, 0.01, 32)


def test_queueing_decode_batch_follows_littles_law() -> None:
    batch = closed_forms.decode_batch(2.0, 200, 0.02, 0.0005)
    assert batch == pytest.approx(2.0 * 200 * (0.02 + 0.0005 * batch))
    with pytest.raises(ValueError, match="overload a decoder of 2000 tokens/s"):
        closed_forms.decode_batch(11.0, 200, 0.02, 0.0005)


def test_kv_in_use_is_compound_poisson() -> None:
    # 3 requests/s hold 100 tokens for 2 s: 6 of them on average, a Poisson number.
    mean, variance = closed_forms.kv_demand(3.0, 100.0, 100.0**2, 2.0)
    assert (mean, math.sqrt(variance)) == pytest.approx((600.0, 100 * math.sqrt(6)))


def test_queueing_overload_is_refused() -> None:
    for call in (
        lambda: analytic_load.wait_mean(2, 2.0, 1.0),
        lambda: closed_forms.ttft_tensor(1.0, 1.5, 1.5),
        lambda: closed_forms.ttft_pipeline(1.0, 2.0),
    ):
        with pytest.raises(ValueError, match=r"need more|overload"):
            call()
