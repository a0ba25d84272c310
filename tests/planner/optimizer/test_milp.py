"""What the model decides, one rule at a time, where the right answer can be seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expected_errors import expect_error
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.pools import EXACT, NO_RESERVE, one_service

from cornplug.errors import ConfigError
from cornplug.planner.optimizer import milp
from cornplug.planner.optimizer.milp import solve
from cornplug.planner.optimizer.optimization_problem import (
    CacheLevel,
    Cell,
    CurrentState,
    MachineClass,
    OptimizationProblem,
    PathVariant,
    PoolLimits,
    RateDemand,
    ServiceDemand,
    SolveProgress,
)


def two_tiers(tight: float, loose: float) -> OptimizationProblem:
    """A tight cell that carries less than a loose one, and a demand for each tier."""
    return OptimizationProblem(
        nodes=(MachineClass("n", "g", 1, 1.0, 50),),
        cells=(
            Cell("tight", "s", "n", 1, 0.2, {"fast": 1.0, "slow": 1.0}),
            Cell("loose", "s", "n", 1, 1.0, {"fast": 2.0, "slow": 2.0}),
        ),
        demands=(RateDemand("fast", tight), RateDemand("slow", loose)),
        variants=(
            PathVariant("fast", "fast", "monolith", (ServiceDemand("s", 0.2),)),
            PathVariant("slow", "slow", "monolith", (ServiceDemand("s", 1.0),)),
        ),
        limits=NO_RESERVE,
    )


def test_solve_urgent_work_on_tight_cells_loose_work_fills_rest() -> None:
    plan = solve(two_tiers(1.5, 2.5), EXACT)
    assert plan.replicas == {"tight": 2, "loose": 1}
    carried = {(flow.demand, flow.cell): flow.rate for flow in plan.flows}
    assert carried["fast", "tight"] == pytest.approx(1.5)
    assert carried["slow", "tight"] + carried["slow", "loose"] == pytest.approx(2.5)
    assert ("fast", "loose") not in carried


@settings(max_examples=20)
@given(st.floats(0.1, 6), st.floats(0.1, 6))
def test_flows_add_up_to_the_work_and_keep_their_tiers(tight: float, loose: float) -> None:
    pool = two_tiers(tight, loose)
    plan = solve(pool, EXACT)
    for u in pool.demands:
        assert sum(f.rate for f in plan.flows if f.demand == u.name) == pytest.approx(u.rate, abs=1e-5)
    tier = {c.name: c.tier for c in pool.cells}
    assert all(tier[f.cell] <= f.tier for f in plan.flows)


def test_work_that_can_wait_may_use_what_is_kept_free_for_peaks() -> None:
    pool = one_service(
        {"g": {"on": 1.0, "off": 1.0}}, {"g": 1.0}, {"on": 0.8, "off": 0.15}, limits=PoolLimits(0.95, 0.8)
    )
    waits = tuple(replace(u, online=u.name == "on") for u in pool.demands)
    assert solve(replace(pool, demands=waits), EXACT).nodes == {"g": 1}
    assert solve(pool, EXACT).nodes == {"g": 2}, "both online: 0.95 of one replica is too full"


@pytest.mark.parametrize(
    ("growth_per_s", "start_s", "replicas"),
    [(0.0, 600.0, 4), (0.001, 60.0, 4), (0.005, 100.0, 5), (0.005, 400.0, 10)],
)
def test_solve_growth_until_replicas_start_is_carried(
    growth_per_s: float, start_s: float, replicas: int
) -> None:
    """3 requests/s fill 80 % of 4 replicas; those that come in `start_s` may fill them to 95 %."""
    pool = one_service({"g": {"u": 1.0}}, {"g": 1.0}, {"u": 3.0}, limits=PoolLimits(0.95, 0.8))
    pool = replace(
        pool,
        cells=tuple(replace(c, start_s=start_s) for c in pool.cells),
        demands=tuple(replace(u, growth_per_s=growth_per_s) for u in pool.demands),
    )
    assert solve(pool, EXACT).replicas == {"s@g": replicas}
    waits = tuple(replace(u, online=False) for u in pool.demands)
    assert solve(replace(pool, demands=waits), EXACT).replicas == {"s@g": 4}, "work that can wait has none"


def test_solve_growth_prefers_cell_that_starts_sooner() -> None:
    """As much for a little less money, with weights that take ten times as long to read."""
    pool = one_service({"slow": {"u": 1.0}, "quick": {"u": 1.0}}, {"slow": 1.0, "quick": 1.1}, {"u": 3.3})
    start = {"slow": 600.0, "quick": 60.0}
    pool = replace(pool, cells=tuple(replace(c, start_s=start[c.nodes]) for c in pool.cells))
    assert solve(pool, EXACT).nodes == {"slow": 4}
    grows = replace(pool, demands=tuple(replace(u, growth_per_s=0.002) for u in pool.demands))
    assert solve(grows, EXACT).nodes == {"quick": 4}, "3.3 x 1.12; 3.3 x 2.2 on slow ones"


def spot_pool(share: float) -> OptimizationProblem:
    """10 online and 4 other requests/s; a replica carries one, and spot machines cost a quarter."""
    pool = one_service(
        {"spot": {"on": 1.0, "off": 1.0}, "own": {"on": 1.0, "off": 1.0}},
        {"spot": 1.0, "own": 4.0},
        {"on": 10.0, "off": 4.0},
        limits=replace(NO_RESERVE, spot_share=share),
    )
    return replace(
        pool,
        nodes=tuple(replace(n, spot=n.name == "spot") for n in pool.nodes),
        demands=tuple(replace(u, online=u.name == "on") for u in pool.demands),
    )


@pytest.mark.parametrize(("share", "spot", "own"), [(0.0, 4, 10), (0.5, 9, 5), (0.25, 6, 8), (1.0, 14, 0)])
def test_solve_spot_machines_do_their_share_of_online_work(share: float, spot: int, own: int) -> None:
    """At most 2.5 of 10 there: 8 replicas on the others, which then carry 8."""
    plan = solve(spot_pool(share), EXACT)
    assert (plan.nodes.get("spot", 0), plan.nodes.get("own", 0)) == (spot, own)
    online = sum(f.rate for f in plan.flows if (f.demand, f.cell) == ("on", "s@spot"))
    assert online <= share * 10 + 1e-6


def test_solve_spot_share_that_is_none_is_refused() -> None:
    with expect_error(ConfigError, field="limits.spot_share"):
        solve(spot_pool(1.5), EXACT)


@pytest.mark.parametrize(("rate", "alone", "spared"), [(0.7, 1, 2), (2.3, 3, 4), (7.5, 10, 10)])
def test_solve_spare_service_survives_loss_of_replica(rate: float, alone: int, spared: int) -> None:
    """With ten replicas, what is kept for peaks (0.8 of 10 <= 0.95 of 9) already is the spare one."""
    pool = one_service({"g": {"u": 1.0}}, {"g": 1.0}, {"u": rate}, limits=PoolLimits(0.95, 0.8))
    assert solve(pool, EXACT).replicas == {"s@g": alone}
    spare = replace(pool, limits=replace(pool.limits, spare=frozenset({"s"})))
    assert solve(spare, EXACT).replicas == {"s@g": spared}


def test_solve_cache_level_is_bought_when_it_pays() -> None:
    def pool(dram: float) -> OptimizationProblem:
        plain = one_service({"g": {"u": 1.0}}, {"g": 1.0}, {"u": 4.0})
        ways = tuple(
            PathVariant(name, "u", "E+PD", (ServiceDemand("s", 1.0, work),), levels=frozenset({name}))
            for name, work in (("none", 1.0), ("large", 0.5))
        )
        nodes = tuple(replace(n, dram=dram) for n in plain.nodes)
        levels = (CacheLevel("none", "c", 0), CacheLevel("large", "c", 10))
        return replace(plain, nodes=nodes, variants=ways, levels=levels)

    assert (solve(pool(5), EXACT).levels, solve(pool(5), EXACT).nodes) == ({"large"}, {"g": 2})
    assert solve(pool(3), EXACT).nodes == {"g": 4}, "10 bytes need four such nodes, which need no cache"


def test_solve_slow_network_forbids_split() -> None:
    cells = {"mono": 1.0, "P": 4.0, "D": 4.0}
    pool = OptimizationProblem(
        nodes=(MachineClass("n", "g", 1, 1.0, 50, nic=2.0),),
        cells=tuple(Cell(name, name, "n", 1, 1.0, {"u": rate}) for name, rate in cells.items()),
        demands=(RateDemand("u", 4.0),),
        variants=(
            PathVariant("mono", "u", "monolith", (ServiceDemand("mono", 1.0),)),
            PathVariant("apart", "u", "P+D", (ServiceDemand("P", 1.0), ServiceDemand("D", 1.0)), network=0.7),
        ),
        limits=NO_RESERVE,
    )
    assert solve(pool, EXACT).replicas == {"P": 1, "D": 1}
    slow = replace(pool, nodes=(replace(pool.nodes[0], nic=0.5),))
    assert solve(slow, EXACT).nodes == {"n": 4}, "0.35 bytes/s a node: at most half goes apart"


def test_solve_tie_goes_to_preferred_cell() -> None:
    pool = one_service({"g": {"u": 1.0}}, {"g": 1.0}, {"u": 3.0})
    one = pool.cells[0]
    worse = replace(one, name="a-worse", preference=0.03)
    assert solve(replace(pool, cells=(worse, one)), EXACT).replicas == {one.name: 3}
    stronger = replace(worse, capacity={"u": 1.5})
    assert solve(replace(pool, cells=(stronger, one)), EXACT).replicas == {"a-worse": 2}


def test_solve_max_min_raises_least_served() -> None:
    pool = one_service({"g": {"easy": 4.0, "hard": 1.0}}, {"g": 1.0}, {"easy": 4.0, "hard": 4.0}, stock=2)
    most = solve(replace(pool, objective="goodput"), EXACT)
    fair = solve(replace(pool, objective="max-min"), EXACT)
    assert most.served == pytest.approx({"easy": 4.0, "hard": 1.0}, abs=1e-4)
    assert fair.objective == pytest.approx(0.4)
    assert fair.served == pytest.approx({"easy": 1.6, "hard": 1.6}, abs=1e-4)


# Re-planning ----------------------------------------------------------------------------------


def prefill_decode(rate: float, running: CurrentState) -> OptimizationProblem:
    cells = (
        Cell("P", "P", "n", 1, 1.0, {"u": 2.0}, switches_with=("D",)),
        Cell("D", "D", "n", 1, 1.0, {"u": 1.0}, switches_with=("P",)),
    )
    return OptimizationProblem(
        nodes=(MachineClass("n", "g", 1, 1.0, 20),),
        cells=cells,
        demands=(RateDemand("u", rate),),
        variants=(PathVariant("u", "u", "P+D", (ServiceDemand("P", 1.0), ServiceDemand("D", 1.0))),),
        limits=NO_RESERVE,
        current=running,
    )


COSTS = {"P": 0.5, "D": 0.5}


def test_solve_role_switch_precedes_restart() -> None:
    running = CurrentState({"P": 3, "D": 3}, start_cost=COSTS, switch_cost=0.01, horizon_hours=10)
    plan = solve(prefill_decode(4.0, running), EXACT)
    assert plan.replicas == {"P": 2, "D": 4}
    assert (plan.switched, plan.started) == ({("P", "D"): 1}, {})
    assert plan.objective == pytest.approx(10 * 6 + 0.01)


def test_solve_short_horizon_keeps_running_replicas() -> None:
    """Another GPU type would be cheaper by 0.1 an hour: after 10 hours that pays a start of 0.5."""

    def plan(hours: float) -> dict[str, int]:
        running = CurrentState({"s@old": 1}, start_cost={"s@new": 0.5}, horizon_hours=hours)
        pool = one_service({"old": {"u": 1.0}, "new": {"u": 1.0}}, {"old": 1.0, "new": 0.9}, {"u": 1.0})
        return dict(solve(replace(pool, current=running), EXACT).replicas)

    assert plan(4) == {"s@old": 1}
    assert plan(10) == {"s@new": 1}


def test_solve_young_replicas_and_change_budget_are_kept() -> None:
    running = CurrentState({"P": 4, "D": 4}, start_cost=COSTS, switch_cost=0.01, horizon_hours=10)
    below_min_dwell = replace(running, below_min_dwell={"P": 4})
    assert solve(prefill_decode(2.0, running), EXACT).replicas == {"P": 1, "D": 2}
    assert solve(prefill_decode(2.0, below_min_dwell), EXACT).replicas == {"P": 4, "D": 2}
    grown = prefill_decode(6.0, replace(running, max_changes=2))
    plan = solve(grown, EXACT)
    assert sum(plan.started.values()) + sum(plan.switched.values()) == 2


# Solvers --------------------------------------------------------------------------------------


def test_solve_progress_is_reported_with_proof() -> None:
    seen: list[SolveProgress] = []
    pool = one_service({"a": {"u": 0.37}, "b": {"u": 2.0}}, {"a": 1.01, "b": 3.67}, {"u": 4.3})
    plan = solve(pool, EXACT, seen.append)
    assert seen
    assert [p.seconds for p in seen] == sorted(p.seconds for p in seen)
    assert plan.status == "optimal"
    assert plan.bound == pytest.approx(plan.objective)
    assert plan.first_s is not None
    assert plan.seconds >= plan.first_s


def test_solve_slack_names_binding_constraints() -> None:
    pool = one_service({"a": {"u": 1.0}}, {"a": 1.0}, {"u": 2.0}, stock=3)
    slack = solve(pool, EXACT).slack
    assert not any(name.startswith("keep") for name in slack)
    assert slack["stock[a]"] == pytest.approx(1)
    assert slack["capacity[s@a]"] == pytest.approx(0)
    assert slack["packing[a]"] == pytest.approx(0)


def test_solve_goodput_progress_is_positive() -> None:
    seen: list[SolveProgress] = []
    pool = one_service({"a": {"u": 1.0}}, {"a": 1.0}, {"u": 4.5}, stock=3)
    plan = solve(replace(pool, objective="goodput"), EXACT, seen.append)
    assert plan.objective == pytest.approx(3)
    assert plan.bound == pytest.approx(3)
    assert all(p.incumbent is None or 0 <= p.incumbent <= 3 + 1e-6 for p in seen)
    assert seen[-1].incumbent == pytest.approx(3)


def test_milp_duplicate_constraint_name_is_refused() -> None:
    model = milp.build(one_service({"a": {"u": 1.0}}, {"a": 1.0}, {"u": 2.5}))
    with pytest.raises(ValueError, match="two constraints"):
        model.add("stock[a]", model.z["a"] <= 1)
