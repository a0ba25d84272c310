"""`rules.n_plus_one = "node"`: plans that survive the loss of any node, against trying every placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from cornplug.errors import PlanInfeasible
from cornplug.planner.optimizer.milp import solve
from cornplug.planner.optimizer.optimization_problem import (
    Cell,
    CrowdedNode,
    MachineClass,
    OptimizationProblem,
    PathVariant,
    PoolLimits,
    PoolSolution,
    RateDemand,
    ServiceDemand,
)
from cornplug.planner.pipeline import place_replicas
from cornplug.planner.pipeline.place_replicas import (
    exclude_crowded_nodes,
    find_unsurvivable_losses,
    node_losses,
    survives,
)

from ..pools import EXACT, one_service

STOCK, SEEDS = 4, 25


@dataclass(frozen=True)
class NodeCase:
    """Services of one cell each that all requests visit, on machines of one class."""

    gpus: int
    sizes: Sequence[float]
    """GPUs of a replica of each service, which carries as much work."""
    work: Sequence[float]

    @property
    def pool(self) -> OptimizationProblem:
        names = [f"s{i}" for i in range(len(self.sizes))]
        needs = tuple(ServiceDemand(s, 1.0, work) for s, work in zip(names, self.work, strict=True))
        return OptimizationProblem(
            nodes=(MachineClass("n", "g", self.gpus, 1.0, STOCK),),
            cells=tuple(
                Cell(f"c{i}", f"s{i}", "n", size, 1.0, {"u": size}) for i, size in enumerate(self.sizes)
            ),
            demands=(RateDemand("u", 1.0),),
            variants=(PathVariant("u", "u", "monolith", needs),),
            limits=PoolLimits(1.0, 1.0, spare=frozenset(names), by_node=True),
        )

    def least_nodes(self) -> int | None:
        """By trying every filling of every number of machines; None: more than the stock."""
        counts = (range(int(self.gpus / size) + 1) for size in self.sizes)
        fillings = [f for f in product(*counts) if np.dot(f, self.sizes) <= self.gpus]
        for z in range(1, STOCK + 1):
            if any(self._survive(filled) for filled in combinations_with_replacement(fillings, z)):
                return z
        return None

    def _survive(self, filled: Sequence[Sequence[int]]) -> bool:
        on = np.array(filled) * np.array(self.sizes)
        return bool(np.all(on.sum(axis=0) - on.max(axis=0) >= np.array(self.work) - 1e-9))


def random_case(seed: int) -> NodeCase:
    rng = np.random.default_rng(seed)
    gpus = int(rng.choice([1, 2, 4]))
    smallest = 0.5 if gpus < 4 else 1.0
    sizes = [s for s in (0.5, 1.0, 2.0, 4.0) if smallest <= s <= gpus]
    services = int(rng.integers(1, 4))
    work = [round(float(rng.uniform(0.2, 1.2 * gpus)), 2) for _ in range(services)]
    return NodeCase(gpus, [float(rng.choice(sizes)) for _ in range(services)], work)


def planned(pool: OptimizationProblem) -> PoolSolution:
    """As `with_spare_nodes`, of a pool whose capacities are known."""
    for _ in range(place_replicas.MAX_ROUNDS):
        solution = solve(pool, EXACT)
        crowded = find_unsurvivable_losses(pool, solution)
        if not crowded:
            return solution
        pool = exclude_crowded_nodes(pool, crowded)
    raise AssertionError("no placement survives")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_solve_by_node_random_pool_survives_every_loss_at_least_cost(seed: int) -> None:
    case = random_case(seed)
    least = case.least_nodes()
    if least is None:
        with pytest.raises(PlanInfeasible, match=r"stock\[n\]"):
            planned(case.pool)
        return
    solution = planned(case.pool)
    assert solution.nodes == {"n": least}
    losses = list(node_losses(case.pool, solution))
    assert sum(sum(lost.values()) for _, lost in losses) == sum(solution.replicas.values())
    for _, lost in losses:
        for i, (size, work) in enumerate(zip(case.sizes, case.work, strict=True)):
            left = solution.replicas.get(f"c{i}", 0) - lost[f"c{i}"]
            assert left * size >= work - 1e-6


def test_lose_nodes_random_cases_are_of_both_kinds() -> None:
    """Else the test above would compare nothing."""
    least = [random_case(seed).least_nodes() for seed in range(SEEDS)]
    assert sum(z is None for z in least) >= 5
    assert sum(z is not None and z > 1 for z in least) >= 10


def test_solve_by_node_other_class_stands_in() -> None:
    """The load of a dear machine is carried by two cheap ones, should it be lost."""
    pool = one_service(
        {"old": {"u": 1.0}, "new": {"u": 2.0}}, {"old": 1.0, "new": 1.5}, {"u": 2.0}, limits=PoolLimits(1, 1)
    )
    pool = replace(pool, limits=replace(pool.limits, spare=frozenset({"s"}), by_node=True))
    solution = planned(pool)
    assert solution.nodes in ({"new": 2}, {"old": 3})
    assert solution.objective == pytest.approx(3.0)


def test_solve_by_node_work_that_can_wait_needs_no_spare() -> None:
    pool = one_service({"g": {"u": 1.0}}, {"g": 1.0}, {"u": 2.0}, limits=PoolLimits(1.0, 1.0))
    limits = replace(pool.limits, spare=frozenset({"s"}), by_node=True)
    assert planned(replace(pool, limits=limits)).replicas == {"s@g": 3}
    waits = tuple(replace(u, online=False) for u in pool.demands)
    assert planned(replace(pool, limits=limits, demands=waits)).replicas == {"s@g": 2}


def test_survives_looser_cells_do_not_stand_in_for_tighter_ones() -> None:
    """Two cells of one service: a fast one for the work within 0.2 s, a slow one for that within 0.5 s."""
    cells = tuple(
        Cell(f"c{tier}", "s", f"n{tier}", 1, tier, {"tight": 1.0, "loose": 1.0}) for tier in (0.2, 0.5)
    )
    pool = OptimizationProblem(
        nodes=tuple(MachineClass(f"n{tier}", "g", 1, price, 4) for tier, price in ((0.2, 3.0), (0.5, 1.0))),
        cells=cells,
        demands=(RateDemand("tight", 1.0), RateDemand("loose", 1.0)),
        variants=tuple(
            PathVariant(u, u, "monolith", (ServiceDemand("s", tier),))
            for u, tier in (("tight", 0.2), ("loose", 0.5))
        ),
        limits=PoolLimits(1.0, 1.0, spare=frozenset({"s"}), by_node=True),
    )
    solution = replace(solve(pool, EXACT), replicas={"c0.2": 1, "c0.5": 2}, nodes={"n0.2": 1, "n0.5": 2})
    assert survives(pool, solution, {"c0.5": 1})
    assert not survives(pool, solution, {"c0.2": 1})
    assert planned(pool).replicas == {"c0.2": 2, "c0.5": 1}


def test_unsurvived_full_machine_of_another_service_crowds_the_rest() -> None:
    """A replica of four GPUs leaves one of two machines: the four small ones beside it are lost together."""
    case = NodeCase(4, [4.0, 1.0], [4.0, 2.0])
    limits = replace(case.pool.limits, spare=frozenset({"s1"}))
    pool = replace(case.pool, limits=limits)
    solution = replace(solve(pool, EXACT), replicas={"c0": 1, "c1": 4}, nodes={"n": 2}, served={"u": 1.0})
    crowded = find_unsurvivable_losses(pool, solution)
    assert CrowdedNode("n", 2, {"c1": 4}) in crowded
    assert find_unsurvivable_losses(replace(pool, limits=replace(limits, by_node=False)), solution) == ()


def test_lose_nodes_infeasible_pool_names_rule() -> None:
    pool = one_service({"g": {"u": 1.0}}, {"g": 1.0}, {"u": 0.5}, stock=1, limits=PoolLimits(1.0, 1.0))
    limits = replace(pool.limits, spare=frozenset({"s"}), by_node=True)
    with pytest.raises(PlanInfeasible) as raised:
        solve(replace(pool, limits=limits), EXACT)
    assert "stock[g]: 1 nodes, 2 needed" in str(raised.value)
    assert "nodes that may be lost" in str(raised.value)
