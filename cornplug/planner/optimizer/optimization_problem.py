"""The optimisation problem in pool form: integer replicas of cells, and integer nodes of classes.

Nodes are counted, not indexed (`docs/decisions.md` explains why this is exact). The problem does not depend
on engines, GPU speeds or solvers: `cells.py` and `request_paths.py` create it, `milp.py` solves it. Units are
requests per second, dollars per hour and network bytes per second.
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
    """Bytes of host memory for caches."""
    spot: bool = False
    """Whether the provider may reclaim all machines at the same time."""


@dataclass(frozen=True)
class Cell:
    """A service on a footprint: the GPUs of one replica, and its capacity."""

    name: str
    service: str
    nodes: str
    """Name of the machine class that it runs on."""
    gpus: float
    """GPUs of one node: 1/4, 1/2, 1, 2, 4, 8, or a multiple of whole nodes."""
    tier: float
    """Upper bound in seconds on its stage's percentile. inf means no bound."""
    capacity: Mapping[str, float]
    """Maximum rate per replica by demand, if served alone."""
    role: str = ""
    """Tasks. Replicas can be switched between cells that differ only in role (re-planning)."""
    switches_with: tuple[str, ...] = ()
    """Cells that a running replica of this cell can switch to without a restart."""
    start_s: float = 0.0
    """Seconds from the decision to add a replica until its first request."""
    preference: float = 0.0
    """Tie-break as a share of its price, at most 0.03. Larger is worse."""


@dataclass(frozen=True)
class ServiceDemand:
    """Work of a variant at one service."""

    service: str
    tier: float
    """Largest tier of a cell that may do this work."""
    work: float = 1.0
    """Service requests per request: items x (1 - hit rate), or the share of prefill that remains."""


@dataclass(frozen=True)
class PathVariant:
    """A path of one demand's requests through the services."""

    name: str
    demand: str
    structure: str
    needs: tuple[ServiceDemand, ...]
    levels: frozenset[str] = frozenset()
    """Names of the cache levels that it relies on."""
    network: float = 0.0
    """Bytes transferred between nodes per request."""


@dataclass(frozen=True)
class RateDemand:
    """A request class: "application/request"."""

    name: str
    rate: float
    """Planned rate, including the peak factor."""
    online: bool = True
    weight: float = 1.0
    growth_per_s: float = 0.0
    """Relative growth of the rate per second, until additional replicas have started."""
    slices: int | None = None
    """Number of equal slices to divide among cells. None allows any division."""


@dataclass(frozen=True)
class CacheLevel:
    """One size of one cache. Exactly one level of each cache is chosen."""

    name: str
    cache: str
    bytes: float


@dataclass(frozen=True)
class CrowdedNode:
    """A node whose loss a plan did not survive, with the number of nodes of its class."""

    nodes: str
    count: int
    replicas: Mapping[str, int]
    """Replicas on that node by cell."""


@dataclass(frozen=True)
class PoolLimits:
    max_utilisation: float = 0.95
    online_share: float = 0.8
    network_utilisation: float = 0.7
    spot_share: float = 0.0
    """Maximum share of an online demand's work at each service on spot machines."""
    spare: frozenset[str] = frozenset()
    """Services that must carry their online work after the loss of their largest replica."""
    by_node: bool = False
    """Whether these services must also survive the loss of any node with all its replicas."""
    crowded: tuple[CrowdedNode, ...] = ()
    """Placements to exclude, with `by_node`."""


@dataclass(frozen=True)
class CurrentState:
    """The current deployment, and the costs of changing it (re-planning)."""

    replicas: Mapping[str, int]
    """Replicas by cell."""
    below_min_dwell: Mapping[str, int] = field(default_factory=dict)
    """Replicas by cell that are within the minimum dwell time, and so are kept."""
    start_cost: Mapping[str, float] = field(default_factory=dict)
    """Dollars to start one replica, by cell."""
    switch_cost: float = 0.0
    """Dollars for one role switch."""
    horizon_hours: float = 24.0
    max_changes: int | None = None
    free: frozenset[tuple[str, str]] = frozenset()
    """Switches (from, to) that change only the tier, without changing a process."""


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
    """Rate of a demand at one service on one cell, for the tier of one variant."""

    demand: str
    service: str
    cell: str
    rate: float
    tier: float = float("inf")
    """Tier in seconds that the work requires. The cell's own tier may be tighter."""


@dataclass(frozen=True)
class SolveProgress:
    seconds: float
    incumbent: float | None
    bound: float | None


@dataclass(frozen=True)
class PoolSolution:
    status: Literal["optimal", "feasible"]
    """"optimal" only if the solver proved it within its gap."""
    seconds: float
    objective: float
    bound: float
    """Proven bound. No plan is better."""
    replicas: Mapping[str, int]
    nodes: Mapping[str, int]
    served: Mapping[str, float]
    """Rate by variant."""
    flows: tuple[CellFlow, ...]
    levels: frozenset[str]
    slack: Mapping[str, float]
    """Slack by constraint. Near 0 means binding."""
    first_s: float | None = None
    """Seconds until the first incumbent, if the solver reports it."""
    history: tuple[SolveProgress, ...] = ()
    started: Mapping[str, int] = field(default_factory=dict)
    switched: Mapping[tuple[str, str], int] = field(default_factory=dict)
    extra: Mapping[str, int] = field(default_factory=dict)
    """Number of `replicas` by cell on GPUs that would otherwise be idle."""
    work: float = 0.0
    """Work of the solver, see `SolverOptions.work`."""
    timed_out: bool = False
    """Whether this search or an earlier one reached the wall-clock limit. Another run may find another
    plan."""

    @property
    def gap(self) -> float:
        """|incumbent - bound| / |incumbent|."""
        return abs(self.objective - self.bound) / max(abs(self.objective), 1e-9)


@dataclass(frozen=True)
class CapacityShortfall:
    """Reason for infeasibility: a constraint, the allowed amount and the needed amount."""

    constraint: str
    allowed: float
    needed: float
    unit: str
    remedy: str
