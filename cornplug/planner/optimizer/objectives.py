"""Goals of the pool model, in the order in which they are optimised, and the costs of a change.

The objective "cost" has only the cost. The other objectives optimise goodput, or the least served share and
goodput, before the cost.

When re-planning, x = x0 + a - d + in - out, with starts a, stops d, and role switches (in, out) between cells
whose engines can change their role without a restart. Switches are preferred to restarts because they cost
less. The number of changes may be limited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pulp import lpSum

from cornplug.planner.optimizer.optimization_problem import Cell, CurrentState
from cornplug.planner.optimizer.solution import Values
from cornplug.planner.optimizer.variables import PoolModel


@dataclass(frozen=True)
class SolveGoal:
    """Expression that one call of the solver minimises (sign 1) or maximises (sign -1)."""

    name: str
    expression: Any
    sign: int = 1

    def evaluate(self, values: Values) -> float:
        """Return the value of the expression, negated if the goal is maximised."""
        return float(self.sign * sum(weight * values[v] for v, weight in self.expression.items()))


def goals(model: PoolModel) -> list[SolveGoal]:
    """Return the goals in order. Each goal chooses among the plans that are best for the earlier goals."""
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
    return SolveGoal("money", current.horizon_hours * nodes + _transition_cost(model))


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

    The tie-break is a separate goal after the cost, with fixed numbers of nodes. As a term of the cost, it
    would either be smaller than the solver's tolerances or change the cost.
    """
    return SolveGoal("neatness", lpSum(_weight(model, c) * model.x[c.name] for c in model.pool.cells))


def _weight(model: PoolModel, cell: Cell) -> float:
    node = model.nodes[cell.nodes]
    return max(node.price / node.gpus, 1e-3) * cell.gpus * (1 + cell.preference)


def _transition_cost(model: PoolModel) -> Any:
    """Return the cost of all starts and role switches in dollars."""
    current = model.pool.current
    if current is None:
        return 0.0
    starts = lpSum(current.start_cost.get(name, 0.0) * a for name, a in model.a.items())
    return starts + current.switch_cost * lpSum(counted_switches(model, current))


def add_transition_rows(model: PoolModel, current: CurrentState) -> None:
    _add_balance(model, current)
    _add_dwell(model, current)
    _add_change_budget(model, current)


def _add_transition_variables(model: PoolModel, current: CurrentState) -> None:
    for i, cell in enumerate(model.pool.cells):
        now = current.replicas.get(cell.name, 0)
        model.a[cell.name] = model.add_integer(f"a_{i}", model.max_replicas(cell))
        model.d[cell.name] = model.add_integer(f"d_{i}", now)
        for other in (o for o in cell.switches_with if now and o in model.cells):
            model.m[cell.name, other] = model.add_integer(f"m_{i}_{len(model.m)}", now)


def _add_balance(model: PoolModel, current: CurrentState) -> None:
    for name, x in model.x.items():
        came = lpSum(m for (_, to), m in model.m.items() if to == name)
        went = lpSum(m for (source, _), m in model.m.items() if source == name)
        now = current.replicas.get(name, 0)
        model.add(f"balance[{name}]", x == now + model.a[name] - model.d[name] + came - went)


def _add_dwell(model: PoolModel, current: CurrentState) -> None:
    """Prevent replicas within the minimum dwell time from being stopped or switched."""
    for name, young_replicas in current.below_min_dwell.items():
        went = lpSum(
            m
            for (source, to), m in model.m.items()
            if source == name and (source, to) not in current.free_switches
        )
        old = current.replicas.get(name, 0) - young_replicas
        model.add(f"dwell[{name}]", model.d[name] + went <= old)


def _add_change_budget(model: PoolModel, current: CurrentState) -> None:
    if current.max_changes is not None:
        changes = lpSum(model.a.values()) + lpSum(counted_switches(model, current))
        model.add("change_budget", changes <= current.max_changes)


def counted_switches(model: PoolModel, current: CurrentState) -> list[Any]:
    """Return the variables of the role switches that require a change of the process."""
    return [m for pair, m in model.m.items() if pair not in current.free_switches]
