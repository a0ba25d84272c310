"""Reference policies against libCacheSim's, the optimum against exhaustive search, the store against LRU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cornplug.replay.reference_policies import REFERENCES, LRUCache, offline_optimum
from cornplug.replay.scores import StoreReplay, replay
from cornplug.replay.trace_readers import TraceAccess, TraceRequest, distinct_bytes


def alone(accesses: Sequence[TraceAccess]) -> list[TraceRequest]:
    return [TraceRequest(0.0, "default", (access,), is_prefix=False) for access in accesses]


def zipf(count: int, keys: int, seed: int, *, equal: bool) -> list[TraceAccess]:
    draw = random.Random(seed)
    sizes = [4096 if equal else int(2 ** draw.uniform(10, 20)) for _ in range(keys)]
    weights = [1 / (rank + 1) ** 0.9 for rank in range(keys)]
    return [TraceAccess(key, sizes[key], 1.0) for key in draw.choices(range(keys), weights, k=count)]


@pytest.mark.parametrize("equal", [True, False], ids=["equal sizes", "1 KiB to 1 MiB"])
@pytest.mark.parametrize("part", [0.02, 0.1, 0.4])
@pytest.mark.parametrize(
    ("ours", "theirs"), [("LRU", "LRU"), ("FIFO", "FIFO"), ("SIEVE", "Sieve"), ("GDSF", "GDSF")]
)
def test_replay_reference_policy_misses_as_libcachesim(
    ours: str, theirs: str, part: float, equal: bool
) -> None:
    libcachesim = pytest.importorskip("libcachesim")
    accesses = zipf(6000, 800, 7, equal=equal)
    requests = alone(accesses)
    capacity = int(distinct_bytes(requests) * part)
    cache, hits = getattr(libcachesim, theirs)(cache_size=capacity), 0
    for access in accesses:
        request = libcachesim.Request()
        request.obj_id, request.obj_size = access.key, access.size_bytes
        hits += bool(cache.get(request))
    mine = replay(requests, REFERENCES[ours](capacity)).total.hit_rate
    assert 0 < mine < 1
    assert mine == pytest.approx(hits / len(accesses), abs=1e-12)


SMALL = st.lists(st.integers(0, 4), min_size=1, max_size=9)


@settings(max_examples=60)
@given(SMALL, st.integers(1, 3))
def test_offline_optimum_equal_sizes_is_best_of_all_choices(keys: list[int], slots: int) -> None:
    accesses = [TraceAccess(key, 10, 2.0) for key in keys]
    found = offline_optimum(accesses, slots * 10)
    assert found.name == "optimum (Belady)"
    assert found.hits == _best_hits(keys, slots)
    assert found.saved_s == 2.0 * found.hits


def _best_hits(keys: Sequence[int], slots: int) -> int:
    """By trying every set of entries that may be kept after each access."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for key in keys:
        following: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            now = hits + (key in held)
            may = held | {key}
            for count in range(min(slots, len(may)) + 1):
                for kept in map(frozenset, itertools.combinations(may, count)):
                    following[kept] = max(following.get(kept, 0), now)
        states = following
    return max(states.values())


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=2, max_size=60), st.integers(1, 40))
def test_offline_optimum_mixed_sizes_exceeds_each_policy(
    drawn: list[tuple[int, bool]], capacity: int
) -> None:
    """Of entries of several sizes."""
    accesses = [TraceAccess(key, key % 7 + 1, key / 3 + 0.1) for key, _ in drawn]
    bound = offline_optimum(accesses, capacity)
    for cache in REFERENCES.values():
        total = replay(alone(accesses), cache(capacity)).total
        assert total.hits <= bound.hits + 1e-9
        assert total.saved_s <= bound.saved_s + 1e-9


def test_store_without_namespaces_is_lru_for_equal_sizes() -> None:
    requests = alone(zipf(5000, 800, 3, equal=True))
    capacity = distinct_bytes(requests) // 10 // 4096 * 4096
    assert replay(requests, StoreReplay(capacity)).total == replay(requests, LRUCache(capacity)).total


def test_replay_hit_behind_gap_saves_nothing() -> None:
    class Holey:
        def serve(self, request: TraceRequest) -> list[bool]:
            return [True, False, True]

    accesses = tuple(TraceAccess(key, 10, 1.0) for key in range(3))
    prefix = replay([TraceRequest(0.0, "a", accesses, is_prefix=True)], Holey()).total
    apart = replay([TraceRequest(0.0, "a", accesses, is_prefix=False)], Holey()).total
    assert (prefix.hits, prefix.saved_s) == (2, 1.0)
    assert (apart.hits, apart.saved_s) == (2, 2.0)
