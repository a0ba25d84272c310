"""A far store that fails one kind of call: the other kinds go on, and what failed is tried again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cornplug.store.base import PurgeRule, Tier
from cornplug.store.client import PoolStore
from cornplug.store.daemon.server import StoreServer
from cornplug.testing.store import DEADLINE_S, key_of

from ..conftest import eventually
from ..disk.disk_stage import KIB, MIB, get, payload_of, put, tier_of
from .memory_far import MemoryFarStore, far_of, written

Connect = Callable[..., PoolStore]
Serve = Callable[..., StoreServer]


@pytest.fixture
def far() -> MemoryFarStore:
    return MemoryFarStore()


@pytest.fixture
def store(far: MemoryFarStore, serve_in_thread: Serve, connect: Connect) -> PoolStore:
    """A client of a daemon with 1 MiB of memory."""
    serve_in_thread(size_bytes=MIB, far=far.opened())
    store = connect()
    eventually(lambda: store.is_connected and store.is_far_up)
    return store


def put_and_evict(store: PoolStore) -> None:
    """Leave entry "a" in the far store only."""
    put(store, "a", 100 * KIB)
    eventually(lambda: written(store, 1))
    put(store, "large", 1000 * KIB)
    eventually(lambda: written(store, 2))
    assert tier_of(store, "a") == Tier.DISK


def test_far_failed_write_does_not_close_reads(far: MemoryFarStore, store: PoolStore) -> None:
    put_and_evict(store)
    far.failing.add("put")
    put(store, "b", KIB)
    eventually(lambda: far_of(store).writes.get("error", 0) == 1)
    assert tier_of(store, "a") == Tier.DISK
    assert far_of(store).answers
    assert get(store, "a") == payload_of("a", 100 * KIB)


def test_far_failed_write_is_tried_again(far: MemoryFarStore, store: PoolStore) -> None:
    far.fail_once.add("put")
    put(store, "a", KIB)
    eventually(lambda: written(store, 1))
    assert far_of(store).writes == {"error": 1, "written": 1}


def test_far_failed_delete_does_not_close_reads(far: MemoryFarStore, store: PoolStore) -> None:
    put_and_evict(store)
    far.failing.add("delete")
    put(store, "b", KIB)
    eventually(lambda: written(store, 3))
    store.delete([key_of("b")], deadline_s=DEADLINE_S)
    eventually(lambda: far.failures["delete"] > 0)
    put(store, "c", KIB)
    eventually(lambda: written(store, 4))
    assert tier_of(store, "a") == Tier.DISK
    assert get(store, "a") == payload_of("a", 100 * KIB)


def test_far_purge_deletes_records_after_a_failed_call(far: MemoryFarStore, store: PoolStore) -> None:
    for name in range(70):
        put(store, name, 100)
    eventually(lambda: written(store, 70))
    far.fail_once.add("delete")
    assert store.purge(PurgeRule(app="chat"), deadline_s=DEADLINE_S).entries == 70
    eventually(lambda: not far.records, within_s=20)
    assert far.failures["delete"] == 1


def test_far_late_delete_spares_the_entry_written_since(far: MemoryFarStore, store: PoolStore) -> None:
    put(store, "a", KIB)
    put(store, "b", KIB)
    eventually(lambda: written(store, 2))
    far.failing.add("delete")
    store.delete([key_of("a"), key_of("b")], deadline_s=DEADLINE_S)
    eventually(lambda: far.failures["delete"] > 0)
    put(store, "a", KIB)
    eventually(lambda: written(store, 3))
    far.failing.clear()
    eventually(lambda: len(far.records) == 1, within_s=20)
    put(store, "large", 1020 * KIB)
    eventually(lambda: written(store, 4))
    assert get(store, "a") == payload_of("a", KIB)
