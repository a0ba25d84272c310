"""A tier's times as the bounds of a class: at each percentile of its SLO."""

from __future__ import annotations

from math import inf

import pytest

from cornplug.planner.inputs.request_tables import (
    IdleReplica,
    IdleTimes,
    LatencyBound,
    PercentileBounds,
    Slo,
    stage_bound,
)


def test_stage_bound_of_one_percentile_is_tier_s_times() -> None:
    assert stage_bound(Slo(percentile="p90", ttft_s=1.0), 0.4, inf) == LatencyBound("p90", 0.4)


def test_stage_bound_of_other_percentile_is_in_proportion() -> None:
    also = [PercentileBounds(percentile="p99", ttft_s=3.0), PercentileBounds(percentile="p90", tpot_s=0.06)]
    slo = Slo(percentile="p50", ttft_s=1.0, tpot_s=0.04, also=also)
    bounds = {one.percentile: (one.seconds, one.tpot_s) for one in stage_bound(slo, 0.4, 0.02).all_bounds}
    assert bounds == {"p50": (0.4, 0.02), "p99": (0.4 * 3.0, None), "p90": (None, 0.02 * 0.06 / 0.04)}


def test_stage_bound_without_bound_on_ttft_follows_whole_answer() -> None:
    slo = Slo(percentile="p50", e2e_s=10.0, also=[PercentileBounds(percentile="p99", e2e_s=25.0)])
    bounds = {one.percentile: (one.seconds, one.tpot_s) for one in stage_bound(slo, 2.0, 0.1).all_bounds}
    assert bounds == {"p50": (2.0, 0.1), "p99": (5.0, 0.25)}


def test_stage_bound_of_class_without_slo_is_tier_of_another() -> None:
    assert stage_bound(Slo(), 0.4, 0.02) == LatencyBound("p95", 0.4, 0.02)
    assert not stage_bound(Slo(), inf, inf).has_bounds


def test_stage_bound_of_slowdown_is_times_idle_request() -> None:
    """At half of the time to the first token, half of the slowdown is left; the other stage has the rest."""
    slo = Slo(percentile="p50", ttft_slowdown=2.0, idle=IdleReplica(gpu="H100"))
    idle = IdleTimes(ttft_s=0.2, tpot_s=0.02, e2e_s=4.2)
    assert stage_bound(slo, 0.2, inf, idle) == LatencyBound("p50", pytest.approx(1.0), relative=True)


def test_stage_bound_of_slow_answer_is_told_for_each_token() -> None:
    slo = Slo(percentile="p50", e2e_slowdown=1.5, idle=IdleReplica(gpu="H100"))
    idle = IdleTimes(ttft_s=0.2, tpot_s=0.02, e2e_s=4.2)
    bound = stage_bound(slo, 0.5, 0.028, idle)
    assert (bound.seconds, bound.tpot_s) == (pytest.approx(2.5), pytest.approx(1.4))
