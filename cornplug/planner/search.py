"""The least cost of pools that the solver does not settle at once.

The cost is the nodes' alone: a plan that frees three GPUs of a node costs what it cost before,
and a solver finds no direction in that. So plans are first improved by a potential, the cost
plus a little of each GPU's price, over a few groups of services at a time; and each group is
bounded alone (`groups.py`), because what the whole relaxation gains by splitting replicas is
most of its distance from the truth. The last word is the solver's, on the cost itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from pulp import LpContinuous, lpSum

from cornplug.planner.groups import alone, groups
from cornplug.planner.incumbent import Incumbent, Tell
from cornplug.planner.inputs import Solver
from cornplug.planner.model import Model
from cornplug.planner.pool import Pool
from cornplug.planner.solution import Values
from cornplug.planner.solvers import Limits, Run, relax
from cornplug.planner.solvers import solve as run_solver

Build = Callable[[Pool], Model]

QUICK, POTENTIAL, GROUPS, ROOT, CHOSEN, DESCENT, STEP = 0.05, 0.1, 0.2, 0.1, 0.1, 0.5, 0.06
"""Shares of the time limit; the solver's last call gets what they leave."""
GPU_WEIGHT = 0.1
"""Of a GPU's price, in the potential."""
TOGETHER = 3
"""Groups that a step of the descent may change; replicas of the others stay."""


def least_cost(
    model: Model, money: Any, settings: Solver, seconds: float, tell: Tell | None, build: Build
) -> tuple[Run, Values | None]:
    """The cheapest plan found, and what was proven of it."""
    best = Incumbent(model, money, settings, seconds, tell)
    quick = best.improve(money, QUICK)
    if quick.status == "infeasible" or best.proven:
        return best.run("infeasible" if quick.status == "infeasible" else None), best.values
    prices = gpu_prices(model, money)
    potential = money + GPU_WEIGHT * lpSum(prices[name] * x for name, x in model.x.items())
    best.improve(potential, POTENTIAL)
    worthy = bound_groups(best, build)
    best.improve(money, ROOT)
    if best.values is not None and not best.proven:
        worthy |= {name for name, x in model.x.items() if best.values[x] > 0.5}
        with fixed(model, {name: 0 for name in model.x if name not in worthy}):
            best.improve(potential, CHOSEN)
    descend(best, prices)
    if best.proven:
        return best.run(), best.values
    last = best.improve(money, 1.0)
    return best.run("infeasible" if last.status == "infeasible" else None), best.values


def gpu_prices(model: Model, money: Any) -> dict[str, float]:
    """Cell -> what the GPUs of one replica cost, in the money's unit."""
    return {
        c.name: money.get(model.z[c.nodes], 0.0) / model.nodes[c.nodes].gpus * c.gpus
        for c in model.pool.cells
    }


def bound_groups(best: Incumbent, build: Build) -> set[str]:
    """Adds a row for each group: its replicas cost at least this, at the prices that GPUs fetch.

    Returns the cells that the groups' cheapest plans use.

    Where a class of nodes is sold out, its GPUs are worth more than they cost: the relaxation's
    shadow prices say how much. The rows follow from the others: they are no reasons for a plan.
    """
    model, end = best.model, time.monotonic() + best.seconds_for(GROUPS)
    worth = gpu_worth(best)
    used = set[str]()
    parts = sorted(groups(model.pool), key=lambda part: sum(c.service in part for c in model.pool.cells))
    for i, services in enumerate(parts):
        seconds = 2 * (end - time.monotonic()) / (len(parts) - i)
        if seconds <= 0:
            break
        sub = build(alone(model.pool, services))
        for z in sub.z.values():
            z.cat = LpContinuous  # GPUs are paid for one by one
        sub.problem.setObjective(lpSum(worth[n] * sub.nodes[n].gpus * z for n, z in sub.z.items()))
        limits = Limits(best.settings.gap / 5, seconds, best.settings.threads)
        run = run_solver(sub.problem, best.settings.name, limits)
        if run.bound > 0:
            dollars = lpSum(worth[c.nodes] * c.gpus * model.x[c.name] for c in sub.pool.cells)
            # A hair below: rounding must not cut off the very plan that proved it
            model.problem.addConstraint(dollars >= run.bound * (1 - 1e-7), f"group:{i}")
        if run.status in ("optimal", "feasible"):
            used |= {name for name, x in sub.x.items() if (x.varValue or 0.0) > 0.5}
    return used


def gpu_worth(best: Incumbent) -> dict[str, float]:
    """Node class -> what one GPU is worth: its price, or more where the stock binds."""
    model = best.model
    model.problem.setObjective(best.money)
    relax(model.problem, best.settings.name)
    return {
        name: max(
            best.money.get(z, 0.0) / model.nodes[name].gpus,
            -(model.rows[f"packing[{name}]"].pi or 0.0),
        )
        for name, z in model.z.items()
    }


def descend(best: Incumbent, prices: Mapping[str, float]) -> None:
    """Improves the plan by a few groups at a time, chosen at random but alike in every run.

    Each step wants one node empty: its class's GPUs weigh most, and those of other nodes, which
    are paid for, next to nothing.
    """
    model = best.model
    parts = groups(model.pool)
    end, chance = time.monotonic() + best.seconds_for(DESCENT), np.random.default_rng(0)
    while time.monotonic() < end and not best.proven and best.values and len(parts) > TOGETHER:
        emptied = _emptiest(model, best.values, chance)
        weight = {n: GPU_WEIGHT * (3.0 if n == emptied else 0.2) for n in model.nodes}
        wish = best.money + lpSum(weight[model.cells[n].nodes] * prices[n] * x for n, x in model.x.items())
        chosen = chance.choice(len(parts), TOGETHER, replace=False)
        free = frozenset[str]().union(*(parts[i] for i in chosen))
        stay = {n: round(best.values[x]) for n, x in model.x.items() if model.cells[n].service not in free}
        with fixed(model, stay):
            best.improve(wish, STEP, gap=1e-4)


def _emptiest(model: Model, values: Values, chance: np.random.Generator) -> str:
    """A class of nodes in use, the likelier the fewer GPUs of its last node are taken."""
    room = {}
    for name, node in model.nodes.items():
        if count := round(values[model.z[name]]):
            used = sum(c.gpus * values[model.x[c.name]] for c in model.pool.cells if c.nodes == name)
            room[name] = (max(count - used / node.gpus, 0.0) + 0.05) ** 2
    total = sum(room.values())
    return str(chance.choice(list(room), p=[share / total for share in room.values()]))


@contextmanager
def fixed(model: Model, replicas: Mapping[str, int]) -> Iterator[None]:
    """Meanwhile these cells have just so many replicas."""
    before = {name: (model.x[name].lowBound, model.x[name].upBound) for name in replicas}
    for name, count in replicas.items():
        model.x[name].lowBound = model.x[name].upBound = count
    yield
    for name, (low, high) in before.items():
        model.x[name].lowBound, model.x[name].upBound = low, high
