"""Factors on profiles' times, by service and footprint."""

from __future__ import annotations

import pytest
from planner.made_inputs import two_apps

from cornplug.planner.candidates.timed_configs import (
    corrected_times,
    corrections_by_key,
    merged_corrections,
    profile_key,
)
from cornplug.planner.perf_model.engine_spec import CellHardware, EngineStepTimes, PiecewiseCurve
from cornplug.planner.pipeline.formulate import formulate
from cornplug.planner.plan import TimesCorrection


def correction(gpu: str, prefill: float, decode: float, quantisation: str = "none") -> TimesCorrection:
    return TimesCorrection(
        service="qwen/PD",
        engine="sglang",
        gpu=gpu,
        tp=1,
        pp=1,
        share=1.0,
        quantisation=quantisation,
        prefill=prefill,
        decode=decode,
    )


def test_corrected_scales_each_phase_by_its_factor() -> None:
    steps = EngineStepTimes(PiecewiseCurve.line(0.01, 1e-4), PiecewiseCurve.line(0.02, 1e-4), 1e-8)
    before = CellHardware(steps=steps, encode=PiecewiseCurve.line(0.0, 1e-5), kv_tokens=1000)
    after = corrected_times(before, correction("H100", 2.0, 1.5))
    assert after.steps is not None
    assert after.encode is not None
    assert after.steps.prefill(500) == pytest.approx(2 * steps.prefill(500))
    assert after.steps.decode(8) == pytest.approx(1.5 * steps.decode(8))
    assert after.steps.kv_token_s == pytest.approx(1.5e-8)
    assert after.encode(1000) == pytest.approx(0.02)
    assert after.kv_tokens == 1000
    assert corrected_times(before, None) is before


def test_merged_later_correction_of_a_place_stands() -> None:
    one, other, later = correction("H100", 2, 1), correction("L4", 3, 1), correction("H100", 1.5, 1)
    assert merged_corrections([one, other], [later]) == [later, other]


def test_formulate_correction_lowers_capacity_of_its_footprint_only() -> None:
    given = two_apps(simulate=False, n_plus_one=False)
    plain = formulate(given)
    slower = formulate(given, [correction("H100", 1.5, 1.5, "fp8")])
    changed = {
        name
        for name, spec in plain.cells.items()
        if name in slower.cells and slower.cells[name].cell.capacity != spec.cell.capacity
    }
    assert changed
    at = set(corrections_by_key([correction("H100", 1, 1, "fp8")]))
    for name in changed:
        spec = plain.cells[name]
        assert profile_key(spec.service, spec.footprint) in at
        for u, rate in slower.cells[name].cell.capacity.items():
            assert rate < spec.cell.capacity[u]
