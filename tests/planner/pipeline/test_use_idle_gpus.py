"""GPUs that are paid for anyway serve: more replicas, at the cost of the plan without them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from planner.brute_force import best
from planner.made_inputs import QWEN_7B, plan_input
from planner.pools import EXACT, one_service
from planner.random_pools import KINDS, random_pool
from planner.test_brute_force import attempt, values

from cornplug.planner.optimizer.optimization_problem import OptimizationProblem, PoolLimits, PoolSolution
from cornplug.planner.pipeline.decide import decide
from cornplug.planner.pipeline.place_replicas import idle_gpus, placement, use_idle_gpus
from cornplug.planner.plan import Plan

SEEDS = range(10 * len(KINDS))


def gpus(plan: PoolSolution, pool: OptimizationProblem) -> float:
    return sum(c.gpus * plan.replicas.get(c.name, 0) for c in pool.cells)


@cache
def filled(seed: int) -> tuple[PoolSolution, PoolSolution] | None:
    """The best plan of a random pool on larger nodes, before and after."""
    pool = roomy(seed)
    plan = attempt(pool, EXACT)
    return None if plan is None else (plan, use_idle_gpus(pool, plan, EXACT))


@cache
def roomy(seed: int) -> OptimizationProblem:
    pool = random_pool(seed)
    return replace(pool, nodes=tuple(replace(n, gpus=2 * n.gpus) for n in pool.nodes))


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_use_idle_gpus_random_pool_keeps_the_best_value(kind: int) -> None:
    """As trying every plan finds it: extra replicas neither cost nor take anything."""
    for seed in SEEDS[kind :: len(KINDS)]:
        found = filled(seed)
        if found is not None:
            plan, more = found
            assert values(roomy(seed), more) == pytest.approx(values(roomy(seed), plan), rel=1e-9), seed
            if seed < 2 * len(KINDS):
                assert values(roomy(seed), more) == pytest.approx(best(roomy(seed)), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_use_idle_gpus_random_pool_leaves_no_room_for_a_busy_cell(kind: int) -> None:
    for seed in SEEDS[kind :: len(KINDS)]:
        found, pool = filled(seed), roomy(seed)
        if found is None or pool.current is not None:
            continue
        plan, more = found
        assert len(placement(pool, more)) == len(more.replicas)
        assert all(n >= plan.replicas[name] for name, n in more.replicas.items())
        idle, busy = idle_gpus(pool, more), {f.cell for f in plan.flows}
        assert not [c for c in pool.cells if c.name in busy and c.gpus <= idle[c.nodes]], seed


def test_use_idle_gpus_random_pools_had_idle_gpus() -> None:
    """Else the tests above would compare nothing."""
    found = [both for seed in SEEDS if (both := filled(seed))]
    assert sum(bool(more.extra) for _, more in found) > len(found) / 3


@pytest.mark.parametrize("kind", [KINDS.index("spare"), KINDS.index("cost")])
def test_use_idle_gpus_loads_fall(kind: int) -> None:
    for seed in SEEDS[kind :: len(KINDS)]:
        found = filled(seed)
        if found is not None and found[1].extra:
            before, after = (fullest(roomy(seed), plan) for plan in found)
            assert after <= before + 1e-6, seed


def fullest(pool: OptimizationProblem, plan: PoolSolution) -> float:
    cells = {c.name: c for c in pool.cells}
    load = dict.fromkeys(plan.replicas, 0.0)
    for f in plan.flows:
        load[f.cell] += f.rate / cells[f.cell].capacity[f.demand] / plan.replicas[f.cell]
    return max(load.values())


def test_use_idle_gpus_each_goes_to_the_fullest_cell() -> None:
    """Loads of 0.9 and 0.3 on six GPUs: three more for the one, one for the other."""
    pool = one_service({"g": {"u": 1.0}}, {"g": 1.0}, {"u": 0.9}, limits=PoolLimits(1.0, 1.0))
    [cell], [variant] = pool.cells, pool.variants
    other = replace(cell, name="t@g", service="t", capacity={"u": 3.0})
    needs = (*variant.needs, replace(variant.needs[0], service="t"))
    pool = replace(
        pool,
        nodes=(replace(pool.nodes[0], gpus=6),),
        cells=(cell, other),
        variants=(replace(variant, needs=needs),),
    )
    plan = attempt(pool, EXACT)
    assert plan is not None
    assert plan.replicas == {"s@g": 1, "t@g": 1}
    assert use_idle_gpus(pool, plan, EXACT).extra == {"s@g": 3, "t@g": 1}


def test_use_idle_gpus_by_node_survives_every_loss() -> None:
    for gpus_of_node, work in product((2, 4), (0.5, 1.5, 2.5)):
        pool = one_service({"g": {"u": 1.0}}, {"g": 1.0}, {"u": work}, limits=PoolLimits(1.0, 1.0))
        pool = replace(
            pool,
            nodes=(replace(pool.nodes[0], gpus=gpus_of_node),),
            limits=replace(pool.limits, spare=frozenset({"s"}), by_node=True),
        )
        plan = attempt(pool, EXACT)
        assert plan is not None
        more = use_idle_gpus(pool, plan, EXACT)
        assert idle_gpus(pool, more) == {"g": 0}
        on = [sum(node == n for node, _ in placement(pool, more)["s@g"]) for n in range(plan.nodes["g"])]
        assert sum(on) - max(on) >= work


def newcomer(**rules: Any) -> dict[str, Any]:
    """A box of two GPUs and a load that one carries."""
    return {
        "components": [
            {"name": "qwen", "kind": "llm", "shape": QWEN_7B, "tp": [1], "engines": ["vllm"]},
        ],
        "applications": [
            {
                "name": "chat",
                "llm": "qwen",
                "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
                "requests": [{"name": "text", "rate": 2.0, "prompt": 800, "output": 100}],
            }
        ],
        "pool": [{"name": "box", "gpu": "L40S", "gpus": 2, "price_per_hour": 4.0, "stock": 1}],
        "rules": {"n_plus_one": False} | rules,
    }


def planned(**tables: Any) -> Plan:
    return decide(plan_input(**tables), digest="0" * 64).plan


@pytest.fixture(scope="module")
def plan_of_box() -> Plan:
    return planned(**newcomer())


@pytest.mark.more
def test_decide_small_load_takes_all_gpus_of_box(plan_of_box: Plan) -> None:
    alone = planned(**newcomer(use_idle_gpus=False))
    [group], [lonely] = plan_of_box.groups, alone.groups
    assert (group.replicas, group.extra_replicas, len(group.placement)) == (2, 1, 2)
    assert (lonely.replicas, lonely.extra_replicas) == (1, 0)
    assert (plan_of_box.nodes[0].idle_gpus, alone.nodes[0].idle_gpus) == (0, 1)
    assert plan_of_box.cost_per_hour == alone.cost_per_hour
    [ours], [theirs] = plan_of_box.latency_forecasts, alone.latency_forecasts
    assert ours.ttft.p95 is not None
    assert theirs.ttft.p95 is not None
    assert ours.ttft.p95 < theirs.ttft.p95


@pytest.mark.more
@pytest.mark.parametrize(("extra", "replicas"), [(1, 2), (0, 1)])
def test_decide_again_starts_and_stops_no_extra_replica(
    plan_of_box: Plan, tmp_path: Path, extra: int, replicas: int
) -> None:
    """A replica that runs is kept, as it costs nothing; one that does not is not started."""
    [group] = plan_of_box.groups
    update = {"replicas": replicas, "placement": group.placement[:replicas]}
    plan_of_box.model_copy(update={"groups": [group.model_copy(update=update)]}).save(tmp_path / "plan.json")
    again = planned(**newcomer(), change={"plan": tmp_path / "plan.json"})
    assert [(g.replicas, g.extra_replicas) for g in again.groups] == [(replicas, extra)]
    assert (plan_of_box.proof.unit, again.proof.unit) == (
        "$/h",
        "$ in 24 h, including the cost of the change",
    )
