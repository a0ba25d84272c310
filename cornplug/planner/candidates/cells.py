"""Cells: combinations of a service, a replica configuration and a latency tier.

Cells and variants that no plan needs are removed. This does not change the best plan: replicas of the
dominating cell can replace a replica of the dominated cell on the same GPUs, because GPU counts of cells
divide one another. If two variants need the same work, the variant with the looser bounds can replace the
other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from cornplug.planner.candidates.latency_tiers import LatencyTier
from cornplug.planner.candidates.replica_configs import ReplicaConfig, Service
from cornplug.planner.candidates.timed_configs import TimedConfig
from cornplug.planner.inputs.schema import RouterPolicy
from cornplug.planner.optimizer.optimization_problem import Cell, PathVariant
from cornplug.planner.perf_model.engine_spec import CellHardware
from cornplug.planner.perf_model.stations import Station
from cornplug.planner.plan import EngineSettings

MAX_RATE: Final = 1e9
"""Capacity for a class whose requests cause no work at a service."""
PREFERENCE_TOLERANCE: Final = 0.005
"""Difference of preferences up to which a cell can dominate another cell. The preference for a tier is only a
tie-break, so it must not protect a dominated cell from removal."""


@dataclass(frozen=True)
class CellSpec:
    """Cell of a pool, with the service, configuration, tier and times from which it was built."""

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
    """Number of replicas for which the capacity was simulated. 0 means that the capacity was computed with
    closed forms."""
    derating: float = 1.0
    """Factor by which the capacity is reduced, because simulated plans missed a bound
    (`pipeline/decide.py`)."""

    @property
    def has_times(self) -> bool:
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
            self,
            cell=replace(self.cell, capacity=_usable_capacity(found)),
            simulated_replicas=simulated_replicas,
        )

    def derate(self, factor: float) -> CellSpec:
        capacity = {u: rate * factor for u, rate in self.cell.capacity.items()}
        cell = replace(self.cell, capacity=capacity)
        return replace(self, cell=cell, derating=self.derating * factor)


def build_cell(
    service: Service,
    footprint: ReplicaConfig,
    tier: LatencyTier,
    capacity: Mapping[str, float],
    preference: float,
    *,
    has_times: bool,
    start_s: float,
) -> Cell:
    """Build a cell. Its name contains the tier's rank in the service's chain (0 is the tightest tier)."""
    suffix = f":t{tier.rank}" if has_times else ""
    return Cell(
        name=f"{service.name}@{footprint.name}{suffix}",
        service=service.name,
        nodes=footprint.nodes.name,
        gpus=footprint.gpus,
        # A throughput is measured under its own latency conditions, so the cell can serve every tier.
        tier=tier.value if has_times else 0.0,
        capacity=_usable_capacity(capacity),
        role=service.tasks,
        preference=preference,
        start_s=start_s,
    )


def _usable_capacity(capacity: Mapping[str, float]) -> dict[str, float]:
    return {u: min(rate, MAX_RATE) for u, rate in capacity.items() if rate > 0}


def undominated_cells(specs: Iterable[CellSpec]) -> list[CellSpec]:
    """Return the cells that no other cell dominates."""
    groups: defaultdict[tuple[str, str], list[CellSpec]] = defaultdict(list)
    for spec in specs:
        groups[spec.cell.service, spec.cell.nodes].append(spec)
    kept: list[CellSpec] = []
    for group in groups.values():
        better: list[CellSpec] = []
        # Smallest first, because only cells with at most as many GPUs can dominate a cell.
        for spec in sorted(group, key=lambda s: (s.cell.gpus, s.cell.preference, s.cell.tier)):
            if not any(_dominates(other, spec) for other in better):
                better.append(spec)
        kept += better
    return kept


def _dominates(candidate: CellSpec, other: CellSpec) -> bool:
    copies = other.cell.gpus / candidate.cell.gpus
    return (
        copies >= 1
        and candidate.cell.tier <= other.cell.tier
        and candidate.cell.start_s <= other.cell.start_s
        and candidate.cell.preference <= other.cell.preference + PREFERENCE_TOLERANCE
        and all(
            copies * candidate.cell.capacity.get(u, 0.0) >= rate for u, rate in other.cell.capacity.items()
        )
    )


def loosest_variants(variants: Iterable[PathVariant]) -> tuple[PathVariant, ...]:
    """Remove each variant that differs from another variant only by tighter bounds."""
    groups: defaultdict[tuple[object, ...], list[PathVariant]] = defaultdict(list)
    for v in variants:
        services = tuple((n.service, n.work) for n in v.needs)
        groups[v.demand, v.structure, services, v.levels].append(v)
    return tuple(v for same in groups.values() for i, v in enumerate(same) if not _is_redundant(v, i, same))


def _is_redundant(variant: PathVariant, index: int, group: list[PathVariant]) -> bool:
    """Return whether a variant is tighter than another, or equal to an earlier variant."""
    tiers = [n.tier for n in variant.needs]
    for i, other in enumerate(group):
        others = [n.tier for n in other.needs]
        if (
            i != index
            and all(a <= b for a, b in zip(tiers, others, strict=True))
            and (tiers != others or i < index)
        ):
            return True
    return False
