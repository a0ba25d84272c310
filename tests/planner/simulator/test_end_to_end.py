"""Whole plans simulated: times along a path, shares, overload, and when runs end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from expected_errors import expect_error

from cornplug.errors import ConfigError
from cornplug.planner.inputs.request_sampling import SampledRequest
from cornplug.planner.perf_model.engine_spec import EngineStepTimes, PiecewiseCurve
from cornplug.planner.perf_model.simulator import TrafficClass
from cornplug.planner.perf_model.stations import QueuePeak, Station
from cornplug.planner.pipeline.validate import SimulatedTimes, simulate_plan
from cornplug.planner.plan import PlanRoute, RouteStage

STEPS = EngineStepTimes(
    PiecewiseCurve.line(0.01, 1e-4), PiecewiseCurve.line(0.02, 1e-3), request_overhead_s=0.5
)
ONE = [SampledRequest(100, 0, (200,), 3, 0.0)]
STATIONS = {
    "vit": Station("vit", 1, "E", encode=PiecewiseCurve((1.0,), (1e-3,)), max_patches=400),
    "p": Station("p", 2, "P", steps=STEPS),
    "d": Station("d", 2, "D", steps=STEPS),
    "mono": Station("mono", 1, "EPD", steps=STEPS, encode=PiecewiseCurve((1.0,), (1e-3,))),
}
APART = [
    RouteStage(tasks="E", groups={"vit": 1}),
    RouteStage(tasks="P", groups={"p": 1}),
    RouteStage(tasks="D", groups={"d": 1}),
]
TOGETHER = [RouteStage(tasks="EPD", groups={"mono": 1})]


def route(stages: list[RouteStage], rate: float = 1.0, request: str = "a") -> PlanRoute:
    return PlanRoute(app="chat", request=request, structure="x", rate=rate, stages=stages)


def classes(
    rate: float, burst: float = 1.0, samples: list[SampledRequest] = ONE, request: str = "a"
) -> dict[str, TrafficClass]:
    return {f"chat/{request}": TrafficClass(f"chat/{request}", rate, burst, samples)}


def transfer(before: str, after: str, draw: SampledRequest) -> float:
    return {"EP": 0.01, "PD": draw.prompt_tokens * 1e-3}[before + after]


def run(
    routes: list[PlanRoute], traffic_classes: dict[str, TrafficClass], requests: int = 400
) -> dict[str, SimulatedTimes]:
    return simulate_plan(
        STATIONS, routes, traffic_classes, transfer, requests=requests, seed=0, max_runs=1
    ).times


def test_simulate_plan_lone_request_takes_stages_and_transfers() -> None:
    got = run([route(APART)], classes(1e-3))["chat/a"]
    ttft = 0.5 + 0.2 + 0.01 + 0.02
    assert got.ttft.p95 == pytest.approx(ttft)
    assert got.tpot.p95 == pytest.approx((0.1 + 0.042) / 2)
    assert got.e2e.mean == pytest.approx(ttft + 0.1 + 0.042, abs=1e-3)
    assert got.finished == pytest.approx(1e-3, rel=0.15)


def test_requests_part_by_the_rates_of_routes_and_by_weights() -> None:
    """3 of 4 requests take the monolith, whose TTFT lacks the 0.01 s between E and P."""
    got = run([route(APART, 5.0), route(TOGETHER, 15.0)], classes(1e-3), requests=4000)["chat/a"]
    assert got.ttft.mean == pytest.approx(0.5 + 0.2 + 0.02 + 0.25 * 0.01, abs=5e-4)


def test_simulate_plan_single_token_class_has_no_tpot() -> None:
    got = run([route(APART)], classes(1e-3, samples=[replace(ONE[0], output_tokens=1)]))["chat/a"]
    assert got.tpot.p95 is None
    assert got.e2e.p50 == pytest.approx(0.5 + 0.2 + 0.01 + 0.02 + 0.1)


def test_simulate_plan_overload_finishes_at_slowest_station() -> None:
    got = run([route(APART)], classes(20.0), requests=2000)["chat/a"]
    assert got.finished == pytest.approx(5.0, rel=0.03)
    assert got.ttft.p95 is not None
    assert got.ttft.p95 > 50


def test_classes_share_stations() -> None:
    """Its neighbour's long prompts are what a short one waits for."""
    short, long = [SampledRequest(10, 0, (), 1, 0.0)], [SampledRequest(20_000, 0, (), 1, 0.0)]
    routes = [route([APART[1]]), route([APART[1]], request="b")]
    isolated = run(routes[:1], classes(1.0, samples=short))
    both = run(routes, classes(1.0, samples=short) | classes(0.6, samples=long, request="b"))
    assert isolated["chat/a"].ttft.p95 == pytest.approx(0.511, rel=0.02)
    assert both["chat/a"].ttft.p95 is not None
    assert both["chat/a"].ttft.p95 > 1.0


def test_simulate_plan_equal_seed_gives_equal_times() -> None:
    samples = [
        SampledRequest(int(n), 0, (int(n),), 5, 0.0) for n in np.random.default_rng(0).integers(10, 900, 50)
    ]
    traffic_classes = classes(2.0, 2.0, samples)
    first, again = (run([route(APART)], traffic_classes)["chat/a"] for _ in range(2))
    assert first == again
    other = simulate_plan(
        STATIONS, [route(APART)], traffic_classes, transfer, requests=400, seed=1, max_runs=1
    ).times["chat/a"]
    assert other.ttft.mean != first.ttft.mean


@pytest.mark.parametrize(
    ("stages", "request_name", "field"),
    [
        ([RouteStage(tasks="P", groups={"q": 1})], "a", "routes: chat/a"),
        (TOGETHER, "z", "routes: chat/z"),
    ],
)
def test_simulate_plan_route_of_unknown_names_is_refused(
    stages: list[RouteStage], request_name: str, field: str
) -> None:
    with expect_error(ConfigError, field=field):
        run([route(stages, request=request_name)], classes(1.0))


def test_simulate_plan_without_routes_is_empty() -> None:
    assert run([], classes(1.0)) == {}


def test_simulate_plan_burst_has_queue_of_its_station() -> None:
    got = simulate_plan(
        STATIONS, [route(TOGETHER)], classes(5.0, 8.0), transfer, requests=300, seed=0, max_runs=1
    )
    assert got.queues["mono"].requests > 3
    assert got.queues["p"] == QueuePeak()


@pytest.mark.more
def test_simulate_plan_repeated_runs_narrow_percentiles() -> None:
    """Single runs of an uneven load spread more, from seed to seed, than `simulate_plan` of many."""
    samples = [
        SampledRequest(int(n), 0, (), 40, 0.0) for n in np.random.default_rng(0).integers(10, 9000, 50)
    ]
    traffic_classes = classes(1.6, 2.0, samples)
    stations, path = {"p": STATIONS["p"]}, [route([APART[1]])]

    def p95(seed: int, **more: int) -> float:
        got = simulate_plan(stations, path, traffic_classes, transfer, requests=500, seed=seed, **more).times
        assert got["chat/a"].ttft.p95 is not None
        return got["chat/a"].ttft.p95

    once = [p95(seed, max_runs=1) for seed in range(6)]
    many = [p95(seed) for seed in range(6)]
    assert np.std(many) < 0.7 * np.std(once)
