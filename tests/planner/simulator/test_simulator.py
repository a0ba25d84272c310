"""The simulator's stations, by hand-made cases and against the same stations on simpy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from expected_errors import expect_error
from hypothesis import given, settings
from hypothesis import strategies as st
from planner import simpy_stations
from time_limits import TimeLimits

from cornplug.errors import ConfigError
from cornplug.planner.inputs.request_sampling import SampledRequest
from cornplug.planner.perf_model.engine_spec import EngineStepTimes, PiecewiseCurve
from cornplug.planner.perf_model.simulator import simulate
from cornplug.planner.perf_model.stations import JobOutcomes, QueuePeak, Station, StationJob, StationVisit

STEPS = EngineStepTimes(PiecewiseCurve.line(0.01, 1e-4), PiecewiseCurve.line(0.02, 1e-3))
HERE = (StationVisit(0),)


def draw(
    prompt: int = 100, output: int = 1, cached: int = 0, patches: tuple[int, ...] = (), units: float = 0.0
) -> SampledRequest:
    return SampledRequest(prompt, cached, patches, output, units)


def run(station: Station, *jobs: tuple[float, SampledRequest]) -> JobOutcomes:
    return simulate([station], [StationJob(at, 0, d, HERE) for at, d in jobs])


# By hand --------------------------------------------------------------------------------------


def test_simulate_prompt_over_chunk_shares_last_iteration() -> None:
    station = Station("llm/P", 1, "P", steps=STEPS, chunk_tokens=100)
    got = run(station, (0.0, draw(150)), (0.001, draw(50)))
    # 100 tokens, then 50 + 50: both leave at the end of the second iteration.
    np.testing.assert_allclose(got.ttft, [0.04, 0.039])


def test_simulate_unchunked_prompts_share_iteration_if_whole() -> None:
    station = Station("llm/P", 1, "P", steps=STEPS, chunk_tokens=100, chunked=False)
    got = run(station, (0.0, draw(150)), (0.001, draw(60)), (0.002, draw(60)))
    np.testing.assert_allclose(got.ttft + np.array([0, 0.001, 0.002]), [0.025, 0.041, 0.057])


def test_cached_tokens_are_not_computed_but_decoding_reads_them() -> None:
    steps = dataclasses.replace(STEPS, kv_token_s=1e-5, request_overhead_s=0.5)
    got = run(Station("llm/PD", 1, "PD", steps=steps), (0.0, draw(100, output=3, cached=60)))
    prefill = 0.01 + 40e-4
    decode = 2 * 0.021 + 1e-5 * (100 + 101)
    assert got.ttft[0] == pytest.approx(0.5 + prefill)
    assert got.tpot[0] == pytest.approx(decode / 2)
    assert got.e2e[0] == pytest.approx(0.5 + prefill + decode)
    assert got.stage_s[0, 0] == pytest.approx(prefill + decode)


def test_simulate_arrival_joins_after_current_decode() -> None:
    got = run(Station("llm/PD", 1, "PD", steps=STEPS), (0.0, draw(100, output=11)), (0.03, draw(200)))
    # Prefill ends at 0.02, iterations of 0.021 end at 0.041, 0.062...; the second prompt's has
    # 200 tokens and one that decodes.
    assert got.ttft[1] + 0.03 == pytest.approx(0.041 + 0.01 + 201e-4)


def test_decode_admits_by_batch_and_by_kv() -> None:
    two = [(0.0, draw(100, output=3)), (0.0, draw(100, output=3))]
    alone, together = 2 * 0.021, 2 * 0.022
    by_batch = run(Station("llm/D", 1, "D", steps=STEPS, max_batch=1), *two)
    np.testing.assert_allclose(by_batch.e2e, [alone, 2 * alone])
    by_kv = run(Station("llm/D", 1, "D", steps=STEPS, kv_tokens=205), *two)
    np.testing.assert_allclose(by_kv.e2e, [alone, 2 * alone])
    both = run(Station("llm/D", 1, "D", steps=STEPS, kv_tokens=206), *two)
    np.testing.assert_allclose(both.e2e, [together, together])


def test_items_share_batches_and_a_request_leaves_with_its_last_item() -> None:
    station = Station("vit/E", 1, "E", encode=PiecewiseCurve.line(1.0, 0.01), max_patches=100)
    got = run(
        station,
        (0.0, draw(patches=(60, 60))),
        (0.5, draw(patches=(30, 300))),
        (0.6, draw()),
    )
    # 60 | 60 + 30 | 300, which is larger than a batch may be; what has no item does not wait.
    np.testing.assert_allclose(got.e2e, [1.6 + 1.9, 1.6 + 1.9 + 4.0 - 0.5, 0.0])


def test_simulate_engine_encodes_in_iteration_of_first_chunk() -> None:
    station = Station(
        "llm/EPD", 1, "EPD", steps=STEPS, encode=PiecewiseCurve.line(1.0, 0.01), chunk_tokens=100
    )
    got = run(station, (0.0, draw(150, patches=(50, 50))))
    assert got.ttft[0] == pytest.approx(2.0 + 0.02 + 0.015)


def test_simulate_generating_monolith_is_serial() -> None:
    station = Station("omni/PDG", 1, "PDG", steps=STEPS, generate=PiecewiseCurve((1.0,), (5.0,)))
    got = run(station, (0.0, draw(100, output=3, units=2)), (1.0, draw(100, output=1, units=1)))
    np.testing.assert_allclose(got.ttft, [0.02, 0.02 + 0.042 + 10.0 - 1.0 + 0.02])
    np.testing.assert_allclose(got.tpot, [0.021, np.nan])
    np.testing.assert_allclose(got.e2e, [10.062, 10.062 - 1.0 + 0.02 + 5.0])


def test_simulate_path_counts_transfers_and_first_token_once() -> None:
    stations = [
        Station("vit/E", 1, "E", encode=PiecewiseCurve((1.0,), (1e-3,))),
        Station("llm/P", 1, "P", steps=dataclasses.replace(STEPS, request_overhead_s=0.1)),
        Station("llm/D", 1, "D", steps=dataclasses.replace(STEPS, request_overhead_s=0.1)),
    ]
    visits = (StationVisit(0), StationVisit(1, 0.02), StationVisit(2, 0.3))
    got = simulate(stations, [StationJob(5.0, 7, draw(100, output=3, patches=(200,)), visits)])
    np.testing.assert_allclose(got.stage_s, [[0.2, 0.02, 0.042]])
    assert got.ttft[0] == pytest.approx(0.1 + 0.2 + 0.02 + 0.02)
    assert got.tpot[0] == pytest.approx((0.3 + 0.042) / 2)
    assert got.e2e[0] == pytest.approx(0.1 + 0.2 + 0.02 + 0.02 + 0.3 + 0.042)
    assert list(got.kind) == [7]


def test_simulate_priority_goes_before_those_that_wait() -> None:
    """The first runs; the third came last and leaves second."""
    station = Station("llm/P", 1, "P", steps=STEPS, chunk_tokens=100)
    jobs = [StationJob(at, 0, draw(100), HERE, priority) for at, priority in ((0, 0), (0.001, 0), (0.002, 2))]
    np.testing.assert_allclose(simulate([station], jobs).ttft, [0.02, 0.059, 0.038])


def test_simulate_queue_peak_counts_waiting_and_prefilling() -> None:
    station = Station("llm/P", 1, "P", steps=STEPS, chunk_tokens=100)
    got = run(station, *[(0.001 * i, draw(100, cached=20)) for i in range(4)])
    # The first is computed while three wait; cached tokens count, as in vLLM.
    assert got.queues == {"llm/P": QueuePeak(3, 400)}


def test_simulate_least_work_router_sees_seconds() -> None:
    """A long prompt and two short ones: only least_work sees that one queue is longer in seconds."""
    jobs = [(0.0, draw(10_000)), (0.0, draw(10)), (0.001, draw(2_000))]
    third = {
        router: run(Station("p", 2, "P", steps=STEPS, router=router, chunk_tokens=20_000), *jobs).ttft[2]
        for router in ("least_work", "join_shortest_queue")
    }
    assert third["least_work"] < 0.3
    assert third["join_shortest_queue"] > 0.9


def test_simulate_power_of_two_router_takes_shorter_of_two() -> None:
    """With two replicas it is the shortest queue."""
    jobs = [(0.01 * i, draw(1000 if i % 2 else 100)) for i in range(40)]
    both = [
        run(Station("p", 2, "P", steps=STEPS, router=router), *jobs).e2e.mean()  # type: ignore[arg-type]
        for router in ("join_shortest_queue", "power_of_two")
    ]
    assert both[0] == pytest.approx(both[1], rel=0.2)


def test_simulate_random_router_depends_on_seed() -> None:
    jobs = [StationJob(i * 0.01, 0, draw(100 + i), HERE) for i in range(200)]
    station = Station("p", 4, "P", steps=STEPS, router="random")
    first, same, other = (simulate([station], jobs, seed=s).ttft for s in (1, 1, 2))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)


def test_simulate_busy_is_share_between_first_and_last_arrival() -> None:
    station = Station("tts/G", 2, "G", generate=PiecewiseCurve((1.0,), (1.0,)))
    got = run(station, (10.0, draw(units=2)), (14.0, draw(units=9)))
    assert got.busy == {"tts/G": pytest.approx(2.0 / 8.0)}


def test_simulate_no_jobs_is_empty_outcome() -> None:
    assert simulate([Station("tts/G", 1, "G", generate=PiecewiseCurve((1.0,), (1.0,)))], []).e2e.shape == (0,)


# What it is told -------------------------------------------------------------------------------


def test_simulate_request_over_kv_tokens_is_named() -> None:
    with expect_error(ConfigError, field="llm/D.kv_tokens", match="120.*100"):
        run(Station("llm/D", 1, "D", steps=STEPS, kv_tokens=100), (0.0, draw(100, output=20)))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tasks": "PD"}, "x.steps"),
        ({"tasks": "EP", "steps": STEPS}, "x.encode"),
        ({"tasks": "G"}, "x.generate"),
        (
            {"tasks": "DP", "steps": STEPS},
            "x.tasks",
        ),
        ({"tasks": "P", "steps": STEPS, "replicas": 0}, "x.replicas"),
    ],
)
def test_station_invalid_fields_are_refused(fields: dict[str, object], field: str) -> None:
    with expect_error(ConfigError, field=field):
        Station(**{"name": "x", "replicas": 1, **fields})  # type: ignore[arg-type]


def test_simulate_unsorted_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match="sorted"):
        run(Station("p", 1, "P", steps=STEPS), (1.0, draw()), (0.0, draw()))


# Against simpy ---------------------------------------------------------------------------------


def random_jobs(seed: int, n: int, rate: float, visits: tuple[StationVisit, ...]) -> list[StationJob]:
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, n))
    jobs = []
    for t in at:
        prompt = int(rng.lognormal(6, 1)) + 2
        items = tuple(int(p) for p in rng.integers(1, 900, rng.integers(0, 4)))
        cached = int(rng.integers(0, prompt))
        jobs.append(
            StationJob(
                float(t), 0, SampledRequest(prompt, cached, items, int(rng.geometric(0.05)), 0.0), visits
            )
        )
    return jobs


STEEP = EngineStepTimes(
    PiecewiseCurve((1, 128, 1024), (0.01, 0.02, 0.11)),
    PiecewiseCurve((1, 8, 64), (0.01, 0.012, 0.03)),
    2e-7,
    1.1,
    0.0,
)
NETWORKS = {
    "E": ["E"],
    "P": ["P"],
    "D": ["D"],
    "PD": ["PD"],
    "E-P-D": ["E", "P", "D"],
    "E-PD": ["E", "PD"],
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("rate", "kv"), [(3.0, 1 << 40), (12.0, 40_000)])
def test_simulate_random_network_matches_simpy(network: str, rate: float, kv: int) -> None:
    stations = [
        Station(
            tasks,
            1,
            tasks,
            steps=STEEP,
            encode=PiecewiseCurve.line(0.005, 2e-5),
            max_patches=1500,
            chunk_tokens=512,
            max_batch=24,
            kv_tokens=kv,
        )
        for tasks in NETWORKS[network]
    ]
    visits = tuple(StationVisit(i, 0.003 * i) for i in range(len(stations)))
    jobs = random_jobs(len(network), 300, rate, visits)
    ours = simulate(stations, jobs)
    theirs = simpy_stations.run(stations, jobs)
    np.testing.assert_allclose(ours.e2e, [r.left_at[-1] - r.job.at_s for r in theirs], rtol=0, atol=1e-9)
    if "P" in network:
        np.testing.assert_allclose(ours.ttft, [r.first_token - r.job.at_s for r in theirs], rtol=0, atol=1e-9)


# Laws ------------------------------------------------------------------------------------------

DRAWS = st.builds(
    draw,
    prompt=st.integers(1, 3000),
    output=st.integers(1, 60),
    patches=st.lists(st.integers(1, 3000), max_size=3).map(tuple),
    units=st.floats(0, 5),
)
ARRIVALS = st.lists(st.tuples(st.floats(0, 3), DRAWS), min_size=1, max_size=30).map(
    lambda rows: sorted(rows, key=lambda row: row[0])
)


def any_station(tasks: str, replicas: int) -> Station:
    return Station(
        tasks,
        replicas,
        tasks,
        steps=STEEP,
        encode=PiecewiseCurve.line(0.005, 2e-5),
        generate=PiecewiseCurve((1.0,), (0.1,)),
        kv_tokens=3060,
        chunk_tokens=512,
        max_batch=8,
        max_patches=2000,
    )


@given(
    ARRIVALS,
    st.sampled_from(["E", "P", "EP", "D", "PD", "EPD", "G", "PDG", "EPDG"]),
    st.integers(1, 4),
    st.sampled_from(["least_work", "join_shortest_queue", "power_of_two", "random"]),
)
@settings(max_examples=60)
def test_simulate_every_job_ends_no_sooner_than_alone(
    rows: list[tuple[float, SampledRequest]], tasks: str, replicas: int, router: str
) -> None:
    station = dataclasses.replace(any_station(tasks, replicas), router=router)  # type: ignore[arg-type]
    got = run(station, *rows)
    alone = np.array([run(station, (0.0, d)).e2e[0] for _, d in rows])
    assert not np.isnan(got.e2e).any()
    assert (got.e2e >= alone - 1e-9).all()
    assert (got.ttft <= got.e2e + 1e-12).all()
    np.testing.assert_allclose(got.stage_s[:, 0], got.e2e)


@given(ARRIVALS, st.sampled_from(["G", "PDG"]))
@settings(max_examples=40)
def test_simulate_serial_station_is_fifo_and_never_idle(
    rows: list[tuple[float, SampledRequest]], tasks: str
) -> None:
    station = any_station(tasks, 1)
    got = run(station, *rows)
    free = 0.0
    for (at, d), e2e in zip(rows, got.e2e, strict=True):
        free = max(free, at) + run(station, (0.0, d)).e2e[0]
        assert at + e2e == pytest.approx(free)


@given(ARRIVALS, st.integers(1, 3))
@settings(max_examples=40)
def test_simulate_one_more_replica_delays_no_job(
    rows: list[tuple[float, SampledRequest]], replicas: int
) -> None:
    """True of each request at serial replicas with least_work, which is one queue before all."""
    fewer, more = (run(any_station("PDG", n), *rows).e2e for n in (replicas, replicas + 1))
    assert (more <= fewer + 1e-9).all()


def test_simulate_8400_requests_take_little_cpu_time(within: TimeLimits) -> None:
    jobs = random_jobs(3, 8400, 60.0, HERE)
    station = dataclasses.replace(any_station("PD", 20), kv_tokens=200_000, chunk_tokens=2048, max_batch=64)
    with within.cpu(1.5, "0.25 s on a quiet core"):
        got = simulate([station], jobs)
    assert not np.isnan(got.e2e).any()
