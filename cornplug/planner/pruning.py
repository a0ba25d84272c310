"""Cells that no plan needs: others of the same nodes carry as much on no more GPUs.

Exact for cost, stock and packing: in any plan a dominated replica can be replaced by the smaller
cell's replicas on the same GPUs, because footprints divide each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from cornplug.planner.cells import CellSpec


def prune(specs: Iterable[CellSpec]) -> list[CellSpec]:
    """The cells that none of the others dominates, in their order."""
    groups: defaultdict[tuple[str, str], list[CellSpec]] = defaultdict(list)
    for spec in specs:
        groups[spec.cell.service, spec.cell.nodes].append(spec)
    kept: list[CellSpec] = []
    for group in groups.values():
        better: list[CellSpec] = []
        # The smallest first: only cells of at most one's GPUs can dominate it.
        for spec in sorted(group, key=lambda s: (s.cell.gpus, s.cell.preference, s.cell.tier)):
            if not any(_dominates(other, spec) for other in better):
                better.append(spec)
        kept += better
    return kept


def _dominates(one: CellSpec, other: CellSpec) -> bool:
    copies = other.cell.gpus / one.cell.gpus
    return (
        copies >= 1
        and one.cell.tier <= other.cell.tier
        and one.cell.preference <= other.cell.preference
        and all(copies * one.cell.capacity.get(u, 0.0) >= rate for u, rate in other.cell.capacity.items())
    )
