"""Load is spread over what is paid for, and nothing else of a solution changes."""

from __future__ import annotations

import pytest

from cornplug.planner.inputs.schema import Solver
from cornplug.planner.optimizer import milp
from cornplug.planner.optimizer.optimization_problem import Cell, Demand, Limits, Need, Nodes, Pool, Variant
from cornplug.planner.pipeline.balance_load import balanced

NODES = (Nodes("small", "L4", 1, 1.0, 2), Nodes("large", "H100", 1, 3.0, 1))


def pool(rate: float, large: float = 6.0) -> Pool:
    cells = (
        Cell("a", "llm/PD", "small", 1, 1.0, {"chat/one": 2.0}),
        Cell("b", "llm/PD", "large", 1, 1.0, {"chat/one": large}),
    )
    variant = Variant("v", "chat/one", "monolith", (Need("llm/PD", 1.0),))
    return Pool(NODES, cells, (Demand("chat/one", rate),), (variant,), limits=Limits(0.95, 0.95))


def test_every_replica_is_filled_alike() -> None:
    solution = milp.solve(pool(6.0), Solver())
    even = balanced(pool(6.0), solution, Solver())
    assert even is not None
    assert even.replicas == solution.replicas == {"a": 1, "b": 1}
    assert even.objective == solution.objective
    rates = {f.cell: f.rate for f in even.flows}
    assert rates == {"a": pytest.approx(1.5), "b": pytest.approx(4.5)}


def test_replicas_that_no_longer_carry_it_are_no_balance() -> None:
    solution = milp.solve(pool(6.0), Solver())
    assert balanced(pool(6.0, large=4.0), solution, Solver()) is None
