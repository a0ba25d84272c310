"""Entries that come back from disk into memory."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable

import pytest

from cornplug.store.base import PROMOTED, Reservation, ReserveRefusal, Tier
from cornplug.store.client import PoolStore
from cornplug.store.daemon.server import StoreServer
from cornplug.store.disk.segment_files import OpenedDisk
from cornplug.store.payload import recall_and_wait
from cornplug.testing.store import fill, key_of, lease, reserve

from ..conftest import eventually
from .disk_stage import KIB, MIB, disk_of, payload_of, put, tier_of, written

Serve = Callable[..., StoreServer]
Connect = Callable[..., PoolStore]
Start = Callable[..., "subprocess.Popen[str]"]


def test_promotions_evicted_entry_comes_back_with_its_cost_and_app(
    serve_in_thread: Serve, connect: Connect, disk: OpenedDisk
) -> None:
    serve_in_thread(size_bytes=MIB, disk=disk)
    store = connect()
    for name in range(8):
        put(store, name, 256 * KIB)
        eventually(lambda n=name: written(store, n + 1))  # type: ignore[misc]
    assert tier_of(store, 0) == Tier.DISK
    assert tier_of(store, 7) == Tier.MEMORY
    assert lease(store, 0) is None, "to leases it is absent until it is recalled"
    tiers = recall_and_wait(store, [key_of(0), key_of(7), key_of("none")], within_s=5, deadline_s=5)
    assert tiers == bytes([Tier.MEMORY, Tier.MEMORY, Tier.ABSENT])
    found = lease(store, 0)
    assert found is not None
    assert bytes(store.view(found.location)) == payload_of(0, 256 * KIB)
    assert found.location.generation & PROMOTED
    fresh = reserve(store, "fresh", 8)
    assert isinstance(fresh, Reservation)
    assert not fresh.location.generation & PROMOTED
    stat = store.stat(deadline_s=5)
    assert stat.bytes_by_app["chat"] > 0
    assert stat.namespaces["default"].reservations == {"given": 9}, "no writer asked for the recall"
    assert stat.disk is not None
    assert stat.disk.writes == {"written": 8}


def test_promotions_recall_of_more_than_fits_is_bounded(
    serve_in_thread: Serve, connect: Connect, disk: OpenedDisk
) -> None:
    serve_in_thread(size_bytes=MIB, disk=disk)
    store = connect()
    for name in range(24):
        put(store, name, 100 * KIB)
        eventually(lambda n=name: written(store, n + 1))  # type: ignore[misc]
    store.recall([key_of(name) for name in range(10)])
    eventually(lambda: tier_of(store, 0) == tier_of(store, 1) == Tier.MEMORY)
    stat = disk_of(store)
    assert stat.reads["refused"] == 1
    assert stat.reads["read"] == 2, "a quarter of the memory"


def test_promotions_recall_without_room_leaves_it_on_disk(
    serve_in_thread: Serve, connect: Connect, disk: OpenedDisk
) -> None:
    serve_in_thread(size_bytes=MIB, disk=disk)
    store, other = connect(), connect()
    for name in range(5):
        put(store, name, 250 * KIB)
        eventually(lambda n=name: written(store, n + 1))  # type: ignore[misc]
    holds = [lease(store, 1), lease(store, 2), lease(other, 3), lease(other, 4)]
    assert None not in holds
    assert recall_and_wait(store, [key_of(0)], within_s=0.3, deadline_s=5) == bytes([Tier.DISK])
    assert disk_of(store).reads == {"full": 1}


def test_promotions_writer_and_recall_of_one_key_do_not_collide(
    serve_in_thread: Serve, connect: Connect, disk: OpenedDisk
) -> None:
    serve_in_thread(size_bytes=MIB, disk=disk)
    store = connect()
    for name in range(5):
        put(store, name, 250 * KIB)
        eventually(lambda n=name: written(store, n + 1))  # type: ignore[misc]
    assert tier_of(store, 0) == Tier.DISK
    room = reserve(store, 0, 250 * KIB)
    assert isinstance(room, Reservation)
    store.recall([key_of(0)])
    eventually(lambda: disk_of(store).reads == {"pending": 1})
    store.view(room.location, writable=True)[:] = payload_of(0, 250 * KIB)
    assert store.commit([(room, b"meta")], deadline_s=5) == [True]
    assert tier_of(store, 0) == Tier.MEMORY
    assert reserve(store, 0, 250 * KIB) == ReserveRefusal.PRESENT
    assert disk_of(store).entries == 5, "its record was there"


def test_promotions_entry_deleted_while_it_is_recalled_stays_deleted(
    serve_in_thread: Serve, connect: Connect, disk: OpenedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = type(disk.files).read

    began, go = threading.Event(), threading.Event()

    def slow(*args: object, **kwargs: object) -> object:
        began.set()
        go.wait(60)
        return read(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(type(disk.files), "read", slow)
    serve_in_thread(size_bytes=MIB, disk=disk)
    store = connect()
    for name in range(5):
        put(store, name, 250 * KIB)
        eventually(lambda n=name: written(store, n + 1))  # type: ignore[misc]
    store.recall([key_of(0)])
    assert began.wait(60)
    assert store.delete([key_of(0)], deadline_s=5) == 1
    go.set()
    eventually(lambda: disk_of(store).reads == {"late": 1})
    assert tier_of(store, 0) == Tier.ABSENT


def test_promotions_store_without_disk_offers_no_tiers(serve_in_thread: Serve, connect: Connect) -> None:
    serve_in_thread(size_bytes=MIB)
    store = connect()
    fill(store, "a", b"x")
    assert not store.has_disk
    assert store.tiers([key_of("a"), key_of("b")], deadline_s=5) == bytes([Tier.MEMORY, Tier.ABSENT])
    store.recall([key_of("b")])
    assert store.stat(deadline_s=5).disk is None
