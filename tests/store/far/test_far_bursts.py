"""A burst of equal requests: far stores get one question, and every request gets its answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from cornplug.config import StoreConfig
from cornplug.store import payload
from cornplug.store.base import Tier
from cornplug.store.client import PoolStore
from cornplug.store.daemon.server import StoreServer
from cornplug.store.far import far_peer
from cornplug.testing.store import DEADLINE_S, key_of

from ..conftest import end_server, eventually
from ..disk.disk_stage import KIB, MIB, get, payload_of, put, tier_of
from .memory_far import MemoryFarStore, far_of, written

Connect = Callable[..., PoolStore]
Serve = Callable[..., StoreServer]


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> MemoryFarStore:
    """A far store that may take its time."""
    monkeypatch.setattr(far_peer, "LOOKUP_TIMEOUT_S", 30.0)
    return MemoryFarStore()


def answering(store: PoolStore) -> bool:
    return store.is_connected and store.is_far_up


@pytest.fixture
def second_host(
    far: MemoryFarStore, serve_in_thread: Serve, connect: Connect, store_config: StoreConfig
) -> Connect:
    """Makes clients of a daemon that does not know entry "a", which another one has written."""
    first, store = serve_in_thread(size_bytes=MIB, far=far.opened()), connect()
    eventually(lambda: answering(store))
    put(store, "a", KIB)
    eventually(lambda: written(store, 1))
    end_server(first, store_config.socket)
    eventually(lambda: not store.is_connected)
    serve_in_thread(size_bytes=MIB, far=far.opened())
    eventually(lambda: answering(store))
    far.questions.clear()
    return connect


def test_far_burst_of_readers_all_get_the_entry(
    far: MemoryFarStore, second_host: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "FAR_WAIT_S", 30.0)
    store, asked, hits = second_host(), threading.Semaphore(0), list[bytes | None]()
    eventually(lambda: answering(store))
    far.gate.clear()
    seek = store.start_far_lookup

    def counted(keys: list[bytes]) -> int:
        ticket = seek(keys)
        asked.release()
        return ticket

    monkeypatch.setattr(store, "start_far_lookup", counted)
    readers = [threading.Thread(target=lambda: hits.append(get(store, "a", recall_s=30.0))) for _ in range(8)]
    for reader in readers:
        reader.start()
    for _ in readers:
        assert asked.acquire(timeout=30)
    far.gate.set()
    for reader in readers:
        reader.join()
    assert hits == [payload_of("a", KIB)] * 8
    assert far.questions == [1]


def test_far_burst_of_two_engines_is_one_question(far: MemoryFarStore, second_host: Connect) -> None:
    first, second = second_host(), second_host()
    eventually(lambda: answering(first) and answering(second))
    far.gate.clear()
    ticket = first.start_far_lookup([key_of("a")])
    assert ticket
    assert first.start_far_lookup([key_of("a")]) == ticket
    eventually(lambda: far.questions == [1])
    other = second.start_far_lookup([key_of("a")])
    assert other not in (0, ticket)
    second.stat(deadline_s=DEADLINE_S)  # answered behind the question
    assert not first.is_far_lookup_done(ticket)
    far.gate.set()
    eventually(lambda: first.is_far_lookup_done(ticket) and second.is_far_lookup_done(other))
    assert [tier_of(one, "a") for one in (first, second)] == [Tier.DISK] * 2
    assert first.start_far_lookup([key_of("a")]) == 0, "it is answered"
    assert far.questions == [1]


def test_far_entry_lost_by_a_restart_is_written_again(
    far: MemoryFarStore, serve_in_thread: Serve, connect: Connect
) -> None:
    serve_in_thread(size_bytes=MIB, far=far.opened())
    store = connect()
    eventually(lambda: answering(store))
    put(store, "read", 100 * KIB)
    put(store, "evicted", 100 * KIB)
    eventually(lambda: written(store, 2))
    far.failing.add("exists")
    store.start_far_lookup([key_of("other")])
    eventually(lambda: not store.is_far_up)
    far.records.clear()
    far.failing.clear()
    eventually(lambda: answering(store))
    assert get(store, "read") == payload_of("read", 100 * KIB)
    eventually(lambda: len(far.records) == 1)
    put(store, "large", 900 * KIB)
    assert tier_of(store, "evicted") == Tier.ABSENT, "it is not shown before the far store is asked for it"


def test_far_entry_evicted_there_is_written_again_once_it_is_read(
    far: MemoryFarStore, serve_in_thread: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_in_thread(size_bytes=MIB, far=far.opened())
    store = connect()
    eventually(lambda: answering(store))
    put(store, "a", KIB)
    eventually(lambda: written(store, 1))
    far.records.clear()
    get(store, "a")
    store.stat(deadline_s=DEADLINE_S)  # counts the read
    assert far_of(store).writes == {"written": 1}, "it was written a moment ago"
    monkeypatch.setattr(far_peer, "CONFIRM_INTERVAL_S", 0.0)
    get(store, "a")
    eventually(lambda: written(store, 2))
    assert len(far.records) == 1
