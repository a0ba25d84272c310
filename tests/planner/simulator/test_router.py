"""The router's draws: which replicas of a station are compared."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from cornplug.planner.perf_model.engine_spec import EngineStepTimes, PiecewiseCurve
from cornplug.planner.perf_model.simulator import RouterDispatch
from cornplug.planner.perf_model.stations import EventAgenda, Station, TokenLog

STEPS = EngineStepTimes(PiecewiseCurve.line(0.01, 1e-4), PiecewiseCurve.line(0.02, 1e-3))


def test_router_power_of_two_compares_two_replicas() -> None:
    """Two of four are long: one of them is taken where both are drawn, for one pair in six."""
    station = Station("p", 4, "P", steps=STEPS, router="power_of_two")
    dispatch = RouterDispatch(station, EventAgenda(), TokenLog(0.0, 1.0, []), np.random.default_rng(0))
    for replica in dispatch._replicas[:2]:
        replica.outstanding = 1
    taken = Counter(id(dispatch._choose(0.0)) for _ in range(20_000))
    parts = [taken[id(replica)] / 20_000 for replica in dispatch._replicas]
    assert parts == pytest.approx([1 / 12, 1 / 12, 5 / 12, 5 / 12], abs=0.015)
