"""Hits and saved seconds of policies on one trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cornplug.replay.trace import TraceRequest


class ReplayedCache(Protocol):
    """A cache that a trace is replayed against."""

    def serve(self, request: TraceRequest) -> Sequence[bool]:
        """Return whether each access finds its entry, and write the missing entries."""


@dataclass(slots=True)
class AccessCounts:
    """Counts over some accesses. A hit after a missing part of its prefix counts as a hit but saves
    nothing."""

    accesses: int = 0
    hits: int = 0
    size_bytes: int = 0
    hit_bytes: int = 0
    cost_s: float = 0.0
    saved_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.accesses)

    @property
    def byte_hit_rate(self) -> float:
        return self.hit_bytes / max(1, self.size_bytes)


@dataclass(slots=True)
class ReplayScore:
    """The result of one policy."""

    total: AccessCounts = field(default_factory=AccessCounts)
    by_app: dict[str, AccessCounts] = field(default_factory=lambda: defaultdict(AccessCounts))


def replay(requests: Sequence[TraceRequest], cache: ReplayedCache) -> ReplayScore:
    """Return the score of a cache that is initially empty."""
    score = ReplayScore()
    for request in requests:
        found = cache.serve(request)
        counts, of_app = score.total, score.by_app[request.app]
        is_useful = True
        for access, hit in zip(request.accesses, found, strict=True):
            is_useful = hit and (is_useful or not request.is_prefix)
            for each in (counts, of_app):
                each.accesses += 1
                each.hits += hit
                each.size_bytes += access.size_bytes
                each.hit_bytes += access.size_bytes * hit
                each.cost_s += access.cost_s
                each.saved_s += access.cost_s * is_useful
    return score
