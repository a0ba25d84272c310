"""The optimisation problem in pool form: integer numbers of replicas of cells, and of nodes of classes.

Nodes are counted, not indexed (`docs/decisions.md` explains why this is exact). The problem does not depend
on engines, GPU speeds or solvers. `cells.py` and `request_paths.py` create it, and `milp.py` solves it. Units
are requests per second, dollars per hour and network bytes per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite, log2
from typing import Literal

from cornplug.errors import ConfigError

MIN_GPU_SHARE = 0.125
"""Smallest share of a GPU that a replica may use. GPU counts of replicas are halves of one another or
complete nodes, so that counting nodes is exact."""


@dataclass(frozen=True)
class MachineClass:
    name: str
    gpu: str
    gpus: int
    price: float
    stock: int
    nic: float = float("inf")
    dram: float = float("inf")
    """Size of the host memory for caches in bytes."""
    spot: bool = False
    """Whether the provider may reclaim all machines of the class at the same time."""


@dataclass(frozen=True)
class Cell:
    """Configuration of a service's replicas: their GPUs, and the capacity of one replica."""

    name: str
    service: str
    nodes: str
    """Name of the machine class on which the replicas run."""
    gpus: float
    """Number of GPUs of one replica: 1/4, 1/2, 1, 2, 4, 8, or all GPUs of one or more nodes."""
    tier: float
    """Upper bound in seconds on a percentile of the time that a request spends at the service. inf means no
    bound."""
    capacity: Mapping[str, float]
    """Maximum rate of one replica by demand, if the replica serves only that demand."""
    role: str = ""
    """Tasks of the replicas. Replicas can be switched between cells that differ only in role
    (re-planning)."""
    switches_with: tuple[str, ...] = ()
    """Names of cells to which a running replica of this cell can switch without a restart."""
    start_s: float = 0.0
    """Time in seconds from the decision to add a replica until its first request."""
    preference: float = 0.0
    """Tie-break as a share of the replica's price, at most 0.03. Larger is worse."""


@dataclass(frozen=True)
class ServiceDemand:
    """Work of a variant's requests at one service."""

    service: str
    tier: float
    """Largest tier, in seconds, of cells that may do this work."""
    work: float = 1.0
    """Work at the service per request: the number of items that are not cached, or the share of the prefill
    that is not cached."""


@dataclass(frozen=True)
class PathVariant:
    """Path of one demand's requests through the services."""

    name: str
    demand: str
    structure: str
    needs: tuple[ServiceDemand, ...]
    levels: frozenset[str] = frozenset()
    """Names of the cache levels that the variant requires."""
    network: float = 0.0
    """Number of bytes that are transferred between nodes per request."""


@dataclass(frozen=True)
class RateDemand:
    """Demand of a request class, named "application/request"."""

    name: str
    rate: float
    """Planned rate, including the peak factor."""
    online: bool = True
    weight: float = 1.0
    growth_per_s: float = 0.0
    """Relative growth of the rate per second, until additional replicas have started."""
    slices: int | None = None
    """Number of equal slices of the rate, each of which one cell serves. None allows any division."""


@dataclass(frozen=True)
class CacheLevel:
    """Possible size of a cache. Exactly one level of each cache is chosen."""

    name: str
    cache: str
    bytes: float


@dataclass(frozen=True)
class CrowdedNode:
    """Node whose loss a plan did not survive."""

    nodes: str
    """Name of the node's class."""
    count: int
    """Number of nodes of this class in the plan."""
    replicas: Mapping[str, int]
    """Number of replicas on the node, by cell."""


@dataclass(frozen=True)
class PoolLimits:
    max_utilisation: float = 0.95
    online_share: float = 0.8
    network_utilisation: float = 0.7
    spot_share: float = 0.0
    """Maximum share of an online demand's work at each service that is done on spot machines."""
    spare: frozenset[str] = frozenset()
    """Services that must still serve their online work after the loss of their largest replica."""
    by_node: bool = False
    """Whether the services in `spare` must also survive the loss of any node with all its replicas."""
    crowded: tuple[CrowdedNode, ...] = ()
    """Placements that are excluded if `by_node` is set."""


@dataclass(frozen=True)
class CurrentState:
    """Current deployment, and the costs of changing it (re-planning)."""

    replicas: Mapping[str, int]
    """Number of running replicas by cell."""
    below_min_dwell: Mapping[str, int] = field(default_factory=dict)
    """Number of replicas by cell that are kept, because they are within the minimum dwell time."""
    start_cost: Mapping[str, float] = field(default_factory=dict)
    """Cost in dollars of starting one replica, by cell."""
    switch_cost: float = 0.0
    """Cost in dollars of one role switch."""
    horizon_hours: float = 24.0
    max_changes: int | None = None
    free_switches: frozenset[tuple[str, str]] = frozenset()
    """Switches (from cell, to cell) that change only the tier and no process. These switches have no cost and
    are not counted."""


@dataclass(frozen=True)
class OptimizationProblem:
    nodes: tuple[MachineClass, ...]
    cells: tuple[Cell, ...]
    demands: tuple[RateDemand, ...]
    variants: tuple[PathVariant, ...]
    levels: tuple[CacheLevel, ...] = ()
    limits: PoolLimits = PoolLimits()
    objective: Literal["cost", "goodput", "max-min"] = "cost"
    current: CurrentState | None = None


@dataclass(frozen=True)
class CellFlow:
    """Work of a demand at one service, with one required tier, that is assigned to one cell."""

    demand: str
    service: str
    cell: str
    rate: float
    tier: float = float("inf")
    """Largest tier in seconds that the work allows. The cell's own tier may be tighter."""


@dataclass(frozen=True)
class SolveProgress:
    seconds: float
    incumbent: float | None
    bound: float | None


@dataclass(frozen=True)
class PoolSolution:
    status: Literal["optimal", "feasible"]
    """"optimal" only if the solver has proved that no plan is better by more than its gap."""
    seconds: float
    objective: float
    bound: float
    """Proven bound on the objective. No plan is better than this bound."""
    replicas: Mapping[str, int]
    nodes: Mapping[str, int]
    served: Mapping[str, float]
    """Served rate by variant."""
    flows: tuple[CellFlow, ...]
    levels: frozenset[str]
    slack: Mapping[str, float]
    """Slack by constraint. A constraint with a slack near 0 is binding."""
    first_s: float | None = None
    """Time in seconds until the solver found the first plan, or None if the solver does not report it."""
    history: tuple[SolveProgress, ...] = ()
    started: Mapping[str, int] = field(default_factory=dict)
    switched: Mapping[tuple[str, str], int] = field(default_factory=dict)
    extra: Mapping[str, int] = field(default_factory=dict)
    """Number of `replicas` by cell that use GPUs that would otherwise be idle."""
    work: float = 0.0
    """Work of the solver, in the unit of `SolverOptions.work`."""
    timed_out: bool = False
    """Whether this search or an earlier search reached its limit in seconds. If so, another run may find
    another plan."""

    @property
    def gap(self) -> float:
        """|incumbent - bound| / |incumbent|."""
        return abs(self.objective - self.bound) / max(abs(self.objective), 1e-9)


@dataclass(frozen=True)
class CapacityShortfall:
    """Reason why a problem is infeasible: a constraint, the allowed amount and the needed amount."""

    constraint: str
    allowed: float
    needed: float
    unit: str
    remedy: str


def check(pool: OptimizationProblem) -> None:
    """Raise ConfigError if an entry of the pool is invalid. The error names the entry."""
    _check_unique("nodes", (n.name for n in pool.nodes))
    _check_unique("cells", (c.name for c in pool.cells))
    _check_unique("demands", (u.name for u in pool.demands))
    _check_unique("variants", (v.name for v in pool.variants))
    _check_unique("levels", (level.name for level in pool.levels))
    _nodes(pool)
    _cells(pool)
    _demands(pool)
    _variants(pool)
    share = pool.limits.spot_share
    _require(0 <= share <= 1, "limits.spot_share", f"is {share}", "Set a share from 0 to 1.")
    _check_current(pool)


def _require(holds: bool, field: str, problem: str, remedy: str) -> None:
    if not holds:
        raise ConfigError(field, problem, remedy)


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen = set[str]()
    for name in names:
        _require(
            name not in seen, f"{what}[{name}]", "is defined twice", "Use a different name for each entry."
        )
        seen.add(name)


def _nodes(pool: OptimizationProblem) -> None:
    for node in pool.nodes:
        field = f"nodes[{node.name}]"
        _require(node.gpus >= 1, f"{field}.gpus", f"is {node.gpus}", "Set 1 or more.")
        _require(
            node.price >= 0 and isfinite(node.price),
            f"{field}.price",
            f"is {node.price}",
            "Set dollars per hour, 0 or more.",
        )
        _require(
            node.stock >= 0,
            f"{field}.stock",
            f"is {node.stock}",
            "Set the number of available nodes, 0 or more.",
        )


def _cells(pool: OptimizationProblem) -> None:
    nodes = {n.name: n for n in pool.nodes}
    demands = {u.name for u in pool.demands}
    for cell in pool.cells:
        field = f"cells[{cell.name}]"
        _require(
            cell.nodes in nodes,
            f"{field}.nodes",
            f'"{cell.nodes}" is not a node class',
            "Set the name of a node class.",
        )
        _require(
            packs_exactly(cell, nodes[cell.nodes]),
            f"{field}.gpus",
            f"{cell.gpus:g} GPUs do not divide a node of {nodes[cell.nodes].gpus}",
            "Set 1/8, 1/4, 1/2, 1, 2, 4 or 8 up to the node's GPUs, or a multiple of the node's GPUs.",
        )
        for demand, rate in cell.capacity.items():
            where = f"{field}.capacity[{demand}]"
            _require(demand in demands, where, "is not for a known demand", "Use the name of a demand.")
            _require(
                rate > 0 and isfinite(rate),
                where,
                f"is {rate}",
                "Set requests per second above 0, or omit a demand that the cell cannot serve.",
            )
        _require(
            0 <= cell.preference <= 0.03,
            f"{field}.preference",
            f"is {cell.preference}",
            "Set a number from 0 to 0.03.",
        )


def packs_exactly(cell: Cell, node: MachineClass) -> bool:
    if cell.gpus > node.gpus:
        return cell.gpus % node.gpus == 0
    return (
        cell.gpus >= MIN_GPU_SHARE and log2(cell.gpus).is_integer() and (node.gpus / cell.gpus).is_integer()
    )


def _demands(pool: OptimizationProblem) -> None:
    for u in pool.demands:
        field = f"demands[{u.name}]"
        _require(
            u.rate >= 0 and isfinite(u.rate),
            f"{field}.rate",
            f"is {u.rate}",
            "Set requests per second, 0 or more.",
        )
        _require(u.growth_per_s >= 0, f"{field}.growth_per_s", f"is {u.growth_per_s}", "Set 0 or more.")
        _require(u.weight > 0, f"{field}.weight", f"is {u.weight}", "Set a number above 0.")
        _require(u.slices is None or u.slices >= 1, f"{field}.slices", f"is {u.slices}", "Set 1 or more.")


def _variants(pool: OptimizationProblem) -> None:
    demands = {u.name for u in pool.demands}
    levels = {level.name for level in pool.levels}
    for v in pool.variants:
        field = f"variants[{v.name}]"
        _require(
            v.demand in demands,
            f"{field}.demand",
            f'"{v.demand}" is not a demand',
            "Set the name of a demand.",
        )
        _require(
            v.levels <= levels,
            f"{field}.levels",
            f"{sorted(v.levels - levels)} are not levels",
            "Use the names of levels.",
        )
        for need in v.needs:
            _require(
                need.work >= 0 and isfinite(need.work),
                f"{field}.needs[{need.service}].work",
                f"is {need.work}",
                "Set the number of requests to the service per request, 0 or more.",
            )


def _check_current(pool: OptimizationProblem) -> None:
    if pool.current is None:
        return
    cells = {c.name for c in pool.cells}
    for name, count in pool.current.replicas.items():
        field = f"current.replicas[{name}]"
        _require(name in cells, field, "is not a cell of the pool", "Keep running cells in the pool.")
        below_min_dwell = pool.current.below_min_dwell.get(name, 0)
        _require(
            0 <= below_min_dwell <= count,
            field,
            f"{below_min_dwell} of {count} are below the minimum dwell",
            "Set at most the number of running replicas.",
        )
