"""What runs, in a new pool's terms: the same processes are the same, whatever is promised of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cornplug.planner.candidates.cells import CellSpec
from cornplug.planner.candidates.latency_tiers import LatencyTier
from cornplug.planner.inputs.schema import ChangeRules
from cornplug.planner.optimizer import milp
from cornplug.planner.optimizer.optimization_problem import (
    Cell,
    CurrentState,
    MachineClass,
    OptimizationProblem,
    PathVariant,
    RateDemand,
    ServiceDemand,
)
from cornplug.planner.pipeline import formulate
from cornplug.planner.pipeline.decide import decide
from cornplug.planner.plan import Plan

from .. import sample_input
from ..pools import EXACT, NO_RESERVE


def two_tiers() -> tuple[Plan, dict[str, CellSpec], OptimizationProblem]:
    """A plan, and the cells that it would have if its service had two tiers."""
    decision = decide(sample_input.given(rate=7.5), digest="0" * 64)
    (home,) = [decision.problem.cells[name] for name, n in decision.solution.replicas.items() if n]
    assert home.hardware is None
    loose = replace(
        home,
        cell=replace(home.cell, name=f"{home.cell.name}:t1", tier=5.0),
        tier=LatencyTier(5.0, 1.0, 1, 5.0),
    )
    cells = {spec.cell.name: spec for spec in (home, loose)}
    return decision.plan, cells, replace(decision.pool, cells=tuple(s.cell for s in cells.values()))


def test_adopt_current_other_tier_of_same_process_is_free() -> None:
    plan, cells, pool = two_tiers()
    taken, known = formulate.adopt_current(pool, cells, ChangeRules(plan="x"), plan, now=1e9)
    one, other = cells
    assert taken.current is not None
    assert taken.current.free_switches == {(one, other), (other, one)}
    assert known[one].cell.switches_with == (other,)
    assert sum(taken.current.replicas.values()) == 1
    # $3.67 an hour for 300 s
    assert taken.current.start_cost[one] == pytest.approx(3.67 / 12)


def test_adopt_current_replicas_below_min_dwell_are_counted() -> None:
    plan, cells, pool = two_tiers()
    aged = plan.model_copy(update={"groups": [g.model_copy(update={"since": 1000.0}) for g in plan.groups]})
    for now, below_min_dwell in ((1000.0 + 899, 1), (1000.0 + 901, 0)):
        taken, _ = formulate.adopt_current(pool, cells, ChangeRules(plan="x"), aged, now=now)
        assert taken.current is not None
        assert sum(taken.current.below_min_dwell.values()) == below_min_dwell


def test_keep_current_running_dominated_cell_is_kept() -> None:
    plan, cells, _ = two_tiers()
    specs = list(cells.values())
    assert formulate.keep_current(specs, specs[:1], plan) == specs
    stopped = plan.model_copy(update={"groups": []})
    assert formulate.keep_current(specs, specs[:1], stopped) == specs[:1]


def test_limited_to_known_cells_drops_others() -> None:
    runs = CurrentState({"a": 2, "b": 1}, {"b": 1})
    assert formulate.limit_to_cells(runs, ["a"]) == CurrentState({"a": 2}, {})
    assert formulate.limit_to_cells(None, ["a"]) is None


@pytest.mark.parametrize(("free", "changes"), [(True, 0), (False, 1)])
def test_current_deployment_free_switch_is_outside_change_budget(free: bool, changes: int) -> None:
    """The loose cell's replica is needed at the tight tier: with a budget of 0 only free switches may."""
    loose = Cell("loose", "s", "n", 1, 5.0, {"u": 1.0}, switches_with=("tight",))
    pool = OptimizationProblem(
        nodes=(MachineClass("n", "G", 1, 1.0, 1),),
        cells=(loose, Cell("tight", "s", "n", 1, 1.0, {"u": 1.0})),
        demands=(RateDemand("u", 1.0),),
        variants=(PathVariant("v", "u", "monolith", (ServiceDemand("s", 1.0),)),),
        limits=NO_RESERVE,
        current=CurrentState(
            {"loose": 1},
            start_cost={"tight": 2.0},
            switch_cost=0.5,
            max_changes=changes,
            free_switches=frozenset({("loose", "tight")}) if free else frozenset(),
        ),
    )
    found = milp.solve(pool, EXACT)
    assert found.switched == {("loose", "tight"): 1}
    assert found.objective == pytest.approx(24 + (0 if free else 0.5))
