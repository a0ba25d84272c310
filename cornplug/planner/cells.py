"""Cells: one service on one footprint under one tier, with what each request class may bring to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cornplug.planner.footprints import Footprint
from cornplug.planner.plan import EngineSettings
from cornplug.planner.pool import Cell
from cornplug.planner.services import Service
from cornplug.planner.simulator import Station
from cornplug.planner.tiers import Tier
from cornplug.planner.times import Hardware

MOST_RATE = 1e9
"""Of a class whose requests bring a service no work at all."""


@dataclass(frozen=True)
class CellSpec:
    """A pool's cell, and everything known about it."""

    cell: Cell
    service: Service
    footprint: Footprint
    tier: Tier
    source: str
    """Of its times."""
    hardware: Hardware | None = None
    """None: only a throughput is known."""
    settings: EngineSettings | None = None
    router: str = "least_work"

    @property
    def timed(self) -> bool:
        return self.hardware is not None

    def station(self, replicas: int) -> Station:
        """ValueError: no times are known."""
        if self.hardware is None:
            raise ValueError(f"{self.cell.name}: only its throughput is known, not its times")
        raise NotImplementedError


def cell_name(service: Service, footprint: Footprint, tier: Tier, tiers: int) -> str:
    """The tier stands there only where there are several."""
    return f"{service.name}@{footprint.name}" + (f":t{tier.rank}" if tiers > 1 else "")


def make_cell(
    service: Service,
    footprint: Footprint,
    tier: Tier,
    tiers: int,
    capacity: Mapping[str, float],
    preference: float,
    *,
    timed: bool,
) -> Cell:
    name = cell_name(service, footprint, tier, tiers)
    return Cell(
        name=name,
        service=service.name,
        nodes=footprint.nodes.name,
        gpus=footprint.gpus,
        # A throughput's own conditions are its promise: it serves every tier.
        tier=tier.value if timed else 0.0,
        capacity={u: min(rate, MOST_RATE) for u, rate in capacity.items() if rate > 0},
        role=service.tasks,
        preference=preference,
    )
