"""Times of many lone requests at once are those that the simulator has for each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornplug.planner.inputs.request_sampling import SampledRequest
from cornplug.planner.perf_model import analytic_load, stations
from cornplug.planner.perf_model.engine_spec import EngineStepTimes, PiecewiseCurve
from cornplug.planner.perf_model.stations import Station

STEPS = EngineStepTimes(
    PiecewiseCurve.from_points([1, 100, 400], [0.01, 0.02, 0.1]),
    PiecewiseCurve.from_points([1, 8], [0.01, 0.02]),
    kv_token_s=1e-6,
)
DRAWS = st.lists(
    st.builds(
        SampledRequest,
        prompt_tokens=st.integers(1, 3000),
        cached_tokens=st.integers(0, 500),
        patches=st.lists(st.integers(1, 900), max_size=3).map(tuple),
        output_tokens=st.integers(1, 50),
        units=st.floats(0, 5),
    ),
    min_size=1,
    max_size=6,
)


@given(DRAWS, st.sampled_from(["E", "P", "EPD", "PDG", "D"]), st.booleans(), st.integers(1, 700))
def test_request_costs_of_lone_request_match_simulator(
    draws: list[SampledRequest], tasks: str, chunked: bool, chunk: int
) -> None:
    station = Station(
        "s",
        1,
        tasks,
        steps=STEPS,
        encode=PiecewiseCurve.from_points([1000], [0.1]),
        generate=PiecewiseCurve.line(0.1, 1.0) if "G" in tasks else None,
        chunk_tokens=chunk,
        max_patches=1000,
        chunked=chunked,
    )
    of = analytic_load.request_costs(tuple(draws))
    once = analytic_load.encode_s(of, station) + analytic_load.prefill_s(of, station)
    assert once == pytest.approx([stations.isolated_prefill_s(station, d) for d in draws])
    after = analytic_load.decode_s(of, station)
    assert after == pytest.approx([stations.isolated_decode_s(station, d) for d in draws])
    made = [station.generate(d.units) if station.generate else 0.0 for d in draws]
    assert analytic_load.generate_s(of, station) == pytest.approx(made)
