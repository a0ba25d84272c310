"""Goals of the pool model, in the order in which they are optimised.

The objective "cost" has only the cost. The other objectives optimise goodput, or the least served share and
goodput, before the cost.
"""

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
    """Expression that one call of the solver minimises (sign 1) or maximises (sign -1)."""

    name: str
    expression: Any
    sign: int = 1

    def reached(self, values: Values) -> float:
        """Return the value of the expression, negated if the goal is maximised."""
        return float(self.sign * sum(weight * values[v] for v, weight in self.expression.items()))


def goals(model: PoolModel) -> list[SolveGoal]:
    """Return the goals in order. A later goal chooses among the best plans of the earlier goals."""
    first = {"cost": [], "goodput": [goodput(model)], "max-min": [min_served_fraction(model), goodput(model)]}
    return [*first[model.pool.objective], cost_objective(model), tie_break(model)]


def cost_objective(model: PoolModel) -> SolveGoal:
    """Return the goal to minimise the cost.

    The cost is in dollars per hour. When re-planning, it is in dollars over the horizon, including changes.
    """
    nodes = lpSum(node.price * model.z[name] for name, node in model.nodes.items())
    current = model.pool.current
    if current is None:
        return SolveGoal("money", nodes)
    return SolveGoal("money", current.horizon_hours * nodes + transition_costs.cost(model))


def goodput(model: PoolModel) -> SolveGoal:
    """Return the goal to maximise the weighted number of requests per second that are served."""
    return SolveGoal(
        "goodput", lpSum(model.demands[v.demand].weight * model.phi[v.name] for v in model.variants), -1
    )


def min_served_fraction(model: PoolModel) -> SolveGoal:
    return SolveGoal("least_share", 1 * model.min_served, -1)


def tie_break(model: PoolModel) -> SolveGoal:
    """Return the goal that breaks ties: the price of the GPUs in use, plus each cell's preference (at most 3
    %).

    It is a separate goal after the cost, with the nodes fixed. As a term of the cost, it would either be
    smaller than the solver's tolerances or change the cost.
    """
    return SolveGoal("neatness", lpSum(_weight(model, c) * model.x[c.name] for c in model.pool.cells))


def _weight(model: PoolModel, cell: Cell) -> float:
    node = model.nodes[cell.nodes]
    return max(node.price / node.gpus, 1e-3) * cell.gpus * (1 + cell.preference)
