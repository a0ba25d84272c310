"""The simulator against queues whose answers are known: M/M/c and M/D/1 within 2 %.

Service times and gaps are their distributions' quantiles in random order (`simulator`), which
halves the spread from seed to seed: the standard error of the means below is under 0.5 %.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from cornplug.planner.inputs.request_sampling import SampledRequest
from cornplug.planner.perf_model import simulator
from cornplug.planner.perf_model.analytic_load import erlang_c
from cornplug.planner.perf_model.engine_spec import EngineStepTimes, PiecewiseCurve
from cornplug.planner.perf_model.simulator import simulate
from cornplug.planner.perf_model.stations import JobOutcomes, Station, StationJob, StationVisit

from .closed_forms import ttft_single, wait_exceeds

HERE = (StationVisit(0),)
SECONDS = PiecewiseCurve((1.0,), (1.0,))


def exponential(n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Quantiles of the exponential distribution with mean 1, in random order."""
    quantiles = -np.log1p(-(np.arange(n) + 0.5) / n)
    return rng.permutation(quantiles / quantiles.mean())


def queue(
    servers: int, rate: float, service_s: NDArray[np.float64], rng: np.random.Generator, **station: str
) -> JobOutcomes:
    at = simulator.arrival_times(rate, 1.0, len(service_s), rng)
    jobs = [
        StationJob(t, 0, SampledRequest(1, 0, (), 1, units), HERE)
        for t, units in zip(at.tolist(), service_s.tolist(), strict=True)
    ]
    return simulate([Station("g", servers, "G", generate=SECONDS, **station)], jobs)  # type: ignore[arg-type]


def check_mmc(servers: int, load: float, n: int, seed: int, tolerance: float = 0.02) -> NDArray[np.float64]:
    """Returns the requests' times in the system."""
    rng = np.random.default_rng(seed)
    service_s = exponential(n, rng)
    rate = servers * load
    got = queue(servers, rate, service_s, rng).e2e
    wait = got - service_s
    assert got.mean() == pytest.approx(1 + erlang_c(servers, rate) / (servers - rate), rel=tolerance)
    assert (wait > 1e-9).mean() == pytest.approx(erlang_c(servers, rate), rel=tolerance)
    # Half of those who wait do so for longer than this.
    median = math.log(2) / (servers - rate)
    assert (wait > median).mean() == pytest.approx(
        wait_exceeds(servers, rate, 1.0, median), rel=2 * tolerance
    )
    return got


@pytest.mark.parametrize(("servers", "load", "n"), [(3, 0.6, 40_000), (8, 0.7, 30_000)])
def test_simulate_mmc_matches_closed_forms(servers: int, load: float, n: int) -> None:
    check_mmc(servers, load, n, seed=0)


@pytest.mark.more
def test_simulate_mm1_matches_exponential_quantiles() -> None:
    """Time in M/M/1 is exponential, too, with mean 1 / (service rate - arrival rate)."""
    got = check_mmc(1, 0.5, 90_000, seed=0)
    for share in (0.5, 0.95, 0.99):
        assert np.quantile(got, share) == pytest.approx(-math.log(1 - share) / 0.5, rel=0.04)


def test_simulate_md1_matches_closed_form() -> None:
    rng = np.random.default_rng(0)
    assert queue(1, 0.5, np.ones(50_000), rng).e2e.mean() == pytest.approx(ttft_single(1.0, 0.5), rel=0.02)


@pytest.mark.more
@pytest.mark.parametrize("servers", [1, 4, 16])
def test_simulate_mmc_under_high_load_matches_closed_forms(servers: int) -> None:
    check_mmc(servers, 0.8, 500_000, seed=1)


STEPS = EngineStepTimes(PiecewiseCurve.line(0.0, 1e-3), PiecewiseCurve((1.0,), (0.1,)))
ONE_AT_A_TIME = {
    "E": (
        Station("e", 1, "E", encode=PiecewiseCurve((1.0,), (1e-3,)), max_patches=1),
        SampledRequest(1, 0, (1000,), 1, 0.0),
    ),
    "P": (
        Station("p", 1, "P", steps=STEPS, chunk_tokens=1, chunked=False),
        SampledRequest(1000, 0, (), 1, 0.0),
    ),
    "D": (Station("d", 1, "D", steps=STEPS, max_batch=1), SampledRequest(1, 0, (), 11, 0.0)),
    "PD": (Station("pd", 1, "PD", steps=STEPS, max_batch=1), SampledRequest(500, 0, (), 6, 0.0)),
}


@pytest.mark.parametrize("tasks", ONE_AT_A_TIME)
def test_simulate_serial_replicas_of_every_kind_are_one_queue(tasks: str) -> None:
    """So that the closed forms speak of all of them."""
    station, draw = ONE_AT_A_TIME[tasks]
    at = simulator.arrival_times(0.8, 1.0, 3000, np.random.default_rng(1)).tolist()
    got = simulate([station], [StationJob(t, 0, draw, HERE) for t in at]).e2e
    free, expected = 0.0, []
    for t in at:
        free = max(free, t) + 1.0
        expected.append(free - t)
    np.testing.assert_allclose(got, expected, atol=1e-8)
