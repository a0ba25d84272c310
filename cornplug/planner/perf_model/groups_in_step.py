"""Models attention-DP groups, which run iterations in lockstep: how many groups' prompts share an
iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_ROUNDS: Final = 24
_BUSIEST: Final = 0.999


@dataclass(frozen=True)
class SharedIterations:
    """Iterations with prompts, in all groups of a replica."""

    busy: float
    """Share of the time in which iterations contain prompts."""
    groups: float
    """Mean number of groups with a prompt in an iteration."""
    longer: float
    """Duration relative to an iteration with a single prompt."""


def shared_iterations(alone: float, groups: int, side_by_side: float) -> SharedIterations:
    """Return how many groups' prompts share an iteration, as a fixed point.

    Prompts that arrive at any group during an iteration join the next iteration: a server at utilisation u
    has u^2 / (1 - u) waiting requests. Prompts that share an iteration take less time than separate
    iterations.

    Args:
        alone: share of the time that the prompts of one group take alone.
        groups: number of groups.
        side_by_side: duration of an iteration with prompts of all groups, relative to a single prompt.
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
