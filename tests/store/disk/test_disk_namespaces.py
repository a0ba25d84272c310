"""Shares, pins and ceilings of namespaces on disk, and turns of their recalls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cornplug.config import NamespaceConfig, StoreConfig
from cornplug.private_paths import read_secret
from cornplug.store.base import Tier
from cornplug.store.client import PoolStore
from cornplug.store.daemon.server import StoreServer
from cornplug.store.disk.segment_files import FoundRecord, SegmentFiles, open_disk
from cornplug.testing.store import key_of

from ..conftest import end_server, eventually
from .disk_stage import KIB, MIB, disk_of, put, scanned, tier_of

NAMESPACES = {
    "handbook": NamespaceConfig(pinned=True, ceiling=0.3),
    "chat": NamespaceConfig(share=0.3),
    "documents": NamespaceConfig(ceiling=0.4),
}
Connect = Callable[..., PoolStore]
Serve = Callable[..., StoreServer]


@pytest.fixture
def start(serve_in_thread: Serve, folder: Path, store_config: StoreConfig) -> Callable[[], StoreServer]:
    def serve() -> StoreServer:
        disk = open_disk(folder, read_secret(store_config.secret_file), size_bytes=4 * MIB)
        return serve_in_thread(size_bytes=4 * MIB, disk=disk, namespaces=NAMESPACES)

    return serve


def restart(server: StoreServer, store: PoolStore, start: Callable[[], StoreServer], path: Path) -> None:
    end_server(server, path)
    eventually(lambda: not store.is_connected)
    start()
    eventually(lambda: store.is_connected)


def fill(store: PoolStore, app: str, names: range) -> None:
    for name in names:
        put(store, (app, name), 90 * KIB, app=app)
        if name % 8 == 7 or name == names[-1]:
            eventually(lambda: disk_of(store).queued == 0)


def test_disk_keeps_pins_shares_and_ceilings_over_a_restart(
    start: Callable[[], StoreServer], connect: Connect, store_config: StoreConfig
) -> None:
    server, store = start(), connect()
    fill(store, "handbook", range(6))
    fill(store, "chat", range(6))
    fill(store, "documents", range(40))
    assert disk_of(store).namespaces["documents"].used_bytes <= 0.4 * 4 * MIB
    restart(server, store, start, store_config.socket)
    eventually(lambda: scanned(store))
    kept = [("handbook", name) for name in range(6)] + [("chat", name) for name in range(6)]
    assert [tier_of(store, name) for name in kept] == [Tier.DISK] * 12
    assert 0 < disk_of(store).namespaces["documents"].used_bytes <= 0.4 * 4 * MIB
    fill(store, "documents", range(100, 120))
    assert [tier_of(store, name) for name in kept] == [Tier.DISK] * 12
    assert disk_of(store).used_bytes <= 4 * MIB


def test_disk_keeps_pins_while_it_is_scanned(
    start: Callable[[], StoreServer], connect: Connect, store_config: StoreConfig, gate: threading.Event
) -> None:
    gate.set()
    server, store = start(), connect()
    fill(store, "handbook", range(6))
    fill(store, "documents", range(40))
    gate.clear()
    restart(server, store, start, store_config.socket)
    put(store, "new", 90 * KIB, app="documents")
    for _ in range(20):
        assert disk_of(store).scanning  # the daemon could write meanwhile
    gate.set()
    eventually(lambda: scanned(store) and disk_of(store).queued == 0)
    assert [tier_of(store, ("handbook", name)) for name in range(6)] == [Tier.DISK] * 6


def test_disk_recalls_of_namespaces_take_turns(
    start: Callable[[], StoreServer],
    connect: Connect,
    store_config: StoreConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, store = start(), connect()
    fill(store, "documents", range(9))
    fill(store, "chat", range(2))
    restart(server, store, start, store_config.socket)
    eventually(lambda: scanned(store))
    gate, order, read = threading.Event(), list[str](), SegmentFiles.read

    def noted(
        files: SegmentFiles, found: FoundRecord, into: memoryview, *, may_write: Callable[[], bool]
    ) -> bytes | None:
        order.append(found.header.app)
        assert gate.wait(30)
        return read(files, found, into, may_write=may_write)

    monkeypatch.setattr(SegmentFiles, "read", noted)
    store.recall([key_of(("documents", name)) for name in range(9)])
    eventually(lambda: bool(order))  # the daemon has begun as many reads as it may
    store.recall([key_of(("chat", name)) for name in range(2)])
    disk_of(store)  # answered behind both
    gate.set()
    chat = [("chat", name) for name in range(2)]
    eventually(lambda: [tier_of(store, name) for name in chat] == [Tier.MEMORY] * 2)
    assert order[:4] == ["documents"] * 4, "they are read before the others are asked for"
    assert order.index("chat") <= 5
