"""Load is spread over what is paid for, and nothing else of a solution changes."""

from __future__ import annotations

import pytest

from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer import milp
from cornplug.planner.optimizer.optimization_problem import (
    Cell,
    MachineClass,
    OptimizationProblem,
    PathVariant,
    PoolLimits,
    RateDemand,
    ServiceDemand,
)
from cornplug.planner.pipeline.confirm_capacities import balance_load

NODES = (MachineClass("small", "L4", 1, 1.0, 2), MachineClass("large", "H100", 1, 3.0, 1))


def pool(rate: float, large: float = 6.0) -> OptimizationProblem:
    cells = (
        Cell("a", "llm/PD", "small", 1, 1.0, {"chat/one": 2.0}),
        Cell("b", "llm/PD", "large", 1, 1.0, {"chat/one": large}),
    )
    variant = PathVariant("v", "chat/one", "monolith", (ServiceDemand("llm/PD", 1.0),))
    return OptimizationProblem(
        NODES, cells, (RateDemand("chat/one", rate),), (variant,), limits=PoolLimits(0.95, 0.95)
    )


def test_balance_load_unequal_replicas_have_equal_load() -> None:
    solution = milp.solve(pool(6.0), SolverOptions())
    even = balance_load(pool(6.0), solution, SolverOptions())
    assert even is not None
    assert even.replicas == solution.replicas == {"a": 1, "b": 1}
    assert even.objective == solution.objective
    rates = {f.cell: f.rate for f in even.flows}
    assert rates == {"a": pytest.approx(1.5), "b": pytest.approx(4.5)}


def test_replicas_that_no_longer_carry_it_are_no_balance() -> None:
    solution = milp.solve(pool(6.0), SolverOptions())
    assert balance_load(pool(6.0, large=4.0), solution, SolverOptions()) is None
