"""The optimisation problem in pool form: integer numbers of replicas of cells, and of nodes of classes.

Nodes are counted, not indexed (`docs/decisions.md` explains why this is exact). The problem does not depend
on engines, GPU speeds or solvers. `cells.py` and `request_paths.py` create it, and `milp.py` solves it. Units
are requests per second, dollars per hour and network bytes per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


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
    """Upper bound in seconds on the percentile of the stage's time that requests bound. inf means no
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
    """Largest tier of a cell that may do this work."""
    work: float = 1.0
    """Number of requests to the service per request: items x (1 - hit rate), or the share of the prefill that
    is not cached."""


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
    free: frozenset[tuple[str, str]] = frozenset()
    """Switches (from cell, to cell) that change only the tier and no process. They are not counted."""


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
    """Work of a demand at one service that one cell does, for one required tier."""

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
    """Proven bound on the objective. No plan is better."""
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
