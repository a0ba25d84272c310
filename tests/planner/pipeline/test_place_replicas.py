"""Whatever the pool model counts can be placed on nodes, without overlap."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornplug.planner.pipeline.place_replicas import place_on_nodes

CHAIN = (0.25, 0.5, 1, 2, 4, 8)


@st.composite
def pools(draw: st.DrawFn) -> tuple[int, dict[str, tuple[float, int]]]:
    gpus = draw(st.sampled_from((1, 2, 4, 8)))
    sizes = [s for s in CHAIN if s <= gpus] + [2 * gpus]
    return gpus, {f"{size}": (size, draw(st.integers(0, 9))) for size in sizes}


@given(pools())
def test_place_pool_that_fits_by_count_is_placed(pool: tuple[int, dict[str, tuple[float, int]]]) -> None:
    gpus, footprints = pool
    total = sum(Fraction(size) * n for size, n in footprints.values())
    nodes = ceil(total / gpus)
    slots = place_on_nodes(footprints, gpus, nodes)
    used: defaultdict[tuple[int, int], Fraction] = defaultdict(Fraction)
    for group, (size, replicas) in footprints.items():
        assert len(slots[group]) == replicas
        for node, first in slots[group]:
            for k in range(ceil(size)):
                used[node + (first + k) // gpus, (first + k) % gpus] += Fraction(min(size, 1))
    assert all(share <= 1 for share in used.values())
    assert all(node < nodes for node, _ in used)
    assert sum(used.values()) == total


@given(pools())
def test_place_replicas_of_group_are_spread_over_nodes(
    pool: tuple[int, dict[str, tuple[float, int]]],
) -> None:
    """With nodes enough for one of each, no node has two: its loss costs one replica."""
    gpus, footprints = pool
    few = {group: (size, min(replicas, 3)) for group, (size, replicas) in footprints.items() if size <= gpus}
    room = ceil(sum(size for size, _ in few.values()) / gpus)
    slots = place_on_nodes(few, gpus, 3 * room)
    for group, placed in slots.items():
        assert len({node for node, _ in placed}) == few[group][1]


def test_place_groups_of_one_service_count_together() -> None:
    slots = place_on_nodes({"a": (2, 1), "b": (1, 1)}, 4, 2, {"a": "llm/PD", "b": "llm/PD"})
    assert slots == {"a": [(0, 0)], "b": [(1, 0)]}


def test_place_too_few_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="b: 1 GPUs do not fit into the free GPUs of 1 nodes of 2"):
        place_on_nodes({"a": (1, 2), "b": (1, 1)}, 2, 1)


def test_place_indivisible_footprint_is_refused() -> None:
    with pytest.raises(ValueError, match="three: 3 GPUs neither divide a node of 8"):
        place_on_nodes({"three": (3, 1)}, 8, 4)


def test_place_parts_of_gpu_never_straddle_two() -> None:
    slots = place_on_nodes({"half": (0.5, 3), "quarter": (0.25, 2)}, 2, 1)
    assert slots == {"half": [(0, 0), (0, 0), (0, 1)], "quarter": [(0, 1), (0, 1)]}
