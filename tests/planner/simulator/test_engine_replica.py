"""Replicas with attention-DP groups: each has a queue and a batch, and all compute in step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cornplug.planner.inputs.request_sampling import SampledRequest
from cornplug.planner.perf_model.engine_spec import EngineStepTimes, GroupPrefill, PiecewiseCurve
from cornplug.planner.perf_model.simulator import simulate
from cornplug.planner.perf_model.stations import JobOutcomes, Station, StationJob, StationVisit

STEPS = EngineStepTimes(PiecewiseCurve.line(0.01, 1e-4), PiecewiseCurve.line(0.02, 1e-3), kv_token_s=1e-6)
PLAIN = replace(STEPS, kv_token_s=0.0)


def run(station: Station, *jobs: tuple[float, int, int]) -> JobOutcomes:
    """`jobs`: arrival, prompt and output tokens."""
    return simulate(
        [station],
        [StationJob(at, 0, SampledRequest(p, 0, (), o, 0.0), (StationVisit(0),)) for at, p, o in jobs],
    )


def test_engine_replica_prompt_of_one_group_delays_tokens_of_others() -> None:
    got = run(Station("llm", 1, "PD", steps=PLAIN, groups=2), (0.0, 100, 3), (0.025, 200, 1))
    # Prefill to 0.020, a token to 0.041; the other group's prompt then takes 0.030, and so does this token.
    assert got.ttft.tolist() == pytest.approx([0.02, 0.071 - 0.025])
    assert got.e2e[0] == pytest.approx(0.071)


def test_engine_replica_groups_prefill_side_by_side() -> None:
    two = run(Station("llm", 1, "PD", steps=PLAIN, groups=2), (0.0, 100, 1), (0.0, 300, 1))
    # Both wait for the longer one.
    assert two.ttft.tolist() == pytest.approx([0.04, 0.04])
    one = run(Station("llm", 1, "PD", steps=PLAIN, chunk_tokens=300), (0.0, 100, 1), (0.0, 300, 1))
    assert one.ttft[1] == pytest.approx(0.04 + 0.02), "100 + 200, then 100 tokens"


def test_engine_replica_lone_prompt_is_quicker_than_one_in_each_group() -> None:
    common = PiecewiseCurve.line(0.0, 6e-5)
    group = GroupPrefill(common, PiecewiseCurve.line(0.01, 1e-4 - 3e-5))
    station = Station("llm", 1, "PD", steps=replace(PLAIN, group=group), groups=2)
    # 0.01 + 300 tokens at 4e-5 of its own, and their experts at 3e-5: there are half as many on average.
    assert run(station, (0.0, 300, 1)).ttft[0] == pytest.approx(0.01 + 300 * 7e-5)
    assert run(station, (0.0, 300, 1), (0.0, 300, 1)).ttft.tolist() == pytest.approx([0.04, 0.04])


def test_engine_replica_kv_and_batch_are_of_each_group() -> None:
    jobs = [(0.0, 100, 11)] * 4
    fits = run(Station("llm", 1, "PD", steps=PLAIN, groups=2, kv_tokens=222, max_batch=2), *jobs)
    assert np.ptp(fits.e2e) == 0, "two requests a group"
    waits = run(Station("llm", 1, "PD", steps=PLAIN, groups=2, kv_tokens=221, max_batch=2), *jobs)
    assert np.ptp(waits.e2e) > 0.2


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 400), st.integers(1, 30)), min_size=1, max_size=8),
    st.integers(2, 4),
)
def test_engine_replica_equal_groups_are_as_one(jobs: list[tuple[float, int, int]], groups: int) -> None:
    """Each group with the same requests: as fast as a replica that has those of one."""
    jobs.sort()
    # All of a moment come to different groups, for those have equally many.
    station = Station("llm", 1, "PD", steps=STEPS, chunk_tokens=256)
    alone = run(station, *jobs)
    together = run(replace(station, groups=groups), *(job for job in jobs for _ in range(groups)))
    for name in ("ttft", "e2e", "tpot"):
        np.testing.assert_array_equal(getattr(together, name), np.repeat(getattr(alone, name), groups))
