"""Cells: one service on one footprint under one tier, with its capacity for each request class."""

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
"""Rate for a class whose requests cause no work at a service."""


@dataclass(frozen=True)
class CellSpec:
    """A pool's cell, and all information about it."""

    cell: Cell
    service: Service
    footprint: ReplicaConfig
    tier: LatencyTier
    source: str
    """Source of its times."""
    hardware: CellHardware | None = None
    """None if only a throughput is known."""
    settings: EngineSettings | None = None
    router: RouterPolicy = "power_of_two"
    simulated_replicas: int = 0
    """Number of replicas for which the simulator computed the capacity. 0 means that closed forms did."""
    derating: float = 1.0
    """Factor on the capacity, from simulations of whole plans that missed a bound."""

    @property
    def timed(self) -> bool:
        return self.hardware is not None

    def station(self, replicas: int) -> Station:
        """Return the cell's station. Raises ValueError if only its throughput is known."""
        if self.hardware is None:
            raise ValueError(f"{self.cell.name}: only its throughput is known, not its times")
        config = TimedConfig(self.service, self.footprint, self.hardware)
        return config.station(self.router, replicas, name=self.cell.name)

    def with_capacity(self, capacity: Mapping[str, float], *, simulated_replicas: int) -> CellSpec:
        """Return the cell with the simulator's capacity for this number of replicas. Its derating still
        applies."""
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
    """Return a cell, named with its tier's rank in the service's chain (0 is the tightest)."""
    suffix = f":t{tier.rank}" if timed else ""
    return Cell(
        name=f"{service.name}@{footprint.name}{suffix}",
        service=service.name,
        nodes=footprint.nodes.name,
        gpus=footprint.gpus,
        # A throughput includes its own conditions, so it serves every tier.
        tier=tier.value if timed else 0.0,
        capacity=_positive(capacity),
        role=service.tasks,
        preference=preference,
        start_s=start_s,
    )


def _positive(capacity: Mapping[str, float]) -> dict[str, float]:
    return {u: min(rate, MOST_RATE) for u, rate in capacity.items() if rate > 0}
