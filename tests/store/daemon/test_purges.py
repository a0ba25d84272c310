"""Purges: which entries go, in portions, and what becomes of readers and writers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cornplug.store.base import PurgeCount, PurgeRule, Reservation, ReserveTerms
from cornplug.store.client import PoolStore
from cornplug.store.daemon import purges
from cornplug.store.daemon.index import StoreIndex
from cornplug.store.daemon.reservations import ReservationTimes
from cornplug.store.daemon.server import StoreServer
from cornplug.testing.store import DEADLINE_S, contains, fill, key_of, lease

OWNER, READER = 1, 2
Connect = Callable[..., PoolStore]
Serve = Callable[..., StoreServer]


@pytest.fixture
def index() -> StoreIndex:
    return StoreIndex(b"\1" * 16, 1 << 20, times=ReservationTimes(0.0), grow=lambda missing: missing)


def put(index: StoreIndex, *names: object, app: str = "a", now_s: float = 0.0) -> None:
    for room in index.reserve(OWNER, [(key_of(name), 64) for name in names], ReserveTerms(app), now_s=now_s):
        assert isinstance(room, Reservation)
        assert index.commit(OWNER, room.token, b"meta")


def purge(index: StoreIndex, rule: PurgeRule, now_s: float = 0.0) -> PurgeCount:
    count, more = index.purges.purge_batch(OWNER, rule, begins=True, now_s=now_s)
    assert not more
    return count


def there(index: StoreIndex, *names: object) -> bytes:
    return index.contains([key_of(name) for name in names])


def test_purge_of_an_app_ends_its_entries_only(index: StoreIndex) -> None:
    put(index, 1, 2, app="a")
    put(index, 3, app="b")
    assert purge(index, PurgeRule(app="a")) == PurgeCount(2, 128, 0, 0)
    assert there(index, 1, 2, 3) == b"\0\0\1"
    stat = index.stat()
    assert (stat.used_bytes, stat.bytes_by_app) == (64, {"b": 64})
    assert stat.namespaces["default"].removals == {"purged": 2}


def test_purge_of_all_ends_every_entry(index: StoreIndex) -> None:
    put(index, 1, app="a")
    put(index, 2, app="b")
    assert purge(index, PurgeRule()).entries == 2
    assert (index.stat().entries, index.stat().used_bytes) == (0, 0)


def test_purge_by_age_goes_by_writing_and_by_use(index: StoreIndex) -> None:
    put(index, "old", now_s=0.0)
    put(index, "read", now_s=0.0)
    put(index, "new", now_s=50.0)
    index.lease(READER, [key_of("read")], ttl_s=5.0, now_s=90.0)
    index.sweep(96.0)
    assert purge(index, PurgeRule(unused_s=100.0), now_s=101.0).entries == 1
    assert there(index, "old", "read", "new") == b"\0\1\1"
    assert purge(index, PurgeRule(older_s=60.0), now_s=101.0).entries == 1
    assert there(index, "old", "read", "new") == b"\0\0\1"
    assert purge(index, PurgeRule(app="b", older_s=1.0), now_s=101.0).entries == 0


def test_purge_entry_in_use_counts_as_used_now(index: StoreIndex) -> None:
    put(index, 1)
    index.lease(READER, [key_of(1)], ttl_s=900.0, now_s=10.0)
    assert purge(index, PurgeRule(unused_s=100.0), now_s=500.0).entries == 0


def test_purge_leased_entry_is_absent_at_once_and_its_room_free_at_the_end(index: StoreIndex) -> None:
    put(index, 1)
    (token,) = index.lease(READER, [key_of(1)], ttl_s=60.0, now_s=0.0).unique_tokens
    assert purge(index, PurgeRule(app="a")) == PurgeCount(1, 64, 1, 0)
    assert (there(index, 1), index.stat().used_bytes) == (b"\0", 64)
    index.release(READER, [token], now_s=1.0)
    assert index.stat().used_bytes == 0


def test_purge_ends_reservations_of_the_app_unless_it_is_about_age(index: StoreIndex) -> None:
    (mine,) = index.reserve(OWNER, [(key_of(1), 64)], ReserveTerms("a"), now_s=0.0)
    (other,) = index.reserve(OWNER, [(key_of(2), 64)], ReserveTerms("b"), now_s=0.0)
    assert isinstance(mine, Reservation)
    assert isinstance(other, Reservation)
    assert purge(index, PurgeRule(app="a", older_s=0.1)).writing == 0
    assert purge(index, PurgeRule(app="a")) == PurgeCount(0, 0, 0, 1)
    assert not index.commit(OWNER, mine.token, b"meta")
    assert index.commit(OWNER, other.token, b"meta")
    assert there(index, 1, 2) == b"\0\1"


def test_purge_dry_run_counts_and_changes_nothing(index: StoreIndex) -> None:
    put(index, 1)
    (room,) = index.reserve(OWNER, [(key_of(2), 64)], ReserveTerms("a"), now_s=0.0)
    assert isinstance(room, Reservation)
    assert purge(index, PurgeRule(dry_run=True)) == PurgeCount(1, 64, 0, 1)
    assert there(index, 1) == b"\1"
    assert index.commit(OWNER, room.token, b"meta")


def test_purge_in_portions_ends_what_was_there_when_it_began(
    index: StoreIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purges, "BATCH_ENTRIES", 10)
    put(index, *range(25))
    counts, more = [], True
    while more:
        count, more = index.purges.purge_batch(OWNER, PurgeRule(), begins=not counts, now_s=0.0)
        counts.append(count.entries)
        index.delete([key_of(0)])
        put(index, f"later {len(counts)}")
    assert (counts, index.stat().entries) == ([10, 10, 4], 3)


def test_purge_of_a_gone_client_is_forgotten(index: StoreIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purges, "BATCH_ENTRIES", 1)
    put(index, 1, 2, 3)
    assert index.purges.purge_batch(READER, PurgeRule(), begins=True, now_s=0.0)[1]
    assert index.end_owner(READER, now_s=0.0)
    assert index.purges.purge_batch(READER, PurgeRule(), begins=False, now_s=0.0) == (
        PurgeCount(0, 0, 0, 0),
        False,
    )


def test_purge_by_a_client_ends_thousands_and_keeps_the_others(
    serve_in_thread: Serve, connect: Connect
) -> None:
    serve_in_thread()
    store, other = connect(), connect()
    for at in range(0, 3000, 500):
        rooms = store.reserve(
            [(key_of(n), 64) for n in range(at, at + 500)], ReserveTerms("a"), deadline_s=DEADLINE_S
        )
        written = [(room, b"meta") for room in rooms if isinstance(room, Reservation)]
        assert store.commit(written, deadline_s=DEADLINE_S) == [True] * 500
    fill(other, "kept", b"x", app="b")
    held = lease(other, 7)
    assert held is not None
    count = store.purge(PurgeRule(app="a"), deadline_s=DEADLINE_S)
    assert count == PurgeCount(3000, 3000 * 64, 1, 0)
    assert contains(other, 7, 2999, "kept") == b"\0\0\1"
    assert bytes(other.view(held.location)) == bytes(64)
    stat = other.stat(deadline_s=DEADLINE_S)
    assert (stat.entries, stat.bytes_by_app["a"]) == (1, 64)


@pytest.mark.parametrize(
    "rule", [PurgeRule(app="x" * 300), PurgeRule(older_s=float("nan")), PurgeRule(unused_s=-1.0)]
)
def test_purge_rule_that_is_none_is_refused_on_both_sides(
    serve_in_thread: Serve, connect: Connect, index: StoreIndex, rule: PurgeRule
) -> None:
    serve_in_thread()
    with pytest.raises(ValueError, match=r"app|age"):
        connect().purge(rule, deadline_s=DEADLINE_S)
    with pytest.raises(ValueError, match=r"app|age"):
        index.purges.purge_batch(OWNER, rule, begins=True, now_s=0.0)
