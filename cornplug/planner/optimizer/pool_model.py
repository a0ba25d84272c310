"""Sets, variables and named rows of the pool model.

`milp.py` explains the variables and rows. A plan's reasons and the explanation of a shortfall refer to rows
by their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil
from typing import Any

import pulp

from cornplug.planner.optimizer.optimization_problem import (
    Cell,
    OptimizationProblem,
    PathVariant,
    ServiceDemand,
)


class PoolModel:
    """Sets, variables and rows of the model of one pool."""

    def __init__(self, pool: OptimizationProblem) -> None:
        self.pool = pool
        self.problem: Any = pulp.LpProblem("plan", pulp.LpMinimize)
        self.rows: dict[str, Any] = {}
        self._sets()
        self._variables()

    def _sets(self) -> None:
        pool = self.pool
        self.cells = {c.name: c for c in pool.cells}
        self.nodes = {n.name: n for n in pool.nodes}
        self.demands = {u.name: u for u in pool.demands}
        self.cells_of: dict[str, list[Cell]] = {}
        for cell in pool.cells:
            self.cells_of.setdefault(cell.service, []).append(cell)
        self.variants = [v for v in pool.variants if all(any(self.eligible_cells(v, n)) for n in v.needs)]
        self.needs: dict[tuple[str, str], list[tuple[PathVariant, ServiceDemand]]] = {}
        """(demand, service) -> pairs of a variant and its work at the service."""
        for variant in self.variants:
            for need in variant.needs:
                self.needs.setdefault((variant.demand, need.service), []).append((variant, need))

    def eligible_cells(self, variant: PathVariant, need: ServiceDemand) -> Iterator[Cell]:
        """Yield the cells that may do this work."""
        for cell in self.cells_of.get(need.service, ()):
            if variant.demand in cell.capacity and cell.tier <= need.tier:
                yield cell

    def _variables(self) -> None:
        pool = self.pool
        self.phi = {v.name: self.add_real(f"phi_{i}") for i, v in enumerate(self.variants)}
        self.f = {
            (u, cell.name): self.add_real(f"f_{i}_{k}")
            for i, ((u, service), needs) in enumerate(self.needs.items())
            for k, cell in enumerate(self.cells_of[service])
            if u in cell.capacity and cell.tier <= max(need.tier for _, need in needs)
        }
        self.x = {c.name: self.add_integer(f"x_{i}", self.max_replicas(c)) for i, c in enumerate(pool.cells)}
        self.z = {n.name: self.add_integer(f"z_{i}") for i, n in enumerate(pool.nodes)}
        self.w = {level.name: self.add_integer(f"w_{i}", 1) for i, level in enumerate(pool.levels)}
        self.e = {
            c.name: self.add_integer(f"e_{i}", 1)
            for i, c in enumerate(pool.cells)
            if c.service in pool.limits.spare and self.online_demands_of(c)
        }
        self.spread = {
            c.name: [
                (k, self.add_integer(f"b_{i}_{k}", 1), self.add_real(f"s_{i}_{k}"))
                for k in _spread_candidates(self.replicas_per_node(c))
            ]
            for i, c in enumerate(pool.cells)
            if pool.limits.by_node and c.name in self.e and self.replicas_per_node(c) > 1
        }
        """Candidates for the maximum number k of a cell's replicas on a node, by cell. Each candidate is (k,
        variable that is 1 if k is chosen, variable for the number of nodes with replicas in this case)."""
        self.min_served = self.add_real("min_served", 1.0)
        self.y: dict[tuple[str, int, str], Any] = {}
        self.a: dict[str, Any] = {}
        self.d: dict[str, Any] = {}
        self.m: dict[tuple[str, str], Any] = {}

    def add_real(self, name: str, upper_bound: float | None = None) -> Any:
        return self.problem.add_variable(name, 0, upper_bound)

    def add_integer(self, name: str, upper_bound: int | None = None) -> Any:
        return self.problem.add_variable(name, 0, upper_bound, pulp.LpInteger)

    def add(self, name: str, constraint: Any) -> None:
        if name in self.rows:
            raise ValueError(f"two constraints are called {name}")
        self.rows[name] = constraint
        # PuLP replaces characters such as "/" and "-". The number keeps the resulting names distinct.
        self.problem.addConstraint(constraint, f"{len(self.rows)}:{name}")

    def demands_of(self, cell: Cell) -> list[str]:
        """Return the demands that the cell may serve."""
        return [u for u in cell.capacity if (u, cell.name) in self.f]

    def online_demands_of(self, cell: Cell) -> list[str]:
        return [u for u in self.demands_of(cell) if self.demands[u].online]

    def load(self, cell: Cell, demands: Iterable[str]) -> Any:
        """Return the number of the cell's replicas that the demands' work would use completely."""
        return pulp.lpSum(self.f[u, cell.name] * (1 / cell.capacity[u]) for u in demands)

    def replicas_per_node(self, cell: Cell) -> int:
        """Return the number of the cell's replicas that fit on one node."""
        return max(int(self.nodes[cell.nodes].gpus / cell.gpus + 1e-9), 1)

    def max_lost_replicas(self, cell: Cell) -> Any:
        """Return the maximum number of the cell's replicas that are lost together: one replica, or all
        replicas on a node."""
        if cell.name not in self.spread:
            return 1 * self.e[cell.name]
        return pulp.lpSum(k * b for k, b, _ in self.spread[cell.name])

    def max_replicas(self, cell: Cell) -> int:
        """Return an upper bound on the number of this cell's replicas that a plan can use.

        A tight bound makes the relaxation tight, because it is the coefficient of the only rows with binary
        switches (`spare`).
        """
        node = self.nodes[cell.nodes]
        fitting = int(node.stock * node.gpus / cell.gpus + 1e-9)
        current = self.pool.current.replicas.get(cell.name, 0) if self.pool.current else 0
        return min(fitting, max(self._max_useful_replicas(cell), current))

    def _max_useful_replicas(self, cell: Cell) -> int:
        work = {u: self._work(u, cell) for u in cell.capacity if (u, cell.service) in self.needs}
        limits = self.pool.limits
        online = {u: amount for u, amount in work.items() if self.demands[u].online}
        grown = sum(
            amount * (1 + self.demands[u].growth_per_s * cell.start_s) for u, amount in online.items()
        )
        whole = max(
            max(sum(work.values()), grown) / limits.max_utilisation,
            sum(online.values()) / limits.online_share,
        )
        if not limits.spare:
            return ceil(whole - 1e-9)
        # Add spare replicas, enough to replace the largest replica of the service, or a node full of
        # replicas.
        largest = max(
            (other.capacity[u] / cell.capacity[u]) * (self.replicas_per_node(other) if limits.by_node else 1)
            for other in self.cells_of[cell.service]
            for u in cell.capacity
            if u in other.capacity
        )
        return ceil(whole - 1e-9) + ceil(largest - 1e-9)

    def _work(self, demand: str, cell: Cell) -> float:
        """Return the number of replicas that a demand would use on the variant with the most work."""
        work_of: dict[str, float] = {}
        for variant, need in self.needs[demand, cell.service]:
            if cell.tier <= need.tier:
                work_of[variant.name] = work_of.get(variant.name, 0.0) + need.work
        return self.demands[demand].rate * max(work_of.values(), default=0.0) / cell.capacity[demand]


def _spread_candidates(replicas_per_node: int) -> list[int]:
    """Return the candidates for the maximum number of replicas per node, in coarse steps beyond 8."""
    return [k for k in range(1, replicas_per_node + 1) if k <= 8 or k == replicas_per_node or k in (16, 32)]
