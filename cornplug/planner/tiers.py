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
"""Tiers of one service. More cost solver time and save little: integrality grows with each."""
UNBOUNDED: Final = 1e6


@dataclass(frozen=True, order=True)
class Tier:
    seconds: float
    """The stage's percentile stays under it; inf: no bound."""
    tpot_s: float
    rank: int

    @property
    def value(self) -> float:
        """As the pool orders tiers: the seconds, told apart by a hair where they are equal."""
        return (UNBOUNDED if isinf(self.seconds) else self.seconds) * (1 + 1e-9 * self.rank)


@dataclass(frozen=True)
class Chain:
    tiers: tuple[Tier, ...]

    def at_most(self, seconds: float, tpot_s: float) -> Tier:
        """The loosest tier that keeps both promises. KeyError cannot be: the chain is made of them all."""
        return max(t for t in self.tiers if t.seconds <= seconds and t.tpot_s <= tpot_s)


def chain(wanted: Iterable[tuple[float, float]]) -> Chain:
    """Of (seconds, seconds per token) pairs.

    A tier's time per token is the least of its own and all looser ones', whose work may come to it.
    """
    groups = [[pair] for pair in sorted(set(wanted))]
    while len(groups) > MOST:
        i = min(range(len(groups) - 1), key=lambda i: _distance(groups[i][0], groups[i + 1][0]))
        groups[i : i + 2] = [groups[i] + groups[i + 1]]
    tiers = []
    for rank, group in enumerate(groups):
        looser = [tpot for g in groups[rank:] for _, tpot in g]
        tiers.append(Tier(group[0][0], min(looser), rank))
    return Chain(tuple(tiers))


def _distance(tighter: tuple[float, float], looser: tuple[float, float]) -> float:
    """What merging costs: how many times tighter the looser one becomes."""
    return _times(tighter[0], looser[0]) * _times(tighter[1], looser[1])


def _times(tighter: float, looser: float) -> float:
    if isinf(looser):
        return 1.0 if isinf(tighter) else inf
    return max(looser / tighter, 1.0) if tighter > 0 else inf
