"""Costs of changing the running replicas when re-planning, and the limit on the number of changes.

x = x0 + a - d + in - out, with starts a, stops d, and role switches (in, out) between cells whose engines can
change their role without a restart. Switches are preferred to restarts because they cost less.
"""

from __future__ import annotations

from typing import Any

from pulp import lpSum

from cornplug.planner.optimizer.optimization_problem import CurrentState
from cornplug.planner.optimizer.variables import PoolModel


def cost(model: PoolModel) -> Any:
    """Return the cost of all starts and role switches in dollars."""
    current = model.pool.current
    if current is None:
        return 0.0
    starts = lpSum(current.start_cost.get(name, 0.0) * a for name, a in model.a.items())
    return starts + current.switch_cost * lpSum(counted_switches(model, current))


def constrain(model: PoolModel, current: CurrentState) -> None:
    balance(model, current)
    dwell(model, current)
    change_budget(model, current)


def variables(model: PoolModel, current: CurrentState) -> None:
    for i, cell in enumerate(model.pool.cells):
        now = current.replicas.get(cell.name, 0)
        model.a[cell.name] = model.count(f"a_{i}", model.most(cell))
        model.d[cell.name] = model.count(f"d_{i}", now)
        for other in (o for o in cell.switches_with if now and o in model.cells):
            model.m[cell.name, other] = model.count(f"m_{i}_{len(model.m)}", now)


def balance(model: PoolModel, current: CurrentState) -> None:
    for name, x in model.x.items():
        came = lpSum(m for (_, to), m in model.m.items() if to == name)
        went = lpSum(m for (source, _), m in model.m.items() if source == name)
        now = current.replicas.get(name, 0)
        model.add(f"balance[{name}]", x == now + model.a[name] - model.d[name] + came - went)


def dwell(model: PoolModel, current: CurrentState) -> None:
    """Prevent replicas within the minimum dwell time from being stopped or switched."""
    for name, young_replicas in current.below_min_dwell.items():
        went = lpSum(
            m for (source, to), m in model.m.items() if source == name and (source, to) not in current.free
        )
        old = current.replicas.get(name, 0) - young_replicas
        model.add(f"dwell[{name}]", model.d[name] + went <= old)


def change_budget(model: PoolModel, current: CurrentState) -> None:
    if current.max_changes is not None:
        changes = lpSum(model.a.values()) + lpSum(counted_switches(model, current))
        model.add("change_budget", changes <= current.max_changes)


def counted_switches(model: PoolModel, current: CurrentState) -> list[Any]:
    """Return the variables of the role switches that require a change of the process."""
    return [m for pair, m in model.m.items() if pair not in current.free]
