"""Removes cells and variants that no plan needs, because others do the same work without more resources.

Pruning is exact for cost, stock and packing. In any plan, replicas of the dominating cell can replace a
replica of the dominated cell on the same GPUs, because footprints divide each other. If two variants need the
same work, the variant with the looser bounds can replace the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from cornplug.planner.candidates.cells import CellSpec
from cornplug.planner.optimizer.optimization_problem import PathVariant

TIGHTNESS: Final = 0.005
"""Maximum difference of preferences that is ignored. The preference for a tier is only a tie-break between
cells that are needed, and must not keep a dominated cell."""


def prune(specs: Iterable[CellSpec]) -> list[CellSpec]:
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


def _dominates(one: CellSpec, other: CellSpec) -> bool:
    copies = other.cell.gpus / one.cell.gpus
    return (
        copies >= 1
        and one.cell.tier <= other.cell.tier
        and one.cell.start_s <= other.cell.start_s
        and one.cell.preference <= other.cell.preference + TIGHTNESS
        and all(copies * one.cell.capacity.get(u, 0.0) >= rate for u, rate in other.cell.capacity.items())
    )


def loosest(variants: Iterable[PathVariant]) -> tuple[PathVariant, ...]:
    """Return the variants without variants that have tighter bounds than another variant and are otherwise
    equal.
    """
    groups: defaultdict[tuple[object, ...], list[PathVariant]] = defaultdict(list)
    for v in variants:
        services = tuple((n.service, n.work) for n in v.needs)
        groups[v.demand, v.structure, services, v.levels].append(v)
    return tuple(v for same in groups.values() for i, v in enumerate(same) if not _tighter(v, i, same))


def _tighter(variant: PathVariant, place: int, same: list[PathVariant]) -> bool:
    """Return whether a variant is tighter than another, or equal to an earlier variant."""
    tiers = [n.tier for n in variant.needs]
    for i, other in enumerate(same):
        others = [n.tier for n in other.needs]
        if (
            i != place
            and all(a <= b for a, b in zip(tiers, others, strict=True))
            and (tiers != others or i < place)
        ):
            return True
    return False
