"""Upper bounds on hits and saved seconds of a trace at a given size, for a policy that knows the future.

With equal sizes, Belady's MIN with bypass, which is exact for hits. Otherwise the bound PFOO-L (Berger,
Beckmann and Harchol-Balter, 2018): keeping an entry between two uses takes its bytes times the accesses in
between. The most valuable intervals share the cache's bytes times the trace's accesses, as if they could be
packed without gaps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cornplug.replay.trace import TraceAccess


@dataclass(frozen=True, slots=True)
class OfflineOptimum:
    """Upper bounds on hits and on saved seconds."""

    name: str
    hits: float
    saved_s: float


def offline_optimum(accesses: Sequence[TraceAccess], capacity_bytes: int) -> OfflineOptimum:
    """Return the optimum for accesses that are independent of each other. Prefixes can only save less."""
    sizes = {access.size_bytes for access in accesses}
    costs = {access.cost_s for access in accesses}
    if len(sizes) == 1 and len(costs) <= 1:
        hits = _belady(accesses, capacity_bytes // max(1, *sizes, 1))
        return OfflineOptimum("optimum (Belady)", hits, hits * (next(iter(costs), 0.0)))
    return OfflineOptimum(
        "optimum (PFOO-L bound)",
        _pfoo(accesses, capacity_bytes, lambda access: 1.0),
        _pfoo(accesses, capacity_bytes, lambda access: access.cost_s),
    )


def _belady(accesses: Sequence[TraceAccess], slots: int) -> int:
    """Return the hits of MIN, which keeps the entries with the nearest next use and may bypass the new
    entry."""
    never = len(accesses)
    following = [never] * len(accesses)
    last: dict[int, int] = {}
    for at in range(len(accesses) - 1, -1, -1):
        key = accesses[at].key
        following[at] = last.get(key, never)
        last[key] = at
    held: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for at, access in enumerate(accesses):
        hits += held.pop(access.key, None) is not None
        if following[at] == never:
            continue
        held[access.key] = following[at]
        heapq.heappush(farthest, (-following[at], access.key))
        while len(held) > slots:
            use, key = heapq.heappop(farthest)
            if held.get(key) == -use:
                del held[key]
    return hits


def _pfoo(
    accesses: Sequence[TraceAccess], capacity_bytes: int, value: Callable[[TraceAccess], float]
) -> float:
    """Return the value of the best intervals whose bytes times accesses fit within the total."""
    last: dict[int, int] = {}
    stays: list[tuple[float, float, float]] = []
    for at, access in enumerate(accesses):
        since = last.get(access.key)
        last[access.key] = at
        if since is None or access.size_bytes > capacity_bytes:
            continue
        room = float(max(1, access.size_bytes) * (at - since))
        stays.append((value(access) / room, room, value(access)))
    stays.sort(reverse=True)
    left, total = float(capacity_bytes) * len(accesses), 0.0
    for density, room, worth in stays:
        if room >= left:
            return total + density * left
        left -= room
        total += worth
    return total
