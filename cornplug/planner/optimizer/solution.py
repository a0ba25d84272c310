"""Converts the values of a model's variables to a PoolSolution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pulp import LpConstraintEQ, LpConstraintLE

from cornplug.planner.optimizer.optimization_problem import CellFlow, PathVariant, PoolSolution, SolveProgress
from cornplug.planner.optimizer.solvers import SolverRun
from cornplug.planner.optimizer.variables import PoolModel

Key = TypeVar("Key")
Values = Mapping[Any, float]
"""Variable -> value."""

NOTHING = 1e-7
"""Rate below which a rate is not real but a consequence of the solver's tolerance."""


def read(model: PoolModel, values: Values, run: SolverRun, sign: int, seconds: float) -> PoolSolution:
    """Convert a model's values to a solution.

    Args:
        run: solver run of the first goal.
        sign: 1 if the first goal is minimised, -1 if it is maximised.
        seconds: duration of the complete search.
    """
    replicas = _whole(model.x, values)
    served = {
        v.name: values[model.phi[v.name]]
        for v in model.variants
        if values[model.phi[v.name]] > NOTHING and _has_replicas(model, v, replicas)
    }
    return PoolSolution(
        status="optimal" if run.status == "optimal" else "feasible",
        seconds=seconds,
        objective=sign * run.objective,
        bound=sign * run.bound,
        replicas=replicas,
        nodes=_whole(model.z, values),
        served=served,
        flows=tuple(flows(model, values, served)),
        levels=frozenset(name for name, w in model.w.items() if values[w] > 0.5),
        slack={name: slack(row, values) for name, row in model.rows.items() if row.keys()},
        first_s=run.first_s,
        history=tuple(signed(at, sign) for at in run.history),
        started=_whole(model.a, values),
        switched=_whole(model.m, values),
        work=run.work,
        timed_out=run.timed_out,
    )


def _whole(variables: Mapping[Key, Any], values: Values) -> dict[Key, int]:
    counts = {key: round(values[variable]) for key, variable in variables.items()}
    return {key: count for key, count in counts.items() if count}


def _has_replicas(model: PoolModel, variant: PathVariant, replicas: Mapping[str, int]) -> bool:
    """Return whether every service of the variant has a replica.

    A variant without replicas can have a small rate because of the solver's tolerance.
    """
    return all(any(c.name in replicas for c in model.fit(variant, need)) for need in variant.needs)


def slack(row: Any, values: Values) -> float:
    """Return the slack of a constraint, or 0 for an equation."""
    if row.sense == LpConstraintEQ:
        return 0.0
    value = row_value(row, values)
    return -value if row.sense == LpConstraintLE else value


def row_value(row: Any, values: Values) -> float:
    """Return the value of a constraint's left side.

    PuLP stores a row as expression + constant <= 0 (or >= 0, or = 0).
    """
    return float(row.constant + sum(weight * values[v] for v, weight in row.items()))


def signed(at: SolveProgress, sign: int) -> SolveProgress:
    if sign > 0:
        return at
    return replace(
        at,
        incumbent=None if at.incumbent is None else -at.incumbent,
        bound=None if at.bound is None else -at.bound,
    )


def flows(model: PoolModel, values: Values, served: Mapping[str, float]) -> Iterator[CellFlow]:
    """Yield the work of each demand at each service, by required tier and cell.

    Work with the tightest tier is assigned to the cells with the tightest tiers. Cells without a replica get
    no work.
    """
    for (u, service), needs in model.needs.items():
        cells = [
            c for c in model.cells_of[service] if (u, c.name) in model.f and values[model.x[c.name]] > 0.5
        ]
        cells.sort(key=lambda cell: cell.tier)
        left = {cell.name: values[model.f[u, cell.name]] for cell in cells}
        for tier in sorted({need.tier for _, need in needs}):
            asked = sum(need.work * served.get(v.name, 0.0) for v, need in needs if need.tier == tier)
            for cell in cells:
                rate = min(left[cell.name], asked)
                if rate > NOTHING and cell.tier <= tier:
                    yield CellFlow(u, service, cell.name, rate, tier)
                    left[cell.name] -= rate
                    asked -= rate
