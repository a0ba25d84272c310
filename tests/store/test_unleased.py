"""Copying reads without a message: right bytes or none, whatever daemon, writers and stray bytes do."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable

import pytest

from cornplug import codec
from cornplug.codec import PayloadKind
from cornplug.errors import CodecError
from cornplug.store import payload as payloads
from cornplug.store.client import PoolStore
from cornplug.store.daemon.server import StoreServer
from cornplug.store.entry_table import NO_NOTES_PAGE
from cornplug.store.payload import NewPayload, get_payload, get_payload_into, put_payload
from cornplug.testing.store import contains, key_of

from .conftest import eventually

Connect = Callable[..., PoolStore]
Start = Callable[..., "subprocess.Popen[str]"]
Serve = Callable[..., StoreServer]


def keep(store: PoolStore, name: int, size: int = 4096, segments: int = 1) -> str:
    return put_payload(
        store,
        NewPayload(
            content(name, size),
            PayloadKind.EMBEDDING,
            key=key_of(name),
            dtype="uint8",
            shape=(size,),
            segments=segments,
        ),
        app="test",
        deadline_s=5,
    )


def content(name: int, size: int = 4096) -> bytes:
    return random.Random(name).randbytes(size)


def read(store: PoolStore, name: int) -> bytes | None:
    """An entry's bytes; None for a miss, also for one that was damaged."""
    try:
        found = get_payload(store, key_of(name), deadline_s=5)
    except CodecError:
        return None
    return None if found is None else bytes(found[1])


def leases_taken(store: PoolStore, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys for which `store` takes leases from now on."""
    taken: list[bytes] = []
    inner = store.lease

    def lease(keys: list[bytes], *, ttl_s: float, deadline_s: float) -> object:
        taken.extend(keys)
        return inner(keys, ttl_s=ttl_s, deadline_s=deadline_s)

    monkeypatch.setattr(store, "lease", lease)
    return taken


def test_read_unleased_needs_no_answer_of_the_daemon(connect: Connect, start_daemon: Start) -> None:
    daemon = start_daemon()
    store, other = connect(), connect()
    keep(store, 1)
    os.kill(daemon.pid, signal.SIGSTOP)
    target = bytearray(4096)
    assert read(other, 1) == content(1)
    assert get_payload_into(other, key_of(1), memoryview(target), deadline_s=5) is not None
    assert target == content(1)
    assert read(other, 2) is None


def test_read_unleased_large_header_takes_a_lease(
    connect: Connect, serve_in_thread: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_in_thread()
    store = connect()
    keep(store, 1, segments=64)
    keep(store, 2)
    taken = leases_taken(store, monkeypatch)
    assert read(store, 1) == content(1)
    assert read(store, 2) == content(2)
    assert taken == [key_of(1)]


def test_read_unleased_client_without_a_page_takes_a_lease(
    connect: Connect, serve_in_thread: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cornplug.store.entry_table.UseNotes.open_page", lambda notes: NO_NOTES_PAGE)
    serve_in_thread()
    store = connect()
    keep(store, 1)
    taken = leases_taken(store, monkeypatch)
    assert read(store, 1) == content(1)
    assert taken == [key_of(1)]


def test_read_unleased_entry_replaced_during_the_copy_is_asked_for(
    connect: Connect, serve_in_thread: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of the same key, written again in the same place: right, but of an entry that went."""
    serve_in_thread()
    store, other = connect(), connect()
    keep(store, 1)
    verify = codec.verify_checksums

    def while_copying(*arguments: object) -> None:
        monkeypatch.setattr(payloads.codec, "verify_checksums", verify)
        other.delete([key_of(1)], deadline_s=5)
        keep(other, 1)
        verify(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(payloads.codec, "verify_checksums", while_copying)
    taken = leases_taken(store, monkeypatch)
    assert read(store, 1) == content(1)
    assert taken == [key_of(1)]
    assert store.stat(deadline_s=5).hits == 1, "one read, counted once"


def test_read_unleased_target_of_another_size_is_an_error(connect: Connect, serve_in_thread: Serve) -> None:
    serve_in_thread()
    store = connect()
    keep(store, 1)
    with pytest.raises(ValueError, match="target has 100"):
        get_payload_into(store, key_of(1), memoryview(bytearray(100)), deadline_s=5)


def test_read_unleased_beside_evictions_is_right_or_a_miss(connect: Connect, start_daemon: Start) -> None:
    """Writers fill the store again and again while two readers ask for any entry."""
    start_daemon()
    writer, done = connect(), threading.Event()
    size, names = 512 << 10, 60
    wrong: list[int] = []
    found = [0, 0]

    def ask(number: int) -> None:
        store, source = connect(), random.Random(number)
        while not done.is_set():
            name = source.randrange(names)
            answer = read(store, name)
            found[number] += answer is not None
            if answer is not None and answer != expected[name]:
                wrong.append(name)

    expected = [content(name, size) for name in range(names)]
    readers = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(240):
        keep(writer, turn % names, size)
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert min(found) > 0
    assert writer.stat(deadline_s=5).evictions > 100


@pytest.mark.parametrize("where", ["table", "arena", "both"])
def test_read_unleased_damage_is_a_miss_never_wrong_bytes(
    connect: Connect, serve_in_thread: Serve, where: str
) -> None:
    server = serve_in_thread()
    store, source = connect(), random.Random(9)
    names = range(150)
    expected = {name: content(name) for name in names}
    for name in names:
        keep(store, name)
    table = server._table
    first = table.shape.record_offset(1)
    for _ in range(40):
        if where != "arena":
            for _ in range(100):
                table._bytes[source.randrange(first, table.shape.record_offset(len(names) + 1))] ^= 1
                table._bytes[source.randrange(4096, first)] = source.randrange(256)
        if where != "table":
            raw = memoryview(store._link.connection.arena._map)  # type: ignore[union-attr]
            for _ in range(5):
                raw[source.randrange(len(names) * 4096)] ^= 1
        for name in source.sample(names, 20):
            assert read(store, name) in (expected[name], None)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_read_unleased_of_ended_daemon_is_right_or_no_store(
    connect: Connect, start_daemon: Start, end: signal.Signals
) -> None:
    daemon = start_daemon()
    store = connect()
    keep(store, 1)
    daemon.send_signal(end)
    daemon.wait()
    eventually(lambda: not store.is_connected)
    start_daemon()
    eventually(lambda: store.is_connected)
    assert read(store, 1) is None
    assert contains(store, 1) == b"\0"
    keep(store, 1)
    assert read(store, 1) == content(1)
