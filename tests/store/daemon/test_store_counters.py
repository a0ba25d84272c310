"""Counts by namespace, from what an index was asked."""

from __future__ import annotations

from cornplug.settings import NamespaceConfig
from cornplug.store.base import Reservation, ReserveTerms
from cornplug.store.daemon.index import StoreIndex
from cornplug.store.daemon.reservations import ReservationTimes
from cornplug.store.daemon.store_counters import TimeHistogram
from cornplug.store.entry_table import NotedReads
from cornplug.testing.store import key_of


def put(index: StoreIndex, name: object, app: str, now_s: float, size_bytes: int = 64) -> None:
    (room,) = index.reserve(1, [(key_of(name), size_bytes)], ReserveTerms(app), now_s=now_s)
    assert isinstance(room, Reservation), room
    assert index.commit(1, room.token, b"")


def made(capacity_bytes: int = 1 << 20, **namespaces: NamespaceConfig) -> StoreIndex:
    return StoreIndex(
        b"\1" * 16,
        capacity_bytes,
        times=ReservationTimes(0.0),
        grow=lambda missing: missing,
        namespaces=namespaces,
    )


def test_time_histogram_sorts_samples_into_buckets() -> None:
    times = TimeHistogram((1.0, 5.0))
    for seconds in (0.5, 1.0, 1.5, 7.0):
        times.observe(seconds)
    assert times.copy() == ((2, 1, 1), 10.0)


def test_counters_go_to_the_namespace_of_an_entrys_app() -> None:
    index = made(chat=NamespaceConfig(apps=("chat", "agents")), short=NamespaceConfig(ttl_s=5.0))
    for name, app in ((1, "chat"), (2, "agents"), (3, "other"), (4, "short")):
        put(index, name, app, 0.0)
    assert index.reserve(1, [(key_of(1), 64), (key_of(9), 2 << 20)], ReserveTerms("chat"), now_s=0.0)
    index.lease(2, [key_of(n) for n in (1, 2, 3, 8)], ttl_s=1.0, now_s=0.0)
    index.sweep(6.0)
    index.delete([key_of(2)])
    stat = index.stat()
    chat, default, short = (stat.namespaces[name] for name in ("chat", "default", "short"))
    assert (chat.entries, chat.hits, chat.removals) == (1, 2, {"deleted": 1})
    assert chat.reservations == {"given": 2, "present": 1, "too_large": 1}
    assert (default.entries, default.hits, default.used_bytes) == (1, 1, 64)
    assert (short.entries, short.removals) == (0, {"expired": 1})
    assert (stat.hits, stat.misses, stat.refusals) == (3, 1, 1)


def test_counters_evicted_entries_age_is_since_their_last_use() -> None:
    index = made(128)
    put(index, "read", "a", 0.0)
    put(index, "idle", "a", 2.0)
    (token,) = index.lease(2, [key_of("read")], ttl_s=60.0, now_s=90.0).unique_tokens
    index.sweep(100.0)
    index.release(2, [token], now_s=100.0)
    put(index, "new", "a", 110.0)
    put(index, "newer", "a", 110.0)
    counts, sum_s = index.counters.namespaces["default"].eviction_ages.copy()
    assert (sum(counts), sum_s) == (2, 108.0 + 10.0)
    assert index.stat().namespaces["default"].removals == {"evicted": 2}


def test_counters_noted_reads_of_gone_entries_have_no_namespace() -> None:
    index = made()
    index.count_reads(NotedReads(3, 1, [1, 2], found=5, absent=2))
    stat = index.stat()
    assert (stat.hits, stat.misses, stat.found, stat.absent) == (3, 1, 5, 2)
    assert stat.namespaces["default"].hits == 0


def test_counters_growing_and_pending_are_no_refusals() -> None:
    index = StoreIndex(b"\1" * 16, 1 << 20, times=ReservationTimes(0.0), grow=lambda missing: None)
    index.reserve(1, [(key_of(1), 64)], ReserveTerms("a"), now_s=0.0)
    stat = index.stat()
    assert (stat.namespaces["default"].reservations, stat.refusals) == ({"growing": 1}, 0)
