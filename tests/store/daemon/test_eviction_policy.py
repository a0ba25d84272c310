"""Namespaces of a full store: shares, ceilings, priorities, times to live, pins, costs, and order."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cornplug.config import NamespaceConfig
from cornplug.store.base import Reservation, ReserveRefusal, ReserveTerms
from cornplug.store.daemon.eviction_policy import EvictionPolicy
from cornplug.store.daemon.index import StoreIndex
from cornplug.store.daemon.reservations import ReservationTimes
from cornplug.testing.store import key_of

ROOM = 64
GUARANTEED = {"a": NamespaceConfig(share=0.3), "c": NamespaceConfig(share=0.5)}


def make_index(rooms: int, **namespaces: NamespaceConfig) -> StoreIndex:
    return StoreIndex(
        b"\1" * 16,
        rooms * ROOM,
        times=ReservationTimes(1.0),
        grow=lambda missing: missing,
        namespaces=namespaces,
    )


def put(
    index: StoreIndex, name: object, app: str, *, size: int = ROOM, cost_s: float = 0.0, now_s: float = 0.0
) -> ReserveRefusal | None:
    (room,) = index.reserve(1, [(key_of(name), size)], ReserveTerms(app, cost_s=cost_s), now_s=now_s)
    if isinstance(room, ReserveRefusal):
        return room
    assert index.commit(1, room.token, b"")
    return None


def present(index: StoreIndex, names: list[object]) -> list[object]:
    mask = index.contains([key_of(name) for name in names])
    return [name for name, is_there in zip(names, mask, strict=True) if is_there]


def counts(index: StoreIndex) -> dict[str, int]:
    return {app: size // ROOM for app, size in index.stat().bytes_by_app.items()}


def read(index: StoreIndex, names: list[object]) -> None:
    leases = index.lease(1, [key_of(name) for name in names], ttl_s=9.0, now_s=0.0)
    index.release(1, sorted({lease.token for lease in leases if lease}), now_s=0.0)


def test_policy_without_namespaces_evicts_oldest_of_all_apps() -> None:
    index = make_index(4)
    for i, app in enumerate("abca"):
        put(index, i, app)
    put(index, "new", "b", cost_s=9.0)
    assert present(index, [0, 1, 2, 3, "new"]) == [1, 2, 3, "new"]


def test_policy_idle_share_is_lent_and_taken_back() -> None:
    index = make_index(10, **GUARANTEED)
    for i in range(30):
        assert put(index, ("scan", i), "other") is None
    assert counts(index) == {"other": 10}, "idle shares are lent"
    for i in range(5):
        put(index, ("c", i), "c")
    assert counts(index) == {"other": 5, "c": 5}
    for i in range(30, 60):
        put(index, ("scan", i), "other")
    assert counts(index) == {"other": 5, "c": 5}
    assert present(index, [("c", i) for i in range(5)]) == [("c", i) for i in range(5)]


def test_policy_lent_room_goes_to_the_dearer_bytes() -> None:
    namespaces = {"dear": NamespaceConfig(), "cheap": NamespaceConfig()}
    index = make_index(40, **namespaces)
    for i in range(400):
        put(index, ("dear", i), "dear", cost_s=3.0)
        put(index, ("cheap", i), "cheap", cost_s=1.0)
    assert counts(index) == {"dear": 30, "cheap": 10}


def test_policy_lowest_priority_loses_first() -> None:
    index = make_index(8, high=NamespaceConfig(priority=1), low=NamespaceConfig(priority=-1))
    for i in range(4):
        put(index, ("low", i), "low", cost_s=100.0)
        put(index, ("high", i), "high", cost_s=1e-6)
    for i in range(4, 8):
        put(index, ("high", i), "high", cost_s=1e-6)
    assert counts(index) == {"high": 8}
    put(index, "late", "low")
    assert counts(index) == {"high": 7, "low": 1}, "nothing of low is left to evict"
    put(index, "later", "low")
    assert counts(index) == {"high": 7, "low": 1}


def test_policy_ceiling_evicts_own_entries_while_room_is_free() -> None:
    index = make_index(10, docs=NamespaceConfig(ceiling=0.3))
    put(index, "other", "other")
    for i in range(6):
        assert put(index, i, "docs") is None
    assert counts(index) == {"docs": 3, "other": 1}
    assert present(index, list(range(6))) == [3, 4, 5]


def test_policy_ceiling_of_mixed_sizes_evicts_own_entries_only() -> None:
    index, chance = make_index(1024, crawl=NamespaceConfig(ceiling=0.4)), random.Random(5)
    for i in range(500):
        put(index, ("chat", i), "chat", size=ROOM * chance.choice([1, 2, 3]))
        put(index, ("crawl", i), "crawl", size=ROOM * chance.choice([1, 4, 9]))
    chat = [("chat", i) for i in range(500)]
    before = present(index, chat)
    outcomes = [
        put(index, ("crawl", i), "crawl", size=ROOM * chance.choice([1, 4, 9, 16])) for i in range(500, 1000)
    ]
    assert present(index, chat) == before
    assert outcomes.count(None) > 450
    assert counts(index)["crawl"] <= 0.4 * 1024


def test_policy_ceiling_without_a_run_of_own_entries_refuses_and_evicts_nothing() -> None:
    index = make_index(8, crawl=NamespaceConfig(ceiling=0.5))
    for i in range(4):
        put(index, ("crawl", i), "crawl")
        put(index, ("chat", i), "chat")
    names = [(app, i) for i in range(4) for app in ("crawl", "chat")]
    assert put(index, "large", "crawl", size=2 * ROOM) is ReserveRefusal.FULL
    assert present(index, names) == names
    assert put(index, "small", "crawl") is None
    assert present(index, names) == names[1:]


def test_policy_ceiling_of_leased_entries_refuses_and_evicts_nothing() -> None:
    index = make_index(10, docs=NamespaceConfig(ceiling=0.3))
    for i in range(3):
        put(index, i, "docs")
    index.lease(2, [key_of(0), key_of(1)], ttl_s=9.0, now_s=0.0)
    assert put(index, "large", "docs", size=2 * ROOM) is ReserveRefusal.FULL
    assert present(index, [0, 1, 2]) == [0, 1, 2]
    assert put(index, "small", "docs") is None
    assert present(index, [0, 1, 2]) == [0, 1]


def test_policy_pinned_entries_stay_until_deleted() -> None:
    index = make_index(10, rules=NamespaceConfig(pinned=True, ceiling=0.2))
    assert [put(index, ("pin", i), "rules") for i in range(3)] == [None, None, ReserveRefusal.FULL]
    for i in range(50):
        put(index, i, "other")
    assert counts(index) == {"rules": 2, "other": 8}
    index.delete([key_of(("pin", 0))])
    assert put(index, ("pin", 3), "rules") is None
    assert present(index, [("pin", i) for i in range(4)]) == [("pin", 1), ("pin", 3)]


def test_policy_time_to_live_counts_from_writing() -> None:
    index = make_index(10, brief=NamespaceConfig(ttl_s=60.0))
    put(index, "a", "brief", now_s=0.0)
    put(index, "b", "brief", now_s=30.0)
    put(index, "stays", "other", now_s=0.0)
    held = index.lease(1, [key_of("a")], ttl_s=999.0, now_s=59.0)
    assert held.tokens[0]
    index.sweep(61.0)
    assert present(index, ["a", "b", "stays"]) == ["b", "stays"]
    assert counts(index) == {"brief": 2, "other": 1}, "a reader's bytes stay"
    index.release(1, held.tokens, now_s=61.0)
    assert counts(index) == {"brief": 1, "other": 1}
    index.sweep(1e6)
    assert present(index, ["b", "stays"]) == ["stays"]


def test_policy_deleted_entry_leaves_no_time_to_live() -> None:
    index = make_index(10, brief=NamespaceConfig(ttl_s=60.0))
    put(index, "a", "brief")
    index.delete([key_of("a")])
    put(index, "a", "brief", now_s=50.0)
    index.sweep(70.0)
    assert present(index, ["a"]) == ["a"]


def test_policy_prefix_loses_its_tail_before_its_head() -> None:
    index = make_index(8)
    for i in range(8):
        put(index, i, "chat")
    read(index, list(range(8)))
    for i in range(3):
        put(index, ("new", i), "chat")
    assert present(index, list(range(8))) == [0, 1, 2, 3, 4]


def test_policy_apps_of_a_namespace_count_together() -> None:
    index = make_index(10, team=NamespaceConfig(apps=("x", "y"), share=0.4))
    for i in range(4):
        put(index, i, "xy"[i % 2])
    for i in range(40):
        put(index, ("scan", i), "team")  # the name is no app of it
    assert counts(index) == {"team": 6, "x": 2, "y": 2}


def test_policy_right_to_room_reaches_over_scattered_shares() -> None:
    index = make_index(12, small=NamespaceConfig(share=0.5), large=NamespaceConfig(share=0.4))
    for i in range(6):
        put(index, ("small", i), "small")
        put(index, ("other", i), "other")
    assert put(index, "over", "other", size=4 * ROOM) is ReserveRefusal.FULL, "lent room only"
    assert counts(index) == {"small": 6, "other": 6}
    assert put(index, "big", "large", size=4 * ROOM) is None
    assert counts(index)["large"] == 4


@dataclass(eq=False)
class _Entry:
    key: bytes
    app: str
    aligned_bytes: int
    cost_s: float


APPS = st.sampled_from(["a", "c", "scan"])


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(APPS, st.integers(1, 5), st.sampled_from([0.0, 0.1, 7.0]), st.booleans()), max_size=150
    )
)
def test_policy_takes_nothing_of_anothers_share(
    writes: list[tuple[str, int, float, bool]],
) -> None:
    """By bytes alone, as without places, for entries of any size and cost."""
    capacity = 40
    policy: EvictionPolicy[_Entry] = EvictionPolicy(capacity, GUARANTEED)
    held: dict[bytes, _Entry] = {}

    def used(app: str) -> int:
        return sum(entry.aligned_bytes for entry in held.values() if entry.app == app)

    for number, (app, room, cost_s, is_read) in enumerate(writes):
        before = {each: used(each) for each in "ac"}
        fits = True
        while fits and sum(entry.aligned_bytes for entry in held.values()) + room > capacity:
            victim = next(iter(policy.search_victims(app, room)), None)
            fits = victim is not None
            if victim is not None:
                policy.remove(held.pop(victim.key))
                policy.charge(victim.app, -victim.aligned_bytes)
        for each in "ac":
            share = GUARANTEED[each].share * capacity
            assert each == app or used(each) >= min(before[each], share)
        assert fits or not used(app), "a writer gives up its own entries before it is refused"
        if not fits:
            continue
        entry = _Entry(key_of(number), app, room, cost_s)
        policy.charge(app, room)
        policy.add(entry, now_s=0.0)
        held[entry.key] = entry
        if is_read:
            policy.touch(next(iter(held.values())))
        assert {each: policy.used_bytes(each) for each in ("a", "c", "default")} == {
            "a": used("a"), "c": used("c"), "default": used("scan"),
        }  # fmt: skip


@pytest.mark.parametrize("app", ["a", "c"])
def test_policy_share_is_kept_in_the_index_against_any_others(app: str) -> None:
    """Equal sizes, as of KV pages: every place serves."""
    index = make_index(100, **GUARANTEED)
    share = int(GUARANTEED[app].share * 100)
    for i in range(share):
        put(index, (app, i), app)
    for i in range(1000):
        put(index, ("noise", i), ["other", "a", "c"][i % 3])
        mine = counts(index)[app]
        assert mine >= share
    for i in range(share):
        assert isinstance(
            index.reserve(1, [(key_of((app, "again", i)), ROOM)], ReserveTerms(app), now_s=0.0)[0],
            Reservation,
        )
