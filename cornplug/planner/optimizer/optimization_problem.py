"""The optimisation problem in pool form: integer replicas of cells, integer nodes of classes.

Nodes are counted, never indexed (`docs/decisions.md` says why that is exact). Nothing here knows an
engine, a GPU's speed or a solver: `cells.py` and `request_paths.py` make a Pool, `milp.py` solves it.
Rates are requests a second, money dollars an hour, network bytes a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class MachineClass:
    """A class of machines."""

    name: str
    gpu: str
    gpus: int
    price: float
    stock: int
    nic: float = float("inf")
    dram: float = float("inf")
    """Bytes for caches."""
    spot: bool = False
    """All of them may be taken back at once."""


@dataclass(frozen=True)
class Cell:
    """A service on a footprint: one replica's GPUs and its capacity."""

    name: str
    service: str
    nodes: str
    """Name of the class of machines it runs on."""
    gpus: float
    """Of one node: 1/4, 1/2, 1, 2, 4, 8; or a multiple of whole nodes."""
    tier: float
    """Seconds that its stage's percentile stays under; inf: none promised."""
    capacity: Mapping[str, float]
    """Demand -> largest rate of it alone, one replica."""
    role: str = ""
    """Replicas of cells that differ in their role only may be switched (re-planning)."""
    switches_with: tuple[str, ...] = ()
    """Cells that a running replica of this one can become without a restart."""
    start_s: float = 0.0
    """From the decision for a further replica to its first request."""
    preference: float = 0.0
    """Tie-break, share of its price, at most 0.03: the larger the worse."""


@dataclass(frozen=True)
class ServiceDemand:
    """Work of a variant at one service."""

    service: str
    tier: float
    """Cells with a tier at most this may do it."""
    work: float = 1.0
    """Requests of the service for one request: items x (1 - hit rate), share of prefill left."""


@dataclass(frozen=True)
class PathVariant:
    """A path of one demand's requests through the services."""

    name: str
    demand: str
    structure: str
    needs: tuple[ServiceDemand, ...]
    levels: frozenset[str] = frozenset()
    """Names of the cache levels that it counts on."""
    network: float = 0.0
    """Bytes between nodes, one request."""


@dataclass(frozen=True)
class RateDemand:
    """A request class: "application/request"."""

    name: str
    rate: float
    """Planned for (with its peak factor)."""
    online: bool = True
    weight: float = 1.0
    growth_per_s: float = 0.0
    """Share by which its rate may grow within a second, until further replicas have started."""
    slices: int | None = None
    """Its rate is divided among cells in multiples of rate / slices; None: at will."""


@dataclass(frozen=True)
class CacheLevel:
    """One size of one cache. Of each cache exactly one level is chosen."""

    name: str
    cache: str
    bytes: float


@dataclass(frozen=True)
class CrowdedNode:
    """A node whose loss a plan did not survive: its class had so many nodes, and it held so many replicas."""

    nodes: str
    count: int
    replicas: Mapping[str, int]
    """Cell -> replicas on that node."""


@dataclass(frozen=True)
class PoolLimits:
    max_utilisation: float = 0.95
    online_share: float = 0.8
    network_utilisation: float = 0.7
    spot_share: float = 0.0
    """Of an online demand's work at each service, that spot machines may do."""
    spare: frozenset[str] = frozenset()
    """Services that must carry their online work with one replica, the largest, lost."""
    by_node: bool = False
    """These services must carry it with all replicas of one node lost, whichever it is."""
    crowded: tuple[CrowdedNode, ...] = ()
    """With `by_node`: placements that are not to come again."""


@dataclass(frozen=True)
class CurrentState:
    """The current deployment, and the costs of changing it (re-planning)."""

    replicas: Mapping[str, int]
    """Cell -> replicas."""
    below_min_dwell: Mapping[str, int] = field(default_factory=dict)
    """Cell -> replicas that have not run for the minimum dwell yet: they stay."""
    start_cost: Mapping[str, float] = field(default_factory=dict)
    """Cell -> dollars to start one replica."""
    switch_cost: float = 0.0
    """Dollars for one role switch."""
    horizon_hours: float = 24.0
    max_changes: int | None = None
    free: frozenset[tuple[str, str]] = frozenset()
    """Switches (from, to) that change no process, only the tier that it keeps."""


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
    """A demand's rate, at one service, on one cell, for one variant's tier."""

    demand: str
    service: str
    cell: str
    rate: float
    tier: float = float("inf")
    """Seconds that the work asks for; the cell's own tier may be tighter."""


@dataclass(frozen=True)
class SolveProgress:
    seconds: float
    incumbent: float | None
    bound: float | None


@dataclass(frozen=True)
class PoolSolution:
    status: Literal["optimal", "feasible"]
    """"optimal" only where the solver proved it to its gap."""
    seconds: float
    objective: float
    bound: float
    """No plan is better than this."""
    replicas: Mapping[str, int]
    nodes: Mapping[str, int]
    served: Mapping[str, float]
    """Variant -> rate."""
    flows: tuple[CellFlow, ...]
    levels: frozenset[str]
    slack: Mapping[str, float]
    """Constraint -> its slack; near 0: it binds."""
    first_s: float | None = None
    """Seconds until the first incumbent, where the solver tells."""
    history: tuple[SolveProgress, ...] = ()
    started: Mapping[str, int] = field(default_factory=dict)
    switched: Mapping[tuple[str, str], int] = field(default_factory=dict)
    extra: Mapping[str, int] = field(default_factory=dict)
    """Cell -> replicas, of `replicas`, on GPUs that would be idle without them."""
    work: float = 0.0
    """Of the solver: see `SolverOptions.work`."""
    timed_out: bool = False
    """The wall clock ended the search, or one that led to it: another run may find another plan."""

    @property
    def gap(self) -> float:
        """|incumbent - bound| / |incumbent|."""
        return abs(self.objective - self.bound) / max(abs(self.objective), 1e-9)


@dataclass(frozen=True)
class CapacityShortfall:
    """Why nothing fits: one constraint, the amount that it allows and the amount needed."""

    constraint: str
    allowed: float
    needed: float
    unit: str
    remedy: str
