"""Goals of the pool model, and conversion of the values of a model's variables to a PoolSolution.

The objective "cost" has only the cost. The other objectives optimise goodput, or the least served share and
goodput, before the cost.

When re-planning, x = x0 + a - d + in - out, with starts a, stops d, and role switches (in, out) between cells
whose engines can change their role without a restart. Switches are preferred to restarts because they cost
less. The number of changes may be limited.

A solver's integers are exact only to a tolerance (1e-6 in HiGHS), so 4e-6 of a replica may do some work.
Polishing fixes every integer at its rounded value, and solves for the rates again.

If a solver is stopped early, a plan may have replicas and nodes that it does not need. Trimming removes a
replica if every row of the model still holds without it. Rates do not change, and the rows for capacity and
spare replicas ensure that needed replicas are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final, TypeVar

from pulp import LpConstraintEQ, LpConstraintLE, LpInteger, lpSum

from cornplug.planner.optimizer.optimization_problem import (
    Cell,
    CellFlow,
    CurrentState,
    PathVariant,
    PoolSolution,
    SolveProgress,
)
from cornplug.planner.optimizer.pool_model import PoolModel
from cornplug.planner.optimizer.solvers import SolverLimits, SolverRun, solve

Key = TypeVar("Key")
Values = Mapping[Any, float]
"""Variable -> value."""

ZERO_RATE = 1e-7
"""Requests per second below which a rate counts as 0, because of the solver's tolerance."""
INTEGER_TOLERANCE: Final = 1e-9
GOAL_TOLERANCE: Final = 1e-7
"""Relative loss that is allowed for an earlier goal, because of the solver's tolerances."""
_TRIM_TOLERANCE: Final = 1e-6
"""Maximum violation of a row, as in HiGHS."""


def read_solution(
    model: PoolModel, values: Values, run: SolverRun, sign: int, seconds: float
) -> PoolSolution:
    """Convert a model's values to a solution.

    Args:
        run: Solver run of the first goal.
        sign: 1 if the first goal is minimised, -1 if it is maximised.
        seconds: Duration of the complete search.
    """
    replicas = _rounded_counts(model.x, values)
    served = {
        v.name: values[model.phi[v.name]]
        for v in model.variants
        if values[model.phi[v.name]] > ZERO_RATE and _has_replicas(model, v, replicas)
    }
    return PoolSolution(
        status="optimal" if run.status == "optimal" else "feasible",
        seconds=seconds,
        objective=sign * run.objective,
        bound=sign * run.bound,
        replicas=replicas,
        nodes=_rounded_counts(model.z, values),
        served=served,
        flows=tuple(flows(model, values, served)),
        levels=frozenset(name for name, w in model.w.items() if values[w] > 0.5),
        slack={name: slack(row, values) for name, row in model.rows.items() if row.keys()},
        first_s=run.first_s,
        history=tuple(with_sign(at, sign) for at in run.history),
        started=_rounded_counts(model.a, values),
        switched=_rounded_counts(model.m, values),
        work=run.work,
        timed_out=run.timed_out,
    )


def _rounded_counts(variables: Mapping[Key, Any], values: Values) -> dict[Key, int]:
    counts = {key: round(values[variable]) for key, variable in variables.items()}
    return {key: count for key, count in counts.items() if count}


def _has_replicas(model: PoolModel, variant: PathVariant, replicas: Mapping[str, int]) -> bool:
    """Return whether every service of the variant has a replica.

    A variant without replicas can have a small rate because of the solver's tolerance.
    """
    return all(any(c.name in replicas for c in model.eligible_cells(variant, need)) for need in variant.needs)


def slack(row: Any, values: Values) -> float:
    """Return the slack of a constraint, or 0 for an equation."""
    if row.sense == LpConstraintEQ:
        return 0.0
    value = _row_value(row, values)
    return -value if row.sense == LpConstraintLE else value


def _row_value(row: Any, values: Values) -> float:
    """Return the value of a constraint's left side.

    PuLP stores a row as expression + constant <= 0 (or >= 0, or = 0).
    """
    return float(row.constant + sum(weight * values[v] for v, weight in row.items()))


def with_sign(at: SolveProgress, sign: int) -> SolveProgress:
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
                if rate > ZERO_RATE and cell.tier <= tier:
                    yield CellFlow(u, service, cell.name, rate, tier)
                    left[cell.name] -= rate
                    asked -= rate


def has_integer_values(model: PoolModel, values: Values) -> bool:
    return all(abs(values[v] - round(values[v])) <= INTEGER_TOLERANCE for v in _integers(model))


def polish(
    model: PoolModel, fresh_model: PoolModel, goals: Sequence[tuple[Any, int]], values: Values
) -> dict[Any, float]:
    """Return the values of `model` with rounded integers and the best rates for these integers.

    If no rates are feasible with the rounded integers, the rates are not changed.

    Args:
        fresh_model: The same model without an objective. It is modified.
        goals: Goals of `fresh_model`, as (expression, sign). The sign is 1 (minimised) or -1 (maximised).
    """
    rounded = {v.name: round(values[v]) for v in _integers(model)}
    for v in _integers(fresh_model):
        v.lowBound = v.upBound = rounded[v.name]
    found: dict[str, float] = {}
    for expression, sign in goals:
        fresh_model.problem.setObjective(sign * expression)
        if solve(fresh_model.problem, SolverLimits(0.0, inf)).status not in ("optimal", "feasible"):
            break
        found = {v.name: v.varValue or 0.0 for v in fresh_model.problem.variables()}
        reached = sum(weight * found[v.name] for v, weight in expression.items())
        fresh_model.problem.addConstraint(
            sign * expression <= sign * reached + GOAL_TOLERANCE * max(1.0, abs(reached))
        )
    return {v: rounded.get(v.name, found.get(v.name, value)) for v, value in values.items()}


def _integers(model: PoolModel) -> list[Any]:
    return [v for v in model.problem.variables() if v.cat == LpInteger]


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

    When re-planning, this means that one replica less is started, or one more replica is stopped.
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
    if bounds and _rows_hold(values, (row for v in changed for row in rows_of.get(v, ()))):
        return True
    values |= before
    return False


def _rows_hold(values: Values, rows: Iterable[Any]) -> bool:
    for row in rows:
        value = _row_value(row, values)
        allowed = _TRIM_TOLERANCE * max(1.0, abs(row.constant))
        if row.sense == LpConstraintEQ:
            broken = abs(value)
        else:
            broken = value if row.sense == LpConstraintLE else -value
        if broken > allowed:
            return False
    return True


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
