"""The best plan of a tiny pool by trying all of them: nothing here knows `milp.py`.

Nodes are single machines into which replicas are really packed, flows are kept per variant and
need, and a lost replica is really taken away: what the pool model sums up is spelled out here.
A linear program (scipy) is left for the rates only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from scipy.optimize import linprog

from cornplug.planner.optimizer.optimization_problem import (
    Cell,
    CurrentState,
    OptimizationProblem,
    PathVariant,
)

TOLERANCE = 1e-9
NOTHING = 1e-5
Counts = tuple[int, ...]
Candidate = tuple[float, Counts, Counts]
"""Dollars, replicas of each cell, nodes of each class."""


def best(pool: OptimizationProblem) -> tuple[float, ...] | None:
    """Values of the objectives in their order; None: no plan."""
    every = sorted(candidates(pool))
    if pool.objective == "cost":
        dollars = cheapest(pool, every, {})
        return None if dollars is None else (dollars,)
    reached: dict[str, float] = {}
    stock = tuple(n.stock for n in pool.nodes)  # all nodes: more of them never serve less
    for goal in ("goodput",) if pool.objective == "goodput" else ("least", "goodput"):
        values = [rates(pool, x, z, goal, reached) for _, x, z in every if z == stock]
        found = [value for value in values if value is not None]
        if not found:
            return None
        reached[goal] = max(found) if max(found) > NOTHING else 0.0
    dollars = cheapest(pool, every, reached)
    assert dollars is not None
    return (*reached.values(), dollars)


def cheapest(
    pool: OptimizationProblem, every: list[tuple[float, Counts, Counts]], reached: dict[str, float]
) -> float | None:
    failed: list[tuple[Counts, Counts]] = []
    monotone = not pool.limits.spare
    for dollars, x, z in every:
        if monotone and any(_below(x, fx) and _below(z, fz) for fx, fz in failed):
            continue
        if rates(pool, x, z, "any", reached) is not None:
            return dollars
        failed.append((x, z))
    return None


def _below(a: Counts, b: Counts) -> bool:
    return all(i <= j for i, j in zip(a, b, strict=True))


# Replicas on machines -----------------------------------------------------------------------


def candidates(pool: OptimizationProblem) -> Iterator[Candidate]:
    per_class = [list(_fillings(pool, n)) for n in range(len(pool.nodes))]
    for combination in itertools.product(*per_class):
        x = tuple(sum(part) for part in zip(*(x for x, _ in combination), strict=True))
        z = tuple(count for _, count in combination)
        dollars = sum(n.price * count for n, count in zip(pool.nodes, z, strict=True))
        if pool.current is None:
            yield dollars, x, z
        elif (switching := change(pool.cells, pool.current, x)) is not None:
            yield pool.current.horizon_hours * dollars + switching, x, z


def _fillings(pool: OptimizationProblem, n: int) -> Iterator[tuple[Counts, int]]:
    """Replicas that fit on `count` nodes of one class, and that count."""
    node = pool.nodes[n]
    mine = [i for i, cell in enumerate(pool.cells) if cell.nodes == node.name]
    for count in range(node.stock + 1):
        most = [int(count * node.gpus / pool.cells[i].gpus) for i in mine]
        fitting = [
            x
            for x in itertools.product(*(range(m + 1) for m in most))
            if _packs(_footprints(pool, mine, x), (float(node.gpus),) * count, float(node.gpus))
        ]
        full = set(fitting)
        for x in fitting:
            # One more replica never harms, except where it must be paid for or be spared
            grown = (tuple(v + (j == i) for j, v in enumerate(x)) for i in range(len(x)))
            if pool.current is None and not pool.limits.spare and any(g in full for g in grown):
                continue
            whole = [0] * len(pool.cells)
            for i, value in zip(mine, x, strict=True):
                whole[i] = value
            yield tuple(whole), count


def _footprints(pool: OptimizationProblem, mine: list[int], x: Counts) -> tuple[float, ...]:
    sizes = [pool.cells[i].gpus for i, count in zip(mine, x, strict=True) for _ in range(count)]
    return tuple(sorted(sizes, reverse=True))


@lru_cache(maxsize=100_000)
def _packs(sizes: tuple[float, ...], free: tuple[float, ...], whole: float) -> bool:
    """By trying every machine for each replica, largest first."""
    if not sizes:
        return True
    size, rest = sizes[0], sizes[1:]
    if size > whole:
        need, empty = round(size / whole), [f for f in free if f == whole]
        left = list(free)
        for _ in range(min(need, len(empty))):
            left.remove(whole)
        return len(empty) >= need and _packs(rest, tuple(left), whole)
    for room in sorted(set(free)):
        if room >= size:
            left = list(free)
            left.remove(room)
            if _packs(rest, tuple(sorted([*left, room - size])), whole):
                return True
    return False


def change(cells: tuple[Cell, ...], running: CurrentState, x: Counts) -> float | None:
    """Fewest dollars from what runs to x; None: more changes than allowed, or a young one went."""
    now = [running.replicas.get(c.name, 0) for c in cells]
    below_min_dwell = [running.below_min_dwell.get(c.name, 0) for c in cells]
    names = {c.name: i for i, c in enumerate(cells)}
    pairs = [(i, names[other]) for i, c in enumerate(cells) for other in c.switches_with]
    dollars = []
    for moved in itertools.product(*(range(now[i] + 1) for i, _ in pairs)):
        went, came = [0] * len(cells), [0] * len(cells)
        for (i, j), count in zip(pairs, moved, strict=True):
            went[i] += count
            came[j] += count
        starts = [max(x[i] - now[i] + went[i] - came[i], 0) for i in range(len(cells))]
        stops = [max(now[i] - went[i] + came[i] - x[i], 0) for i in range(len(cells))]
        if any(went[i] + stops[i] > now[i] - below_min_dwell[i] for i in range(len(cells))):
            continue
        if running.max_changes is not None and sum(starts) + sum(moved) > running.max_changes:
            continue
        price = sum(running.start_cost.get(c.name, 0.0) * s for c, s in zip(cells, starts, strict=True))
        dollars.append(price + running.switch_cost * sum(moved))
    return min(dollars, default=None)


# Rates --------------------------------------------------------------------------------------


def rates(
    pool: OptimizationProblem, x: Counts, z: Counts, goal: str, reached: dict[str, float]
) -> float | None:
    """The goal's largest value with these replicas, over all choices of cache levels."""
    found = []
    for levels in _levels(pool, z):
        usable = [v for v in pool.variants if v.levels <= levels]
        value = _Rates(pool, usable, x, z).best(goal, reached)
        if value is not None:
            found.append(value)
    return max(found, default=None)


def _levels(pool: OptimizationProblem, z: Counts) -> Iterator[frozenset[str]]:
    caches: dict[str, list[tuple[str, float]]] = {}
    for level in pool.levels:
        caches.setdefault(level.cache, []).append((level.name, level.bytes))
    room = sum(n.dram * count for n, count in zip(pool.nodes, z, strict=True) if count)
    for chosen in itertools.product(*caches.values()):
        if sum(size for _, size in chosen) <= room + 1e-9:
            yield frozenset(name for name, _ in chosen)


class _Rates:
    """max c·r  subject to  A r <= b,  E r = 0: r are rates of variants, and of each on each cell."""

    def __init__(self, pool: OptimizationProblem, variants: list[PathVariant], x: Counts, z: Counts) -> None:
        self.pool, self.variants, self.x, self.z = pool, variants, x, z
        self.column: dict[object, int] = {}
        self.slice: dict[object, float] = {}
        """Of rates that come in whole slices: one slice."""
        self.less: list[tuple[dict[object, float], float]] = []
        self.equal: list[tuple[dict[object, float], float]] = []
        self._served()
        self._worked("all", x, variants, pool.limits.online_share)
        online = {u.name for u in pool.demands if u.online}
        for k, cell in enumerate(pool.cells):
            if cell.service in pool.limits.spare and x[k]:
                fewer = tuple(count - (i == k) for i, count in enumerate(x))
                urgent = [v for v in variants if v.demand in online]
                self._worked(f"without {cell.name}", fewer, urgent, None, service=cell.service)
        self._network()

    def _served(self) -> None:
        for u in self.pool.demands:
            mine = {("phi", v.name): 1.0 for v in self.variants if v.demand == u.name}
            (self.equal if self.pool.objective == "cost" else self.less).append((mine, u.rate))
            self.less.append(({**dict.fromkeys(mine, -1.0), "least": u.rate}, 0.0))
            if u.slices is not None:
                self.slice |= dict.fromkeys(mine, u.rate / u.slices)
        self.less.append(({"least": 1.0}, 1.0))

    def _worked(
        self, case: str, x: Counts, variants: list[PathVariant], share: float | None, service: str = ""
    ) -> None:
        loads: list[dict[object, float]] = [{} for _ in x]
        urgent: list[dict[object, float]] = [{} for _ in x]
        online = {u.name for u in self.pool.demands if u.online}
        for v in variants:
            for i, need in enumerate(v.needs):
                if service and need.service != service:
                    continue
                row: dict[object, float] = {("phi", v.name): -need.work}
                for k, cell in enumerate(self.pool.cells):
                    able = cell.service == need.service and cell.tier <= need.tier
                    if able and v.demand in cell.capacity:
                        key = (case, v.name, i, k)
                        row[key] = 1.0
                        if ("phi", v.name) in self.slice:
                            self.slice[key] = self.slice["phi", v.name] * need.work
                        loads[k][key] = 1 / cell.capacity[v.demand]
                        if v.demand in online:
                            urgent[k][key] = 1 / cell.capacity[v.demand]
                self.equal.append((row, 0.0))
        for k, count in enumerate(x):
            self.less.append((loads[k], self.pool.limits.max_utilisation * count))
            if share is not None:
                self.less.append((urgent[k], share * count))

    def _network(self) -> None:
        traffic = {("phi", v.name): v.network for v in self.variants}
        used = [n.nic * count for n, count in zip(self.pool.nodes, self.z, strict=True) if count]
        if sum(used) < float("inf"):
            self.less.append((dict(traffic), self.pool.limits.network_utilisation * sum(used)))

    def best(self, goal: str, reached: dict[str, float]) -> float | None:
        weights = {u.name: u.weight for u in self.pool.demands}
        goodput: dict[object, float] = {("phi", v.name): weights[v.demand] for v in self.variants}
        expressions: dict[str, dict[object, float]] = {"goodput": goodput, "least": {"least": 1.0}, "any": {}}
        for name, value in reached.items():
            self.less.append(({key: -w for key, w in expressions[name].items()}, -value * (1 - 1e-6) + 1e-9))
        for row, _ in [*self.less, *self.equal]:
            for key in row:
                self.column.setdefault(key, len(self.column))
        cost = np.zeros(len(self.column))
        for key, weight in expressions[goal].items():
            cost[self.column[key]] = -weight * self.slice.get(key, 1.0)
        a, b = self._matrix(self.less)
        e, r = self._matrix(self.equal)
        whole = [int(key in self.slice) for key in self.column]
        answer = linprog(cost, A_ub=a, b_ub=b + TOLERANCE, A_eq=e, b_eq=r, integrality=whole, method="highs")
        return -float(answer.fun) if answer.status == 0 else None

    def _matrix(self, rows: list[tuple[dict[object, float], float]]) -> tuple[np.ndarray, np.ndarray]:
        matrix, right = np.zeros((len(rows), len(self.column))), np.zeros(len(rows))
        for i, (row, value) in enumerate(rows):
            right[i] = value
            for key, weight in row.items():
                matrix[i, self.column[key]] = weight * self.slice.get(key, 1.0)
        return matrix, right
