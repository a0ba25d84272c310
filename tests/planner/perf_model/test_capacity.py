"""What a station carries: against closed forms, against a longer simulation, and in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cornplug.planner.inputs.request_sampling import SampledRequest
from cornplug.planner.inputs.request_tables import IdleTimes, LatencyBound
from cornplug.planner.perf_model.capacity import capacity
from cornplug.planner.perf_model.engine_spec import EngineStepTimes, PiecewiseCurve
from cornplug.planner.perf_model.simulator import simulate
from cornplug.planner.perf_model.stations import Station, StationJob, StationVisit

from ..closed_forms import ttft_pipeline, ttft_single

STEPS = EngineStepTimes(
    prefill=PiecewiseCurve.from_points([1, 128, 512, 2048, 8192], [0.02, 0.022, 0.04, 0.15, 0.62]),
    decode=PiecewiseCurve.from_points([1, 32, 256], [0.018, 0.022, 0.04]),
    kv_token_s=4e-8,
    request_overhead_s=0.005,
)
ENCODE = PiecewiseCurve.from_points([256, 1024, 4096, 16384], [0.012, 0.03, 0.1, 0.42])


def drawn(
    prompt: float, output: float, *, patches: int = 0, units: float = 0.0, n: int = 200
) -> list[SampledRequest]:
    """Log-normal lengths of cv 0.7."""
    rng, sigma = np.random.default_rng(5), math.sqrt(math.log(1.49))
    spread = rng.lognormal(-sigma * sigma / 2, sigma, (n, 2))
    return [
        SampledRequest(
            prompt_tokens=max(int(prompt * p), 1),
            cached_tokens=0,
            patches=(patches,) if patches else (),
            output_tokens=max(int(output * o), 1),
            units=units,
        )
        for p, o in spread
    ]


CHAT = drawn(1000, 200)
PREFILL = Station("p", 1, "P", steps=STEPS, chunk_tokens=2048)
CHATTING = Station("pd", 2, "PD", steps=STEPS, kv_tokens=200_000, chunk_tokens=2048)


def exponential(n: int = 400) -> list[SampledRequest]:
    """Service times of M/M/c, by their quantiles, so that the sample's mean is the law's."""
    shares = (np.arange(n) + 0.5) / n
    return [SampledRequest(1, 0, (), 1, float(-math.log(1 - u))) for u in shares]


@pytest.mark.parametrize("confirm", [False, True])
def test_capacity_one_exponential_server_is_mm1(confirm: bool) -> None:
    # Time in M/M/1 is exponential of rate mu - lambda: P95 is ln 20 over that.
    station = Station("g", 1, "G", generate=PiecewiseCurve.line(0.0, 1.0))
    found = capacity(station, exponential(), LatencyBound("p95", 12.0), confirm=confirm)
    assert found == pytest.approx(1 - math.log(20) / 12, rel=0.07)


@pytest.mark.parametrize("confirm", [False, True])
@pytest.mark.parametrize(("p50", "p99"), [(1.5, 12.0), (3.0, 12.0)])
def test_capacity_under_two_percentiles_is_smaller_one_of_mm1(p50: float, p99: float, confirm: bool) -> None:
    station = Station("g", 1, "G", generate=PiecewiseCurve.line(0.0, 1.0))
    bound = LatencyBound("p50", p50, also=(LatencyBound("p99", p99),))
    found = capacity(station, exponential(), bound, confirm=confirm)
    assert found == pytest.approx(1 - max(math.log(2) / p50, math.log(100) / p99), rel=0.1)


@pytest.mark.parametrize("confirm", [False, True])
def test_capacity_under_slowdown_of_mm1_is_closed_form(confirm: bool) -> None:
    """First come, first served: a request of length S is slowed down by more than s if it waits for over
    (s - 1) S. With exponential S that is rho / (1 + (1 - rho)(s - 1)) of all: half of them at rho = 3/4."""
    station = Station("g", 1, "G", generate=PiecewiseCurve.line(0.0, 1.0))
    samples = [replace(d, idle=IdleTimes(d.units, 0.0, d.units)) for d in exponential()]
    found = capacity(station, samples, LatencyBound("p50", 3.0, relative=True), confirm=confirm)
    assert found == pytest.approx(0.75, rel=0.07)


@pytest.mark.parametrize("confirm", [False, True])
def test_capacity_one_constant_server_is_md1(confirm: bool) -> None:
    station = Station("g", 1, "G", generate=PiecewiseCurve.line(0.0, 1.0))
    rate = 0.7
    bound = LatencyBound("mean", ttft_single(1.0, rate))
    found = capacity(station, [SampledRequest(1, 0, (), 1, 1.0)], bound, confirm=confirm)
    assert found == pytest.approx(rate, rel=0.06)


@pytest.mark.parametrize(
    ("station", "draws", "bound"),
    [
        (replace(PREFILL, replicas=4), CHAT, LatencyBound("p95", 0.6)),
        (Station("e", 2, "E", encode=ENCODE), drawn(100, 1, patches=1024), LatencyBound("p95", 0.2)),
        (Station("d", 1, "D", steps=STEPS, kv_tokens=100_000), CHAT, LatencyBound("p95", None, 0.03)),
        (CHATTING, CHAT, LatencyBound("p95", 1.0, 0.05)),
    ],
    ids=lambda value: value.tasks if isinstance(value, Station) else "",
)
def test_capacity_confirmed_holds_in_longer_traffic(
    station: Station, draws: list[SampledRequest], bound: LatencyBound
) -> None:
    found = capacity(station, draws, bound)
    assert _stress(station, draws, bound, 0.9 * found) <= 1.05
    assert _stress(station, draws, bound, 1.15 * found) > 1
    screened = capacity(station, draws, bound, confirm=False)
    assert 0.7 < screened / found < 1.5, "near enough to prune by"


def _stress(station: Station, draws: Sequence[SampledRequest], bound: LatencyBound, rate: float) -> float:
    rng = np.random.default_rng(77)
    at_s = np.cumsum(rng.exponential(1 / rate, 2500))
    jobs = [StationJob(float(at), 0, draws[rng.integers(len(draws))], (StationVisit(0),)) for at in at_s]
    outcome = simulate([station], jobs)
    times = outcome.ttft if "P" in station.tasks else outcome.stage_s[:, 0]
    stage = bound.statistic_of(times[500:]) / bound.seconds if bound.seconds else 0.0
    tokens = bound.statistic_of(outcome.tpot[500:2200]) / bound.tpot_s if bound.tpot_s else 0.0
    return max(stage, tokens)


def test_capacity_without_bounds_is_rate_of_full_iterations() -> None:
    draws = [SampledRequest(1024, 0, (), 1, 0.0)]
    found = capacity(replace(PREFILL, replicas=3), draws, LatencyBound("p95"))
    assert found == pytest.approx(3 * 2 / STEPS.prefill(2048), rel=0.02)
    held = SampledRequest(1000, 0, (), 201, 0.0)
    decoder = Station("d", 1, "D", steps=replace(STEPS, kv_token_s=0.0), kv_tokens=32 * 1201)
    most = capacity(decoder, [held], LatencyBound("p95"))
    assert most == pytest.approx(32 / (200 * STEPS.decode(32)), rel=0.05), "32 fit the KV cache"


@pytest.mark.more
def test_capacity_router_with_less_knowledge_is_lower() -> None:
    draws = drawn(1500, 1)
    least, shortest, two, at_random = (
        capacity(replace(PREFILL, replicas=8, router=router), draws, LatencyBound("p95", 0.5))
        for router in ("least_work", "join_shortest_queue", "power_of_two", "random")
    )
    assert least > shortest > 0.99 * two > 1.05 * at_random


def test_capacity_of_bursty_arrivals_is_lower() -> None:
    even, bursty = (capacity(PREFILL, CHAT, LatencyBound("p95", 0.5), burst=burst) for burst in (1.0, 4.0))
    assert bursty < 0.9 * even


def test_capacity_shared_queue_grows_faster_than_replicas() -> None:
    one, four = (capacity(replace(PREFILL, replicas=n), CHAT, LatencyBound("p95", 0.4)) for n in (1, 4))
    assert four > 4.3 * one


def test_capacity_under_impossible_bound_is_zero() -> None:
    assert capacity(PREFILL, CHAT, LatencyBound("p95", 0.05)) == 0.0, "a lone prompt takes longer"
    assert capacity(CHATTING, CHAT, LatencyBound("p95", 1.0, 0.01)) == 0.0, "a lone token takes longer"
    assert capacity(replace(CHATTING, kv_tokens=1000), CHAT, LatencyBound("p95")) == 0.0, (
        "longer than the cache"
    )


def test_capacity_encoder_with_all_cached_is_infinite() -> None:
    station = Station("e", 1, "E", encode=ENCODE)
    assert capacity(station, drawn(100, 1), LatencyBound("p95", 0.1)) == math.inf


def test_cached_embeddings_leave_room_for_others() -> None:
    station = Station("e", 1, "E", encode=ENCODE)
    new, cached = SampledRequest(100, 0, (1024,), 1, 0.0), SampledRequest(100, 0, (), 1, 0.0)
    for bound in (LatencyBound("p95"), LatencyBound("p95", 0.6)):
        all_new, one_in_five = (capacity(station, draws, bound) for draws in ([new], [new] + [cached] * 4))
        assert one_in_five == pytest.approx(5 * all_new, rel=0.15)


def test_capacity_without_draws_is_refused() -> None:
    with pytest.raises(ValueError, match="samples is empty"):
        capacity(PREFILL, [], LatencyBound("p95"))


def test_capacity_equal_question_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = drawn(700, 1)
    first = capacity(PREFILL, draws, LatencyBound("p95", 0.5))
    monkeypatch.setattr("cornplug.planner.perf_model.capacity.simulate", None)
    assert capacity(replace(PREFILL, name="another"), list(draws), LatencyBound("p95", 0.5)) == first


@settings(max_examples=25)
@given(
    st.sampled_from(["P", "PD", "D", "E", "EPD", "PDG"]),
    st.integers(1, 12),
    st.floats(0.05, 5.0),
    st.floats(0.02, 0.1),
    st.sampled_from(["mean", "p50", "p95", "p99"]),
)
def test_capacity_looser_bounds_or_more_replicas_never_screen_lower(
    tasks: str, replicas: int, seconds: float, tpot_s: float, percentile: str
) -> None:
    station = Station(
        "s",
        replicas,
        tasks,
        steps=STEPS,
        encode=ENCODE,
        generate=PiecewiseCurve.line(0.1, 1.0),
        kv_tokens=200_000,
    )
    draws = drawn(1000, 200, patches=1024, units=0.5, n=40)

    def screened(station: Station, *bounds: float) -> float:
        return capacity(station, draws, LatencyBound(percentile, *bounds), confirm=False)

    tight = screened(station, seconds, tpot_s)
    # The search ends within 2 %.
    assert screened(station, 1.5 * seconds, 1.5 * tpot_s) >= 0.97 * tight
    assert screened(replace(station, replicas=replicas + 1), seconds, tpot_s) >= 0.97 * tight
    assert screened(station) >= 0.97 * tight or percentile == "mean"


@pytest.mark.parametrize("confirm", [False, True])
def test_capacity_pipeline_matches_queue(confirm: bool) -> None:
    # A prompt takes 1 s on one stage after the other; the queue is that of one stage, 0.5 s.
    steps = EngineStepTimes(PiecewiseCurve.line(0.0, 0.5 / 1024), PiecewiseCurve.line(0.02, 0.0), pipeline=2)
    station = Station("p", 1, "P", steps=steps, chunk_tokens=1024)
    bound = LatencyBound("mean", ttft_pipeline(1.0, 1.2))
    assert capacity(station, [SampledRequest(1024, 0, (), 1, 0.0)], bound, confirm=confirm) == pytest.approx(
        1.2, rel=0.06
    )
