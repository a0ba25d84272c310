"""Iterations of attention-DP groups, which are in step: how many groups' prompts share one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_ROUNDS: Final = 24
_BUSIEST: Final = 0.999


@dataclass(frozen=True)
class SharedIterations:
    """Iterations with prompts, of all groups of a replica."""

    busy: float
    """Share of the time that they take."""
    groups: float
    """That have a prompt in one of them, on average."""
    longer: float
    """Times that of a lone prompt."""


def shared_iterations(alone: float, groups: int, side_by_side: float) -> SharedIterations:
    """The fixed point of how many groups' prompts share an iteration.

    Prompts that come to any group during an iteration all go into the next one: of a server at utilisation u,
    u^2 / (1 - u) wait. More of them make it longer, but by less than each by itself.

    Args:
        alone: share of the time that one group's prompts would take with nothing beside them.
        side_by_side: an iteration with prompts of all groups, times that of a lone one.
    """
    if groups == 1:
        return SharedIterations(alone, 1.0, 1.0)
    together, longer, busy = 1.0, 1.0, 0.0
    for _ in range(_ROUNDS):
        longer = 1 + (together - 1) / (groups - 1) * (side_by_side - 1)
        busy = min(groups * alone * longer / together, _BUSIEST)
        now = min(1 + busy * busy / (1 - busy), groups)
        if abs(now - together) < 1e-3:
            break
        together = (together + now) / 2
    return SharedIterations(busy, together, longer)
