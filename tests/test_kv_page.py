"""Geometry of a page: which bytes a rank owns, whatever the split."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from expected_errors import expect_error
from hypothesis import given
from hypothesis import strategies as st

from cornplug.errors import LayoutError
from cornplug.kv_page import (
    MAX_SEGMENTS,
    PageGeometry,
    RankSlice,
    count_layer_runs,
    pages_between,
    tensor_parallel_heads,
)


def geometry(**fields: object) -> PageGeometry:
    given = {"page_tokens": 64, "heads": 8, "layers": 32, "dim": 128, "dtype": "bfloat16", **fields}
    return PageGeometry(**given)  # type: ignore[arg-type]


def test_sizes_follow_from_the_shape() -> None:
    page = geometry()
    assert page.shape == (8, 32, 2, 64, 128)
    assert page.segments == 8
    assert page.layer_bytes == 2 * 64 * 128 * 2
    assert page.page_bytes == 8 * 32 * 2 * 64 * 128 * 2 == page.segments * page.segment_bytes
    staged = geometry(layer_runs=4)
    assert (staged.segments, staged.segment_bytes) == (32, page.segment_bytes // 4)
    assert (staged.page_bytes, staged.spec()) == (page.page_bytes, page.spec()), "one page, whoever wrote it"
    assert geometry(dtype="float32").page_bytes == 2 * page.page_bytes
    assert page.spec() == {
        "layout": "head-layer-kv-token-dim/1",
        "shape": [8, 32, 2, 64, 128],
        "dtype": "bfloat16",
    }


def test_page_spec_of_one_engine_differs() -> None:
    """Its keys then differ: pages of the other engine are never read."""
    assert geometry(engine="vllm").spec() == {**geometry().spec(), "engine": "vllm"}
    assert geometry(engine="vllm").shape == geometry().shape


def test_page_of_states_is_one_row_a_layer_whatever_its_tokens() -> None:
    page = geometry(dtype="uint8", planes=1, dim=1000, heads=2, state="GDN", page_tokens=528)
    assert (page.shape, page.page_bytes) == ((2, 32, 1, 1, 1000), 2 * 32 * 1000)
    assert page.spec()["state"] == {"of": "GDN", "every": 528}
    assert geometry(model_state="GDN").spec() == {**geometry().spec(), "beside": "GDN"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "uint8"}, "kv_dtype"),
        ({"dtype": "float8_e4m3fn"}, "kv_dtype"),
        ({"heads": 0}, "layout"),
        ({"page_tokens": 0}, "layout"),
        ({"layers": -1}, "layout"),
        ({"dim": 0}, "layout"),
        ({"heads": 256, "layers": 256, "layer_runs": 256}, "layout"),
        ({"layer_runs": 0}, "layout"),
        ({"layer_runs": 3}, "layout"),
    ],
)
def test_page_geometry_that_is_no_page_is_an_error(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(LayoutError) as error:
        geometry(**fields)
    assert error.value.reason == reason


def test_page_geometry_largest_page_is_accepted() -> None:
    assert geometry(heads=255, layers=257, layer_runs=257).segments == MAX_SEGMENTS


@pytest.mark.parametrize(
    ("heads", "size", "found"),
    [
        (8, 1, [(range(8), True)]),
        (8, 2, [(range(4), True), (range(4, 8), True)]),
        (2, 4, [(range(1), True), (range(1), False), (range(1, 2), True), (range(1, 2), False)]),
        (1, 2, [(range(1), True), (range(1), False)]),
    ],
)
def test_tensor_parallel_heads_split_or_repeat_by_rank(
    heads: int, size: int, found: list[tuple[range, bool]]
) -> None:
    assert [tensor_parallel_heads(heads, size, rank) for rank in range(size)] == found


@pytest.mark.parametrize(("heads", "size"), [(6, 4), (4, 6), (3, 2)])
def test_tensor_parallel_heads_that_do_not_split_are_an_error(heads: int, size: int) -> None:
    with expect_error(LayoutError, reason="layout", match="do not split"):
        tensor_parallel_heads(heads, size, 0)


@st.composite
def splits(draw: st.DrawFn) -> tuple[PageGeometry, int, list[range]]:
    """A page, a TP degree that its heads allow, and a partition of its layers."""
    heads, layers = draw(st.integers(1, 16)), draw(st.integers(1, 24))
    sizes = [n for n in range(1, 33) if heads % n == 0 or n % heads == 0]
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=3))) if layers > 1 else []
    bounds = [0, *cuts, layers]
    stages = [range(a, b) for a, b in itertools.pairwise(bounds)]
    return geometry(heads=heads, layers=layers), draw(st.sampled_from(sizes)), stages


@given(splits())
def test_kv_page_writing_ranks_partition_the_segments(split: tuple[PageGeometry, int, list[range]]) -> None:
    plain, size, stages = split
    runs = count_layer_runs(plain.layers, [stage.start for stage in stages])
    page = dataclasses.replace(plain, layer_runs=runs)
    assert page.runs_for_segments(page.segments) == runs
    written: list[int] = []
    for rank in range(size):
        heads, writes = tensor_parallel_heads(page.heads, size, rank)
        for layers in stages:
            mine = RankSlice(heads=heads, layers=layers, writes=writes).run_range(page, runs)
            per_run = page.layers // runs
            assert range(mine.start * per_run, mine.stop * per_run) == layers
            if writes:
                written += [head * runs + run for head in heads for run in mine]
    assert sorted(written) == list(range(page.segments))


@given(splits(), st.integers(1, 24))
def test_rank_slice_runs_cover_its_layers_and_no_run_more(
    split: tuple[PageGeometry, int, list[range]], runs: int
) -> None:
    page, _, stages = split
    if page.layers % runs:
        assert page.runs_for_segments(page.heads * runs) is None
        return
    size = page.layers // runs
    for layers in stages:
        found = RankSlice(heads=range(1), layers=layers, writes=False).run_range(page, runs)
        assert list(found) == sorted({layer // size for layer in layers})


@pytest.mark.parametrize(("segments", "runs"), [(8, 1), (16, 2), (256, 32), (0, None), (4, None), (24, None)])
def test_page_geometry_runs_of_another_writers_segments(segments: int, runs: int | None) -> None:
    assert geometry().runs_for_segments(segments) == runs


@pytest.mark.parametrize(
    ("layers", "first", "runs"),
    [(32, [0], 1), (32, [0, 16], 2), (80, [0, 20, 40, 60], 4), (61, [0, 31], 61), (6, [0, 2, 4], 3)],
)
def test_layer_runs_are_as_few_as_the_stages_allow(layers: int, first: list[int], runs: int) -> None:
    assert count_layer_runs(layers, first) == runs


@pytest.mark.parametrize(
    ("start", "end", "found"),
    [
        (0, 63, range(0)),
        (0, 64, range(1)),
        (16, 130, range(2)),
        (64, 64, range(1, 1)),
        (100, 192, range(1, 3)),
    ],
)
def test_pages_between_token_range_gives_its_pages(start: int, end: int, found: range) -> None:
    assert pages_between(start, end, 64) == found
