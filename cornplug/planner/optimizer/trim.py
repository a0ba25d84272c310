"""Removes replicas and nodes that a plan does not need. A plan may have them if its solver was stopped early.

Rates do not change. A replica is removed if every row of the model still holds without the replica. Rows for
capacity and spare replicas ensure that needed replicas are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pulp import LpConstraintEQ, LpConstraintLE

from cornplug.planner.optimizer.solution import Values, row_value
from cornplug.planner.optimizer.variables import PoolModel

TOLERANCE: Final = 1e-6
"""Maximum violation of a row, as in HiGHS."""


def trim(model: PoolModel, values: Values) -> dict[Any, float]:
    """Return the values without unneeded replicas, the most expensive first, and then without unneeded
    nodes."""
    left = dict(values)
    for name, choices in model.spread.items():
        for k, b, s in choices:  # A solver may count more nodes than the replicas need.
            left[s] = left[model.x[name]] / k if left[b] > 0.5 else 0.0
    rows_of: dict[Any, list[Any]] = {}
    for row in model.rows.values():
        for variable in row.keys():  # noqa: SIM118  (a PuLP expression is no mapping to iterate)
            rows_of.setdefault(variable, []).append(row)
    price = {name: node.price / node.gpus for name, node in model.nodes.items()}
    for cell in sorted(model.pool.cells, key=lambda c: -price[c.nodes] * c.gpus):
        while left[model.x[cell.name]] > 0.5 and _apply(
            rows_of, left, _without_replica(model, left, cell.name)
        ):
            pass
    for z in model.z.values():
        while left[z] > 0.5 and _apply(rows_of, left, {z: left[z] - 1}):
            pass
    return left


def _without_replica(model: PoolModel, values: Values, name: str) -> dict[Any, float]:
    """Return the values that change if a cell has one replica less.

    When re-planning, one replica is not started or one more replica is stopped.
    """
    x = model.x[name]
    changed = {x: values[x] - 1}
    if name in model.e and values[x] < 1.5:
        changed[model.e[name]] = 0.0
        changed |= {v: 0.0 for _, b, s in model.spread.get(name, ()) for v in (b, s)}
    if name in model.a:
        starts, stops = model.a[name], model.d[name]
        changed |= {starts: values[starts] - 1} if values[starts] > 0.5 else {stops: values[stops] + 1}
    return changed


def _apply(rows_of: dict[Any, list[Any]], values: dict[Any, float], changed: dict[Any, float]) -> bool:
    """Apply the changes if all affected rows still hold, and return whether they do."""
    before = {variable: values[variable] for variable in changed}
    values |= changed
    bounds = all(v.upBound is None or value <= v.upBound for v, value in changed.items())
    if bounds and _hold(values, (row for v in changed for row in rows_of.get(v, ()))):
        return True
    values |= before
    return False


def _hold(values: Values, rows: Iterable[Any]) -> bool:
    for row in rows:
        value = row_value(row, values)
        allowed = TOLERANCE * max(1.0, abs(row.constant))
        if row.sense == LpConstraintEQ:
            broken = abs(value)
        else:
            broken = value if row.sense == LpConstraintLE else -value
        if broken > allowed:
            return False
    return True
