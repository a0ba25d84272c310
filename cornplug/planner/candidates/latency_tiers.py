"""Tiers of a service: a few latency bounds, each of which some cells of the service meet.

Each variant requires a bound on a percentile of a stage's time and on the time per token. These bounds are
merged into a short chain of tiers, rounded to the tighter bound, so that every cell of a tier can do the work
of all looser tiers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isinf
from typing import Final

MOST: Final = 4
"""Maximum number of tiers per service. More tiers would save little, but multiply the number of cells."""
UNBOUNDED: Final = 1e6
TIER_SPACING: Final = 1e-5
"""Relative difference between tiers with equal seconds. It is large enough for different names with six
digits."""


@dataclass(frozen=True, order=True)
class LatencyTier:
    seconds: float
    """Upper bound on a percentile of the stage's time. inf means no bound."""
    tpot_s: float
    rank: int
    """Position in the service's chain. 0 is the tightest tier."""
    value: float
    """Value that orders the tiers in the pool: seconds, or seconds per token if only these are bounded."""


@dataclass(frozen=True)
class Chain:
    tiers: tuple[LatencyTier, ...]

    def at_most(self, seconds: float, tpot_s: float) -> LatencyTier:
        """Return the loosest tier within both bounds. It exists if the chain was made from this pair."""
        return max(t for t in self.tiers if t.seconds <= seconds and t.tpot_s <= tpot_s)


def how_many(services: int, node_classes: int) -> int:
    """Return the number of tiers per service for a problem of this size.

    Cells of adjacent tiers are almost equal for a solver, which makes the search slow. With 26 services on
    six node classes, the solver found a plan of $161/h in 20 s with two tiers, and a plan of $816/h with
    four.
    """
    size = services * node_classes
    return MOST if size <= 12 else 3 if size <= 40 else 2


def chain(wanted: Iterable[tuple[float, float]], most: int = MOST) -> Chain:
    """Return at most `most` tiers for these (seconds, seconds per token) pairs.

    A tier's time per token is the minimum over itself and all looser tiers, because its cells may do their
    work.
    """
    groups = [[pair] for pair in sorted(set(wanted))]
    while len(groups) > most:
        i = min(range(len(groups) - 1), key=lambda i: _distance(groups[i][0], groups[i + 1][0]))
        groups[i : i + 2] = [groups[i] + groups[i + 1]]
    by_token = all(isinf(group[0][0]) for group in groups)
    tiers = []
    for rank, group in enumerate(groups):
        seconds, tpot_s = group[0][0], min(tpot for g in groups[rank:] for _, tpot in g)
        ordered_by = tpot_s if by_token else min(seconds, UNBOUNDED)
        tiers.append(LatencyTier(seconds, tpot_s, rank, ordered_by * (1 + TIER_SPACING * rank)))
    return Chain(tuple(tiers))


def _distance(tighter: tuple[float, float], looser: tuple[float, float]) -> float:
    """Return the disadvantage of merging two pairs: the factor by which the looser pair becomes tighter."""
    return _times(tighter[0], looser[0]) * _times(tighter[1], looser[1])


def _times(tighter: float, looser: float) -> float:
    if isinf(looser):
        return 1.0 if isinf(tighter) else inf
    return max(looser / tighter, 1.0) if tighter > 0 else inf
