"""Latency tiers: bounds on a percentile of a stage's time and on the time per token.

A variant is a path of a class's requests, with a bound for each stage. The bounds of all variants are merged
into a short chain of tiers, rounded to the tighter bound, so that every cell of a tier can do the work of all
looser tiers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isinf
from typing import Final

MAX_TIERS: Final = 4
"""Maximum number of tiers per service. More tiers would save little, but multiply the number of cells."""
UNBOUNDED_TIER_S: Final = 1e6
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
class TierChain:
    tiers: tuple[LatencyTier, ...]

    def loosest_within(self, seconds: float, tpot_s: float) -> LatencyTier:
        """Return the loosest tier within both bounds. Such a tier exists if this pair of bounds was passed to
        `tier_chain`."""
        return max(t for t in self.tiers if t.seconds <= seconds and t.tpot_s <= tpot_s)


def tiers_per_service(services: int, node_classes: int) -> int:
    """Return the number of tiers per service for a problem of this size.

    Cells of adjacent tiers are almost equal for a solver, which makes the search slow. With 26 services on
    six node classes, the solver found a plan of $161/h in 20 s with two tiers, and a plan of $816/h with
    four.
    """
    size = services * node_classes
    return MAX_TIERS if size <= 12 else 3 if size <= 40 else 2


def tier_chain(bounds: Iterable[tuple[float, float]], max_tiers: int = MAX_TIERS) -> TierChain:
    """Return at most `max_tiers` tiers for these (seconds, seconds per token) pairs.

    The time per token of a tier is at most the time per token of each looser tier, because cells of the tier
    may also do the work of looser tiers.
    """
    groups = [[pair] for pair in sorted(set(bounds))]
    while len(groups) > max_tiers:
        i = min(range(len(groups) - 1), key=lambda i: _distance(groups[i][0], groups[i + 1][0]))
        groups[i : i + 2] = [groups[i] + groups[i + 1]]
    by_token = all(isinf(group[0][0]) for group in groups)
    tiers = []
    for rank, group in enumerate(groups):
        seconds, tpot_s = group[0][0], min(tpot for g in groups[rank:] for _, tpot in g)
        ordered_by = tpot_s if by_token else min(seconds, UNBOUNDED_TIER_S)
        tiers.append(LatencyTier(seconds, tpot_s, rank, ordered_by * (1 + TIER_SPACING * rank)))
    return TierChain(tuple(tiers))


def _distance(tighter: tuple[float, float], looser: tuple[float, float]) -> float:
    """Return the disadvantage of merging two pairs: the factor by which the looser pair becomes tighter."""
    return _tightening_factor(tighter[0], looser[0]) * _tightening_factor(tighter[1], looser[1])


def _tightening_factor(tighter: float, looser: float) -> float:
    if isinf(looser):
        return 1.0 if isinf(tighter) else inf
    return max(looser / tighter, 1.0) if tighter > 0 else inf
