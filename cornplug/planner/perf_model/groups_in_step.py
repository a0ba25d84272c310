"""Lockstep iterations of attention-DP groups, and how many groups' prompts share one iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_ROUNDS: Final = 24
_BUSIEST: Final = 0.999


@dataclass(frozen=True)
class SharedIterations:
    """Iterations with prompts over all groups of a replica."""

    busy: float
    """Share of the time that they take."""
    groups: float
    """Mean number of groups with a prompt in an iteration."""
    longer: float
    """Duration relative to an iteration with a single prompt."""


def shared_iterations(alone: float, groups: int, side_by_side: float) -> SharedIterations:
    """Return the fixed point of how many groups' prompts share an iteration.

    Prompts that arrive at any group during an iteration all join the next: a server at utilisation u has u^2
    / (1 - u) waiting. Together they take less time than separately. `alone` is the share of the time for one
    group's prompts alone. `side_by_side` is the duration with prompts of all groups relative to a single
    prompt.
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
