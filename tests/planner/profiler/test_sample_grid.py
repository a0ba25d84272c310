"""From an engine's answers to its iteration times: what is known must come back."""

import pytest
from expected_errors import expect_error
from hypothesis import given
from hypothesis import strategies as st

from cornplug.errors import ConfigError, CornplugError
from cornplug.planner.engine_steps import GridPoint, SampleGrid, TimedPoint

GRID = SampleGrid(prompts=(64, 256, 1024), batches=(1, 2, 8), output_tokens=32, repeats=3)
CELL = {"gpu": "cpu-core", "engine": "vllm"}


def answered(points, *, overhead, per_token, base, context=0.0, batch=1):
    """By an engine whose iterations take base + per_token for each token of prompt or output."""

    def seconds(point: GridPoint) -> float:
        steps = point.output_tokens - 1
        read = point.prompt_tokens * steps + steps * (steps + 1) / 2
        decoding = steps * (base + per_token * batch) + context * batch * read
        return overhead + base + per_token * point.prompt_tokens + decoding

    return [TimedPoint(point, seconds(point)) for point in points]


def measured(grid, **engine):
    alone = answered(grid.isolated_requests(), **engine)
    together = {b: answered(grid.batched_requests(b), batch=b, **engine) for b in grid.batches[1:]}
    return {(row.kind, row.x): row.seconds for row in grid.rows(alone, together, **CELL)}


@given(overhead=st.floats(1e-3, 0.05), per_token=st.floats(1e-5, 1e-3), base=st.floats(1e-3, 0.1))
def test_sample_grid_iteration_times_are_recovered(overhead, per_token, base):
    rows = measured(GRID, overhead=overhead, per_token=per_token, base=base)

    assert rows["overhead", 1] == pytest.approx(overhead, rel=1e-6)
    for prompt in GRID.prompts:
        assert rows["prefill", prompt] == pytest.approx(base + per_token * prompt, rel=1e-6)
    for batch in GRID.batches:
        assert rows["decode", batch] == pytest.approx(base + per_token * batch, rel=1e-6)


def test_sample_grid_context_time_is_separated_from_step():
    engine = {"overhead": 0.01, "per_token": 1e-4, "base": 0.02}
    rows = measured(GRID, **engine, context=1e-6)

    # Outputs lengthen a short prompt's context, too: half an output is not told from the step.
    assert rows["kv_token", 1] == pytest.approx(1e-6, rel=0.02)
    assert rows["decode", 8] == pytest.approx(0.02 + 8e-4, rel=0.01)


def test_sample_grid_zero_context_time_has_no_row():
    rows = measured(GRID, overhead=0.0, per_token=1e-4, base=0.02)

    assert not [kind for kind, _ in rows if kind in ("kv_token", "overhead")]


def test_sample_grid_slow_first_answers_are_ignored():
    engine = {"overhead": 0.01, "per_token": 1e-4, "base": 0.02}
    alone = answered(GRID.isolated_requests(), **engine)
    kinds = len(alone) // (GRID.repeats + 1)
    cold = [TimedPoint(t.point, t.seconds + 5) for t in alone[:kinds]] + alone[kinds:]
    together = {b: answered(GRID.batched_requests(b), batch=b, **engine) for b in GRID.batches[1:]}

    assert GRID.rows(cold, together, **CELL) == GRID.rows(alone, together, **CELL)


def test_sample_grid_noise_above_work_is_refused():
    alone = [TimedPoint(point, 0.1) for point in GRID.isolated_requests()]

    with expect_error(CornplugError, reason="noise"):
        GRID.rows(alone, {}, **CELL)


def test_sample_grid_prompts_beyond_context_are_dropped():
    assert GRID.limit_to(600).prompts == (64, 256)
    with expect_error(ConfigError, field="prompts", match="18"):
        GRID.limit_to(50)


@pytest.mark.parametrize(
    ("field", "values"), [("prompts", (256, 64)), ("prompts", ()), ("batches", (2, 4)), ("output_tokens", 2)]
)
def test_sample_grid_invalid_values_name_field(field, values):
    given_ = {"prompts": (64,), "batches": (1,), "output_tokens": 32, "repeats": 3, field: values}

    with pytest.raises(ConfigError) as e:
        SampleGrid(**given_)
    assert e.value.field == field
