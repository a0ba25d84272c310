"""Curves and iteration times."""

from __future__ import annotations

import numpy as np
import pytest

from cornplug.planner.perf_model.engine_spec import ANY_CLASS, CellHardware, EngineStepTimes, PiecewiseCurve


def test_piecewise_curve_points_are_met_and_ends_extended() -> None:
    curve = PiecewiseCurve.from_points([10, 20, 40], [1.0, 3.0, 4.0])
    assert [curve(x) for x in (10, 15, 20, 30, 40, 60)] == [1.0, 2.0, 3.0, 3.5, 4.0, 5.0]
    assert curve(0) == 0.0, "-1 on the line: no time is negative"
    assert PiecewiseCurve.from_points([8], [2.0])(4) == 1.0, "one point: in proportion"
    for one in (curve, PiecewiseCurve.from_points([8], [2.0])):
        x = np.array([0.0, 10, 12, 40, 99])
        assert one.evaluate(x) == pytest.approx([one(v) for v in x])


def test_piecewise_curve_unsorted_points_are_refused() -> None:
    with pytest.raises(ValueError, match="ascending x"):
        PiecewiseCurve.from_points([2, 1], [1.0, 1.0])


def test_step_s_mixed_iteration_is_longer_times_factor() -> None:
    steps = EngineStepTimes(
        PiecewiseCurve.line(0.01, 0.001), PiecewiseCurve.line(0.02, 0.0), kv_token_s=1e-6, mixed_factor=1.1
    )
    assert steps.step_s(0, 0) == 0.0
    assert steps.step_s(0, 4, 1000) == pytest.approx(0.021)
    assert steps.step_s(100, 0) == pytest.approx(0.11)
    assert steps.step_s(100, 4, 1000) == pytest.approx(1.1 * (0.01 + 0.104))
    assert steps.step_s(2, 4, 1000) == pytest.approx(1.1 * 0.021)


def test_scaled_steps_keep_host_overhead() -> None:
    steps = EngineStepTimes(
        PiecewiseCurve.line(0.01, 0.001), PiecewiseCurve.line(0.02, 0.0), 1e-6, 1.1, 0.005, pipeline=2
    )
    slow = steps.scaled(2.0)
    assert slow.step_s(100, 4, 1000) == pytest.approx(2 * steps.step_s(100, 4, 1000))
    assert (slow.request_overhead_s, slow.mixed_factor) == (0.005, 1.1)
    assert slow.drain_s(100) == pytest.approx(0.22)


def test_drain_s_without_pipeline_is_zero() -> None:
    prefill, decode = PiecewiseCurve.line(0.0, 0.001), PiecewiseCurve.line(0.02, 0.0)
    assert EngineStepTimes(prefill, decode).drain_s(100) == 0.0
    assert EngineStepTimes(prefill, decode, pipeline=4).drain_s(100) == pytest.approx(0.3)


def test_rate_of_class_overrides_common_throughput() -> None:
    hardware = CellHardware(requests_per_s={ANY_CLASS: 2.0, "chat/long": 0.5})
    assert (hardware.rate_of("chat/long"), hardware.rate_of("chat/short")) == (0.5, 2.0)
    assert CellHardware().rate_of("chat/long") is None
