"""Objectives of the pool model, in their order: dollars; or goodput or the least share served before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pulp import lpSum

from cornplug.planner.optimizer import transition_costs
from cornplug.planner.optimizer.optimization_problem import Cell
from cornplug.planner.optimizer.solution import Values
from cornplug.planner.optimizer.variables import PoolModel


@dataclass(frozen=True)
class SolveGoal:
    """The expression that one call of the solver minimises (sign 1) or maximises (-1)."""

    name: str
    expression: Any
    sign: int = 1

    def reached(self, values: Values) -> float:
        """The minimised value, which is the negative one of a goal that is maximised."""
        return float(self.sign * sum(weight * values[v] for v, weight in self.expression.items()))


def goals(model: PoolModel) -> list[SolveGoal]:
    """In their order: a later one chooses among the plans that are best by the earlier ones."""
    first = {"cost": [], "goodput": [goodput(model)], "max-min": [min_served_fraction(model), goodput(model)]}
    return [*first[model.pool.objective], cost_objective(model), tie_break(model)]


def cost_objective(model: PoolModel) -> SolveGoal:
    """Dollars an hour; when re-planning, dollars over the horizon, changes included."""
    nodes = lpSum(node.price * model.z[name] for name, node in model.nodes.items())
    current = model.pool.current
    if current is None:
        return SolveGoal("money", nodes)
    return SolveGoal("money", current.horizon_hours * nodes + transition_costs.cost(model))


def goodput(model: PoolModel) -> SolveGoal:
    """Weighted requests a second within their SLOs."""
    return SolveGoal(
        "goodput", lpSum(model.demands[v.demand].weight * model.phi[v.name] for v in model.variants), -1
    )


def min_served_fraction(model: PoolModel) -> SolveGoal:
    return SolveGoal("least_share", 1 * model.min_served, -1)


def tie_break(model: PoolModel) -> SolveGoal:
    """The tie-break: GPUs taken at their price, plus each cell's preference (3 % at most).

    It is a separate goal after the cost, with the nodes held as they are, and no small term of the
    cost: a term small enough never to outweigh a cent would drown in the solver's tolerances, and
    a larger one could change the cost.
    """
    return SolveGoal("neatness", lpSum(_weight(model, c) * model.x[c.name] for c in model.pool.cells))


def _weight(model: PoolModel, cell: Cell) -> float:
    node = model.nodes[cell.nodes]
    return max(node.price / node.gpus, 1e-3) * cell.gpus * (1 + cell.preference)
