"""Hits and saved seconds of a cache, measured by replaying a trace.

`StoreReplay` is a cache with the store's policy. It uses the same index as a store's daemon, but no memory
for payloads, no sockets and no clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Protocol

from cornplug.replay.trace_readers import TraceAccess, TraceRequest
from cornplug.settings import NamespaceConfig
from cornplug.store.base import KEY_BYTES, Reservation, ReserveTerms
from cornplug.store.daemon.index import StoreIndex
from cornplug.store.daemon.reservations import ReservationTimes

_OWNER: Final = 1
_BATCH: Final = 64
"""Number of entries that an engine reserves before it commits them, such as the pages of a step."""


class StoreReplay:
    """Cache with the store's policy. For each request, it makes the calls that an engine would make: lease
    the present entries, then reserve and commit the missing entries.
    """

    def __init__(self, capacity_bytes: int, namespaces: Mapping[str, NamespaceConfig] | None = None) -> None:
        self._index = StoreIndex(
            bytes(16), capacity_bytes, times=ReservationTimes(0.0), grow=lambda missing: missing,
            namespaces=namespaces,
        )  # fmt: skip

    def serve(self, request: TraceRequest) -> list[bool]:
        """Return whether each access finds its entry, and write the missing entries."""
        keys = [_key(access) for access in request.accesses]
        mask = self._index.contains(keys)
        there = [key for key, is_there in zip(keys, mask, strict=True) if is_there]
        if request.is_prefix and 0 in mask:
            there = keys[: mask.index(0)]
        if there:
            leases = self._index.lease(_OWNER, there, ttl_s=60.0, now_s=request.time_s)
            self._index.release(_OWNER, sorted(set(leases.tokens)), now_s=request.time_s)
        missing = [access for access, is_there in zip(request.accesses, mask, strict=True) if not is_there]
        for start in range(0, len(missing), _BATCH):
            self._write(request, missing[start : start + _BATCH])
        return [bool(each) for each in mask]

    def _write(self, request: TraceRequest, missing: Sequence[TraceAccess]) -> None:
        reserved: list[Reservation] = []
        for cost_s, some in groupby(missing, key=lambda access: access.cost_s):
            entries = [(_key(access), access.size_bytes) for access in some]
            terms = ReserveTerms(request.app, cost_s=cost_s)
            answers = self._index.reserve(_OWNER, entries, terms, now_s=request.time_s)
            reserved += [answer for answer in answers if isinstance(answer, Reservation)]
        # Like the daemon, commit the entries of one message in reverse order.
        for one in reversed(reserved):
            self._index.commit(_OWNER, one.token, b"")


def _key(access: TraceAccess) -> bytes:
    return access.key.to_bytes(KEY_BYTES)


class ReplayedCache(Protocol):
    """Cache for which a trace can be replayed."""

    def serve(self, request: TraceRequest) -> Sequence[bool]:
        """Return whether each access finds its entry, and write the missing entries."""


@dataclass(slots=True)
class AccessCounts:
    """Sums over a set of accesses. If an earlier entry of a prefix is missing, a hit still counts as a hit,
    but saves no time.
    """

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
    """Result of replaying a trace with one cache."""

    total: AccessCounts = field(default_factory=AccessCounts)
    by_app: dict[str, AccessCounts] = field(default_factory=lambda: defaultdict(AccessCounts))


def replay(requests: Sequence[TraceRequest], cache: ReplayedCache) -> ReplayScore:
    """Replay the requests with `cache`, which should be empty, and return its score."""
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
