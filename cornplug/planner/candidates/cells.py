"""Cells: combinations of a service, a footprint and a tier, with the capacity for each request class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from cornplug.planner.candidates.latency_tiers import LatencyTier
from cornplug.planner.candidates.replica_configs import ReplicaConfig
from cornplug.planner.candidates.services import Service
from cornplug.planner.candidates.timed_configs import TimedConfig
from cornplug.planner.inputs.schema import RouterPolicy
from cornplug.planner.optimizer.optimization_problem import Cell
from cornplug.planner.plan import EngineSettings
from cornplug.planner.simulator.simulator import Station
from cornplug.planner.simulator.step_times import CellHardware

MOST_RATE: Final = 1e9
"""Capacity for a class whose requests cause no work at a service."""


@dataclass(frozen=True)
class CellSpec:
    """Cell of a pool, with all information about it."""

    cell: Cell
    service: Service
    footprint: ReplicaConfig
    tier: LatencyTier
    source: str
    """Source of the cell's times."""
    hardware: CellHardware | None = None
    """Times and memory of a replica, or None if the cell has only a throughput."""
    settings: EngineSettings | None = None
    router: RouterPolicy = "power_of_two"
    simulated_replicas: int = 0
    """Number of replicas for which the capacity was simulated. 0 means that it was computed with closed
    forms."""
    derating: float = 1.0
    """Factor by which the capacity is reduced, because simulated plans missed a bound
    (`pipeline/derate.py`)."""

    @property
    def timed(self) -> bool:
        return self.hardware is not None

    def station(self, replicas: int) -> Station:
        """Return the cell as a station of the simulator, with this number of replicas. Raises ValueError if
        the cell has only a throughput."""
        if self.hardware is None:
            raise ValueError(f"{self.cell.name}: only its throughput is known, not its times")
        config = TimedConfig(self.service, self.footprint, self.hardware)
        return config.station(self.router, replicas, name=self.cell.name)

    def with_capacity(self, capacity: Mapping[str, float], *, simulated_replicas: int) -> CellSpec:
        """Return the cell with a capacity that was simulated for this number of replicas.

        The capacity is multiplied by the cell's derating.
        """
        found = {u: rate * self.derating for u, rate in capacity.items()}
        return replace(
            self, cell=replace(self.cell, capacity=_positive(found)), simulated_replicas=simulated_replicas
        )

    def derate(self, factor: float) -> CellSpec:
        capacity = {u: rate * factor for u, rate in self.cell.capacity.items()}
        cell = replace(self.cell, capacity=capacity)
        return replace(self, cell=cell, derating=self.derating * factor)


def make_cell(
    service: Service,
    footprint: ReplicaConfig,
    tier: LatencyTier,
    capacity: Mapping[str, float],
    preference: float,
    *,
    timed: bool,
    start_s: float,
) -> Cell:
    """Create a cell. Its name contains the tier's rank in the service's chain (0 is the tightest tier)."""
    suffix = f":t{tier.rank}" if timed else ""
    return Cell(
        name=f"{service.name}@{footprint.name}{suffix}",
        service=service.name,
        nodes=footprint.nodes.name,
        gpus=footprint.gpus,
        # A throughput is measured under its own latency conditions, so the cell can serve every tier.
        tier=tier.value if timed else 0.0,
        capacity=_positive(capacity),
        role=service.tasks,
        preference=preference,
        start_s=start_s,
    )


def _positive(capacity: Mapping[str, float]) -> dict[str, float]:
    return {u: min(rate, MOST_RATE) for u, rate in capacity.items() if rate > 0}
