"""The pool model reproduces published plans to the cent (cases A1-A5, A10, A12, A15)."""

from __future__ import annotations

import pytest

from cornplug.planner.milp import solve
from cornplug.planner.pool import Pool
from planner.pools import EXACT, one_service

A10G, A100 = 1.01, 3.67


def melange(slices: int | None, prices: dict[str, float]) -> Pool:
    """Mélange's `example.json`: throughputs of a 2 x 2 table of sizes, its mix, 30 requests/s."""
    table = {"A10G": [2, 1, 5, 2], "A100": [20, 20, 40, 20]}
    mix = [0.2, 0.1, 0.5, 0.2]
    return one_service(
        {gpu: {f"size{i}": rate for i, rate in enumerate(rates)} for gpu, rates in table.items()},
        prices,
        {f"size{i}": 30 * share for i, share in enumerate(mix)},
        slices=slices,
    )


@pytest.mark.parametrize(
    ("slices", "nodes", "cost"),
    [
        (1, {"A10G": 3, "A100": 1}, 6.70),
        (4, {"A10G": 2, "A100": 1}, 5.69),
        (8, {"A10G": 2, "A100": 1}, 5.69),
        (None, {"A10G": 1, "A100": 1}, 4.68),
    ],
)
def test_melange_example(slices: int | None, nodes: dict[str, int], cost: float) -> None:
    """A1 (integer slices: the README's plan and finer ones) and A2 (divided at will)."""
    solution = solve(melange(slices, {"A10G": A10G, "A100": A100}), EXACT)
    assert (solution.nodes, solution.status) == (nodes, "optimal")
    assert solution.objective == pytest.approx(cost)


@pytest.mark.parametrize(("gpu", "price", "count"), [("A10G", A10G, 12), ("A100", A100, 2)])
def test_melange_example_on_one_type(gpu: str, price: float, count: int) -> None:
    assert solve(melange(1, {gpu: price}), EXACT).nodes == {gpu: count}


@pytest.mark.parametrize(
    ("rate", "a100", "a10g", "cost"),
    [
        (0.7, 0, 2, 2.02), (1.2, 1, 0, 3.67), (2.3, 1, 1, 4.68), (4.3, 2, 1, 8.35),
        (5.0, 2, 3, 10.37), (6.5, 3, 2, 13.03), (8.0, 4, 0, 14.68),
    ],
)  # fmt: skip
def test_staircase(rate: float, a100: int, a10g: int, cost: float) -> None:
    """A3."""
    pool = one_service({"A10G": {"u": 0.37}, "A100": {"u": 2.0}}, {"A10G": A10G, "A100": A100}, {"u": rate})
    solution = solve(pool, EXACT)
    assert (solution.nodes.get("A100", 0), solution.nodes.get("A10G", 0)) == (a100, a10g)
    assert solution.objective == pytest.approx(cost)


SIZES_IN, SIZES_OUT = (25, 100, 250, 500, 1000, 2000), (25, 100, 250, 500, 1000, 2000)
A10G_GAIN = (
    (72, 52, 20, 17, 13, 11), (52, 25, 15, 1, -1, -4), (28, 11, 2, 1, -8, -13),
    (12, 2, 1, -4, -17, -21), (-6, -10, -11, -11, -18, -20), (-8, -10, -13, -17, -18, -38),
)  # fmt: skip
"""Tokens per dollar of A10G over A100, %, by output (rows) and input (columns)."""


def tiles(rate: float, prices: dict[str, float]) -> Pool:
    capacity: dict[str, dict[str, float]] = {"A10G": {}, "A100": {}}
    for out, row in zip(SIZES_OUT, A10G_GAIN, strict=True):
        for size, percent in zip(SIZES_IN, row, strict=True):
            gain, a100 = percent / 100, 1 / (1e-4 * size + 8e-4 * out + 0.002)
            capacity["A100"][f"{size}+{out}"] = a100
            ratio = 1 + gain if gain >= 0 else 1 / (1 - gain)
            capacity["A10G"][f"{size}+{out}"] = a100 * A10G / A100 * ratio
    return one_service(capacity, prices, dict.fromkeys(capacity["A100"], rate / 36))


@pytest.mark.parametrize(
    ("rate", "cost", "single"), [(1, 3.03, 3.03), (4, 9.36, 10.10), (16, 34.04, 36.70), (64, 135.62, 139.46)]
)
def test_size_tiles(rate: float, cost: float, single: float) -> None:
    """A4: a mix of both types serves a uniform mix of sizes for less than either alone."""
    both = {"A10G": A10G, "A100": A100}
    assert solve(tiles(rate, both), EXACT).objective == pytest.approx(cost, rel=0.005)
    alone = [solve(tiles(rate, {gpu: price}), EXACT).objective for gpu, price in both.items()]
    assert min(alone) == pytest.approx(single, rel=0.005)
