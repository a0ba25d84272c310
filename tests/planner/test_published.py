"""The pool model reproduces published plans to the cent (cases A1-A5, A10, A12, A15)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner.pools import EXACT, NO_RESERVE, one_service

from cornplug.planner.optimizer.milp import solve
from cornplug.planner.optimizer.optimization_problem import (
    Cell,
    MachineClass,
    OptimizationProblem,
    PathVariant,
    PoolLimits,
    RateDemand,
    ServiceDemand,
)

A10G, A100 = 1.01, 3.67


def melange(slices: int | None, prices: dict[str, float]) -> OptimizationProblem:
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
def test_solve_melange_example_matches_published(
    slices: int | None, nodes: dict[str, int], cost: float
) -> None:
    """A1 (integer slices: the README's plan and finer ones) and A2 (divided at will)."""
    solution = solve(melange(slices, {"A10G": A10G, "A100": A100}), EXACT)
    assert (solution.nodes, solution.status) == (nodes, "optimal")
    assert solution.objective == pytest.approx(cost)


@pytest.mark.parametrize(("gpu", "price", "count"), [("A10G", A10G, 12), ("A100", A100, 2)])
def test_solve_melange_on_one_gpu_type_matches_published(gpu: str, price: float, count: int) -> None:
    assert solve(melange(1, {gpu: price}), EXACT).nodes == {gpu: count}


@pytest.mark.parametrize(
    ("rate", "a100", "a10g", "cost"),
    [
        (0.7, 0, 2, 2.02), (1.2, 1, 0, 3.67), (2.3, 1, 1, 4.68), (4.3, 2, 1, 8.35),
        (5.0, 2, 3, 10.37), (6.5, 3, 2, 13.03), (8.0, 4, 0, 14.68),
    ],
)  # fmt: skip
def test_solve_staircase_matches_published(rate: float, a100: int, a10g: int, cost: float) -> None:
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


def tiles(rate: float, prices: dict[str, float]) -> OptimizationProblem:
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
def test_solve_size_tiles_match_published(rate: float, cost: float, single: float) -> None:
    """A4: a mix of both types serves a uniform mix of sizes for less than either alone."""
    both = {"A10G": A10G, "A100": A100}
    assert solve(tiles(rate, both), EXACT).objective == pytest.approx(cost, rel=0.005)
    alone = [solve(tiles(rate, {gpu: price}), EXACT).objective for gpu, price in both.items()]
    assert min(alone) == pytest.approx(single, rel=0.005)


AUDIT_PRICES = {"L4": 0.70, "A10G": 1.01, "A100": 3.67, "H100": 7.516}
AUDIT = {
    "Arena 120 ms": (
        (1, 1, 0, 0, 1.71), (2, 1, 0, 0, 2.41), (1, 0, 1, 0, 4.37), (1, 3, 1, 0, 7.40), (2, 2, 3, 0, 14.43),
        (2, 6, 5, 0, 25.81),
    ),
    "Arena 40 ms": (
        (2, 1, 0, 0, 2.41), (0, 0, 1, 0, 3.67), (1, 1, 1, 0, 5.38), (1, 1, 2, 0, 9.05), (0, 6, 3, 0, 17.07),
        (0, 8, 6, 0, 30.10),
    ),
    "PubMed 120 ms": (
        (0, 0, 1, 1, 11.186), (0, 3, 1, 2, 21.732), (0, 3, 4, 3, 40.258), (0, 0, 7, 7, 78.302),
        (0, 0, 12, 15, 156.78), (1, 1, 20, 32, 315.622),
    ),
    "PubMed 40 ms": (
        (0, 0, 4, 0, 14.68), (0, 0, 1, 3, 26.218), (0, 0, 3, 5, 48.59), (0, 0, 3, 12, 101.202),
        (0, 0, 11, 21, 198.206), (0, 0, 24, 40, 388.72),
    ),
    "Mixed 120 ms": (
        (0, 0, 1, 0, 3.67), (1, 0, 1, 0, 4.37), (0, 2, 0, 1, 9.536), (1, 2, 1, 1, 13.906),
        (1, 2, 3, 2, 28.762), (1, 5, 6, 4, 57.834),
    ),
    "Mixed 40 ms": (
        (0, 0, 1, 0, 3.67), (1, 1, 1, 0, 5.38), (0, 3, 0, 1, 10.546), (1, 3, 2, 1, 18.586),
        (2, 7, 2, 3, 38.358), (0, 15, 6, 5, 74.75),
    ),
}  # fmt: skip
"""Mélange's tables 3 to 8: GPUs of each type at 1, 2, 4, 8, 16, 32 requests/s, and dollars an hour."""


@pytest.mark.parametrize("table", AUDIT)
def test_published_mixes_cost_what_was_published(table: str) -> None:
    """A5: where each type's share of the work is given, the model buys the published GPUs."""
    for *counts, dollars in AUDIT[table]:
        mix = {gpu: float(count) for gpu, count in zip(AUDIT_PRICES, counts, strict=True) if count}
        capacity = {gpu: {gpu: 1.0} for gpu in mix}
        solution = solve(one_service(capacity, {gpu: AUDIT_PRICES[gpu] for gpu in mix}, mix), EXACT)
        assert solution.nodes == mix
        assert solution.objective == pytest.approx(dollars, abs=0.0005)


def of_roles(gpus: int, whole: float, roles: dict[str, float]) -> OptimizationProblem:
    """One monolith, or one GPU for each role; as many requests as can be served."""
    cells = {"mono": whole, **roles}
    return OptimizationProblem(
        nodes=(MachineClass("n", "g", 1, 1.0, gpus),),
        cells=tuple(Cell(name, name, "n", 1, 1.0, {"u": rate}) for name, rate in cells.items()),
        demands=(RateDemand("u", 1000),),
        variants=(
            PathVariant("mono", "u", "monolith", (ServiceDemand("mono", 1.0),)),
            PathVariant("apart", "u", "P+D", tuple(ServiceDemand(role, 1.0) for role in roles)),
        ),
        limits=NO_RESERVE,
        objective="goodput",
    )


@pytest.mark.parametrize(
    ("gpus", "goodput", "replicas"),
    [
        (1, 1.6, {"mono": 1}),
        (2, 5.6, {"P": 1, "D": 1}),
        (3, 10.0, {"P": 2, "D": 1}),
        (4, 11.6, {"P": 2, "D": 1, "mono": 1}),
        (5, 16.8, {"P": 3, "D": 2}),
        (8, 28.0, {"P": 5, "D": 3}),
        (11, 39.2, {"P": 7, "D": 4}),
    ],
)
def test_solve_distserve_matches_published(gpus: int, goodput: float, replicas: dict[str, int]) -> None:
    """A10: 2 prefill and 1 decode GPU serve 3.33 requests/s each, 2.1 times the co-located 1.6."""
    solution = solve(of_roles(gpus, 1.6, {"P": 5.6, "D": 10.0}), EXACT)
    assert solution.objective == pytest.approx(goodput)
    assert solution.replicas == replicas


@pytest.mark.parametrize(("gpus", "mono", "apart"), [(8, 1.580, 1.4), (16, 3.160, 3.0), (64, 12.639, 12.6)])
def test_solve_qwen_image_split_gains_nothing(gpus: int, mono: float, apart: float) -> None:
    """A12: a generator that is 78 times slower than its LLM leaves nothing to gain by a split."""
    llm, generator = 15.67, 0.20
    pool = of_roles(gpus, 1 / (1 / llm + 1 / generator), {"LLM": llm, "G": generator})
    best = solve(pool, EXACT)
    assert (best.objective, best.replicas) == (pytest.approx(mono, abs=5e-4), {"mono": gpus})
    split = solve(replace(pool, variants=pool.variants[1:]), EXACT)
    assert split.objective == pytest.approx(apart, abs=5e-4)


@pytest.mark.parametrize(("hit_rate", "gpus"), [(0, 12), (0.3, 8), (0.5, 6), (0.8, 3), (0.9, 2), (0.95, 1)])
def test_encoder_pool_shrinks_with_its_hits(hit_rate: float, gpus: int) -> None:
    """A15: 10 images/s at 1.13 a GPU, filled to 0.8."""
    pool = one_service({"A100": {"u": 1.13}}, {"A100": 1.0}, {"u": 10.0}, limits=PoolLimits(online_share=0.8))
    way = PathVariant("u", "u", "E+PD", (ServiceDemand("s", 1.0, 1 - hit_rate),))
    assert solve(replace(pool, variants=(way,)), EXACT).nodes == {"A100": gpus}
