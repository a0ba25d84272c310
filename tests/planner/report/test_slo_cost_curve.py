"""Cost against SLO: what the solver found at each factor, and what follows from it at others."""

from __future__ import annotations

from cornplug.planner.report.slo_cost_curve import SweepCost, monotone_points


def test_monotone_points_looser_bounds_never_cost_more() -> None:
    found = {
        2.0: SweepCost(366.0),
        1.0: SweepCost(114.0),
        1.5: SweepCost(110.0),
        0.7: SweepCost(165.0),
        0.5: SweepCost(None),
        3.0: SweepCost(None),
    }
    points = {p.slo_factor: p.cost_per_hour for p in monotone_points(found)}
    assert points == {0.5: None, 0.7: 165.0, 1.0: 114.0, 1.5: 110.0, 2.0: 110.0, 3.0: 110.0}
    assert list(points) == sorted(points)


def test_monotone_points_plan_keeps_its_cost() -> None:
    """A quick solve at tighter bounds, not rehearsed, may look cheaper."""
    assert [p.cost_per_hour for p in monotone_points({0.7: SweepCost(90.0), 1.0: SweepCost(114.0)})] == [
        90.0,
        114.0,
    ]
