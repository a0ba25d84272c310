"""What an impossible plan is told: the constraint by name, what it allows and what is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expected_errors import expect_error
from planner.pools import EXACT, one_service

from cornplug.errors import ConfigError, PlanInfeasible, PlanUnfinished
from cornplug.planner.optimizer import decomposition
from cornplug.planner.optimizer.infeasibility import summarize_unserved
from cornplug.planner.optimizer.milp import build, solve
from cornplug.planner.optimizer.optimization_problem import (
    CacheLevel,
    Cell,
    CurrentState,
    OptimizationProblem,
    PathVariant,
    PoolLimits,
    ServiceDemand,
)
from cornplug.planner.optimizer.solvers import SolverRun

POOL = one_service({"g": {"u": 1.0}}, {"g": 2.0}, {"u": 6.3}, stock=4)


def told(pool: OptimizationProblem, **more: dict[str, str]) -> str:
    with pytest.raises(PlanInfeasible) as error:
        solve(pool, EXACT, **more)
    return str(error.value)


def test_infeasibility_small_stock_names_class_and_number_needed() -> None:
    message = told(POOL)
    assert "stock[g]: 4 nodes, 7 needed. Increase the stock of g to 7." in message
    assert "demand[u]: 4 requests/s served, 6.3 needed" in message


def test_infeasibility_small_stocks_name_the_cheapest() -> None:
    pool = one_service({"old": {"u": 1.0}, "new": {"u": 2.0}}, {"old": 1.0, "new": 5.0}, {"u": 6.0}, stock=2)
    message = told(replace(pool, nodes=tuple(replace(n, stock=1) for n in pool.nodes)))
    assert "stock[old]: 1 nodes, 4 needed" in message
    assert "stock[new]" not in message


def test_infeasibility_raised_stock_is_enough() -> None:
    """The remedy named really is one."""
    assert solve(replace(POOL, nodes=(replace(POOL.nodes[0], stock=7),)), EXACT).nodes == {"g": 7}


def test_infeasibility_small_change_budget_names_number_needed() -> None:
    running = CurrentState({"s@g": 1}, start_cost={"s@g": 1.0}, max_changes=2)
    message = told(replace(POOL, nodes=(replace(POOL.nodes[0], stock=10),), current=running))
    assert "change_budget: 2 changes, 6 needed. Increase max_changes to 6." in message
    assert "stock" not in message


def test_infeasibility_spare_replicas_without_room_name_n_plus_one() -> None:
    pool = one_service(
        {"g": {"u": 1.0}}, {"g": 2.0}, {"u": 0.7}, stock=1, limits=PoolLimits(spare=frozenset("s"))
    )
    message = told(pool)
    assert "stock[g]: 1 nodes, 2 needed" in message
    assert "spare[s]" in message
    assert "n_plus_one" in message


def test_infeasibility_slow_network_names_bytes_needed() -> None:
    slow = replace(POOL, nodes=(replace(POOL.nodes[0], stock=7, nic=1.0),))
    ways = (replace(slow.variants[0], network=2.0),)
    message = told(replace(slow, variants=ways))
    assert "network: 4.9 bytes/s, 12.6 needed" in message


def test_infeasibility_large_caches_name_bytes_needed() -> None:
    pool = replace(
        POOL,
        nodes=(replace(POOL.nodes[0], stock=7, dram=1.0),),
        levels=(CacheLevel("only", "c", 100.0),),
    )
    assert "memory[caches]: 7 bytes, 100 needed" in told(pool)


def test_infeasibility_strict_tier_names_fastest_cell() -> None:
    strict = replace(POOL, variants=(PathVariant("u", "u", "monolith", (ServiceDemand("s", 0.05),)),))
    message = told(strict)
    assert "demand[u]: s must finish within 0.05 s, but the fastest, s@g, takes 1 s" in message
    assert "no profile" in told(strict, notes={"u": "no profile fits the GPU"})


def test_infeasibility_missing_cells_or_variants_are_named() -> None:
    assert "t does not fit on any GPU of the pool. Add a larger GPU" in told(
        replace(POOL, variants=(PathVariant("u", "u", "E+PD", (ServiceDemand("t", 1.0),)),))
    )
    assert "no structure fits its requests" in told(replace(POOL, variants=()))
    deaf = (replace(POOL.cells[0], capacity={}),)
    assert "no configuration of s meets its SLO" in told(replace(POOL, cells=deaf))


def test_infeasibility_demands_with_one_reason_are_named_together() -> None:
    """Not the same sentence for each."""
    two = tuple(replace(POOL.demands[0], name=name) for name in ("u", "v"))
    variants = tuple(replace(POOL.variants[0], name=u.name, demand=u.name) for u in two)
    deaf = (replace(POOL.cells[0], capacity={}),)
    message = told(replace(POOL, demands=two, variants=variants, cells=deaf))
    assert message.count("no configuration of s") == 1
    assert "demand[u, v]: " in message
    model = build(replace(POOL, demands=two, variants=variants, cells=deaf))
    assert summarize_unserved(model) == "nothing serves u and 1 more: no configuration of s meets its SLO"
    assert summarize_unserved(build(POOL)) == ""


def test_solve_time_limit_raises_plan_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine is slow enough for HiGHS to find nothing here: a solver that never does stands in."""
    monkeypatch.setattr(decomposition, "run_solver", lambda *_, **__: SolverRun("none", 0.1))
    with pytest.raises(PlanUnfinished, match="infeasibility was not proven"):
        solve(POOL, EXACT.model_copy(update={"time_limit_s": 0.5}))


@pytest.mark.parametrize(
    ("pool", "field"),
    [
        (replace(POOL, cells=(replace(POOL.cells[0], gpus=0.3),)), "cells[s@g].gpus"),
        (replace(POOL, cells=(replace(POOL.cells[0], gpus=0),)), "cells[s@g].gpus"),
        (replace(POOL, cells=(replace(POOL.cells[0], capacity={"u": 0.0}),)), "cells[s@g].capacity[u]"),
        (replace(POOL, cells=(replace(POOL.cells[0], nodes="x"),)), "cells[s@g].nodes"),
        (replace(POOL, cells=POOL.cells * 2), "cells[s@g]"),
        (replace(POOL, cells=(replace(POOL.cells[0], preference=0.5),)), "cells[s@g].preference"),
        (replace(POOL, nodes=(replace(POOL.nodes[0], price=float("nan")),)), "nodes[g].price"),
        (replace(POOL, nodes=(replace(POOL.nodes[0], stock=-1),)), "nodes[g].stock"),
        (replace(POOL, demands=(replace(POOL.demands[0], rate=-1.0),)), "demands[u].rate"),
        (replace(POOL, variants=(replace(POOL.variants[0], demand="x"),)), "variants[u].demand"),
        (replace(POOL, variants=(replace(POOL.variants[0], levels=frozenset("l")),)), "variants[u].levels"),
        (replace(POOL, current=CurrentState({"x": 1})), "current.replicas[x]"),
        (
            replace(POOL, current=CurrentState({"s@g": 1}, below_min_dwell={"s@g": 2})),
            "current.replicas[s@g]",
        ),
    ],
)  # fmt: skip
def test_solve_invalid_pool_is_refused(pool: OptimizationProblem, field: str) -> None:
    with expect_error(ConfigError, field=field):
        solve(pool, EXACT)


def test_solve_replica_over_several_nodes_takes_whole_nodes() -> None:
    wide = replace(POOL, nodes=(replace(POOL.nodes[0], gpus=8),))
    cell = Cell("s@wide", "s", "g", 16, 1.0, {"u": 7.0})
    assert solve(replace(wide, cells=(cell,)), EXACT).nodes == {"g": 2}
    with expect_error(ConfigError, field="cells[s@wide].gpus", match="12"):
        solve(replace(wide, cells=(replace(cell, gpus=12),)), EXACT)
