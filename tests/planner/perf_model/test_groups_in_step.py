"""Shared iterations of attention-DP groups, at the ends of what they can be."""

from __future__ import annotations

import pytest

from cornplug.planner.perf_model.analytic_load import shared_iterations


def test_shared_iterations_one_group_shares_none() -> None:
    found = shared_iterations(0.3, 1, 2.0)
    assert (found.busy, found.mean_groups, found.duration_ratio) == (0.3, 1.0, 1.0)


def test_shared_iterations_rare_prompts_come_one_by_one() -> None:
    """Each stops all eight groups."""
    found = shared_iterations(0.001, 8, 2.0)
    assert found.busy == pytest.approx(0.008, rel=0.01)
    assert found.mean_groups == pytest.approx(1, abs=0.001)


def test_shared_iterations_overload_fills_every_group() -> None:
    found = shared_iterations(2.0, 8, 2.0)
    assert found.mean_groups == pytest.approx(8, abs=0.02)
    assert found.duration_ratio == pytest.approx(2, abs=0.01)
    assert found.busy > 0.99
