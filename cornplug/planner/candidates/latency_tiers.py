"""Tiers of a service: the few promises of time among which its cells choose.

Each variant asks a service for a bound on its stage's percentile and on the time per token. The
many bounds are merged into a short chain, towards the tighter side, so that every cell of a tier
may do the work of all looser ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isinf
from typing import Final

MOST: Final = 4
"""Tiers of one service. More of them save little, and multiply the cells."""
UNBOUNDED: Final = 1e6
TIER_SPACING: Final = 1e-5
"""Relative: tiers with equal seconds differ by it, so that names with six digits do, too."""


@dataclass(frozen=True, order=True)
class LatencyTier:
    seconds: float
    """The stage's percentile stays under it; inf: no bound."""
    tpot_s: float
    rank: int
    value: float
    """As the pool orders the tiers of one service: seconds, or seconds a token where only they
    are bounded."""


@dataclass(frozen=True)
class Chain:
    tiers: tuple[LatencyTier, ...]

    def at_most(self, seconds: float, tpot_s: float) -> LatencyTier:
        """The loosest tier that keeps both promises. KeyError cannot be: the chain is made of them all."""
        return max(t for t in self.tiers if t.seconds <= seconds and t.tpot_s <= tpot_s)


def how_many(services: int, node_classes: int) -> int:
    """Tiers for each service of a problem of this size.

    Cells of neighbouring tiers are nearly the same to a solver: with 26 services on six node
    classes it found a plan of $161/h in 20 s with two tiers, and one of $816/h with four.
    """
    size = services * node_classes
    return MOST if size <= 12 else 3 if size <= 40 else 2


def chain(wanted: Iterable[tuple[float, float]], most: int = MOST) -> Chain:
    """At most `most` tiers for these (seconds, seconds per token) pairs.

    A tier's time per token is the least among itself and all looser tiers: it may take their work.
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
    """Cost of merging two pairs: the factor by which the looser one becomes tighter."""
    return _times(tighter[0], looser[0]) * _times(tighter[1], looser[1])


def _times(tighter: float, looser: float) -> float:
    if isinf(looser):
        return 1.0 if isinf(tighter) else inf
    return max(looser / tighter, 1.0) if tighter > 0 else inf
