"""The store's policy against LRU, and which hits count as saved."""

from __future__ import annotations

import random
from collections.abc import Sequence

from cornplug.replay import StoreReplay, TraceAccess, TraceRequest, distinct_bytes, replay

from .lru import LRU


def alone(accesses: Sequence[TraceAccess]) -> list[TraceRequest]:
    return [TraceRequest(0.0, "default", (access,), is_prefix=False) for access in accesses]


def zipf(count: int, keys: int, seed: int, *, equal: bool) -> list[TraceAccess]:
    draw = random.Random(seed)
    sizes = [4096 if equal else int(2 ** draw.uniform(10, 20)) for _ in range(keys)]
    weights = [1 / (rank + 1) ** 0.9 for rank in range(keys)]
    return [TraceAccess(key, sizes[key], 1.0) for key in draw.choices(range(keys), weights, k=count)]


def test_store_without_namespaces_is_lru_for_equal_sizes() -> None:
    requests = alone(zipf(5000, 800, 3, equal=True))
    capacity = distinct_bytes(requests) // 10 // 4096 * 4096
    assert replay(requests, StoreReplay(capacity)).total == replay(requests, LRU(capacity)).total


def test_replay_hit_behind_gap_saves_nothing() -> None:
    class Holey:
        def serve(self, request: TraceRequest) -> list[bool]:
            return [True, False, True]

    accesses = tuple(TraceAccess(key, 10, 1.0) for key in range(3))
    prefix = replay([TraceRequest(0.0, "a", accesses, is_prefix=True)], Holey()).total
    apart = replay([TraceRequest(0.0, "a", accesses, is_prefix=False)], Holey()).total
    assert (prefix.hits, prefix.saved_s) == (2, 1.0)
    assert (apart.hits, apart.saved_s) == (2, 2.0)
