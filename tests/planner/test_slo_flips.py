"""A6: which GPU is cheaper depends on the SLO (Mélange, plot 6), and the plan follows."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from cornplug.planner.inputs import toml_reader
from cornplug.planner.pipeline.decide import decide

CASE = Path(__file__).parent / "cases" / "a06_slo_flips_gpu.toml"


@pytest.mark.more
def test_decide_loose_bounds_and_small_requests_take_cheap_gpu() -> None:
    given = toml_reader.read(CASE)
    plan = decide(given, digest="0" * 64).plan
    gpu = {group.name: group.gpu for group in plan.groups}
    on: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for route in plan.routes:
        (stage,) = route.stages
        for name, weight in stage.groups.items():
            on[route.request][gpu[name]] += route.rate * weight
    assert len(on) == 28
    for request in given.applications[0].requests:
        size, slo_ms = (int(part.strip("sm")) for part in request.name.split("-"))
        cheap = "A10G" if size <= 100 and slo_ms >= 80 else "A100-80"
        # What is left of the last machine of the other kind takes a little of one class.
        assert on[request.name][cheap] > 0.9 * request.rate, request.name
