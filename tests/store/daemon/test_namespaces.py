"""Namespaces from the file of settings to the daemon's evictions, and through the client."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cornplug.config import NamespaceConfig, load
from cornplug.errors import ConfigError
from cornplug.store import messages
from cornplug.store.base import Reservation, ReserveTerms, Store
from cornplug.store.client import PoolStore
from cornplug.store.daemon.access_log import LoggedCall, LoggedEntry
from cornplug.store.daemon.server import StoreServer
from cornplug.store.memory import MemoryStore
from cornplug.testing.store import key_of
from tests.store.conftest import eventually

MIB = 1 << 20
DEADLINE_S = 5.0


def put(store: Store, name: object, app: str, *, cost_s: float = 0.0) -> bool:
    (room,) = store.reserve([(key_of(name), MIB)], ReserveTerms(app, cost_s=cost_s), deadline_s=DEADLINE_S)
    return isinstance(room, Reservation) and store.commit([(room, b"")], deadline_s=DEADLINE_S) == [True]


def mib_by_app(store: Store) -> dict[str, int]:
    return {app: size // MIB for app, size in store.stat(deadline_s=DEADLINE_S).bytes_by_app.items()}


def toml(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "cornplug.toml"
    path.write_text(text)
    return {"CORNPLUG_CONFIG": str(path)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("share = 1.5", "store.namespaces.chat.share"),
        ("shares = 0.5", "store.namespaces.chat.shares"),
        ("share = 0.5\nceiling = 0.4", "namespaces.chat: share 0.5 exceeds ceiling 0.4: lower it"),
        ("pinned = true", "namespaces.chat: pinned entries could fill the store: set ceiling below 1"),
        ("share = 0.6\n[store.namespaces.b]\nshare = 0.5", "add up to 1.1: the maximum is 1"),
        (
            "share = 0.6\n[store.namespaces.b]\npinned = true\nceiling = 0.5",
            "add up to 1.1: the maximum is 1",
        ),
        ('apps = ["b"]\n[store.namespaces.b]', "app 'b' is in two namespaces: list it in one"),
    ],
)
def test_load_wrong_namespace_names_field_and_remedy(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ=toml(tmp_path, f"[store.namespaces.chat]\n{text}\n"))
    assert said in str(caught.value)
    assert "CORNPLUG_CONFIG" in str(caught.value)


def test_load_namespaces_of_the_file(tmp_path: Path) -> None:
    text = '[store.namespaces.chat]\napps = ["chat", "agents"]\nshare = 0.5\npriority = 1\nttl_s = 60\n'
    config = load(environ=toml(tmp_path, text))
    chat = NamespaceConfig(apps=("chat", "agents"), share=0.5, priority=1, ttl_s=60.0)
    assert config.store.namespaces == {"chat": chat}
    assert load(environ={}).store.namespaces == {}


def test_daemon_keeps_the_share_of_its_file(
    start_daemon: Callable[..., subprocess.Popen[str]],
    connect: Callable[..., PoolStore],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (path,) = toml(tmp_path, "[store.namespaces.chat]\nshare = 0.5\n").values()
    monkeypatch.setenv("CORNPLUG_CONFIG", path)
    start_daemon()
    store = connect()
    for name in range(8):
        assert put(store, ("chat", name), "chat")
    for name in range(40):
        assert put(store, ("scan", name), "scan")
    assert mib_by_app(store) == {"chat": 8, "scan": 8}


def test_daemon_with_a_wrong_namespace_does_not_start(
    start_daemon: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (path,) = toml(tmp_path, "[store.namespaces.chat]\nshare = 2\n").values()
    monkeypatch.setenv("CORNPLUG_CONFIG", path)
    daemon = start_daemon(wait=False)
    assert daemon.wait() == 2
    assert daemon.stderr is not None
    assert "store.namespaces.chat.share" in daemon.stderr.read()


def test_daemon_weighs_the_cost_that_writers_name(
    serve_in_thread: Callable[..., StoreServer], connect: Callable[..., PoolStore]
) -> None:
    serve_in_thread(size_bytes=16 * MIB, namespaces={"dear": NamespaceConfig(), "cheap": NamespaceConfig()})
    store = connect()
    for name in range(100):
        put(store, ("dear", name), "dear", cost_s=3e-3)
        put(store, ("cheap", name), "cheap", cost_s=1e-3)
    assert mib_by_app(store) == {"dear": 12, "cheap": 4}


def test_daemon_drops_entries_at_the_end_of_their_time(
    serve_in_thread: Callable[..., StoreServer], connect: Callable[..., PoolStore]
) -> None:
    serve_in_thread(size_bytes=4 * MIB, namespaces={"brief": NamespaceConfig(ttl_s=0.2)})
    store = connect()
    assert put(store, "a", "brief")
    assert put(store, "b", "other")
    assert store.contains([key_of("a")], deadline_s=DEADLINE_S) == b"\1"
    eventually(lambda: store.contains([key_of("a"), key_of("b")], deadline_s=DEADLINE_S) == b"\0\1", 5.0)


def test_daemon_pages_of_one_commit_lose_their_tail_first(
    serve_in_thread: Callable[..., StoreServer], connect: Callable[..., PoolStore]
) -> None:
    serve_in_thread(size_bytes=4 * MIB)
    store = connect()
    rooms = store.reserve([(key_of(i), MIB) for i in range(4)], ReserveTerms("a"), deadline_s=DEADLINE_S)
    written = [(room, b"") for room in rooms if isinstance(room, Reservation)]
    assert store.commit(written, deadline_s=DEADLINE_S) == [True] * 4
    assert put(store, "new", "a")
    assert store.contains([key_of(i) for i in range(4)], deadline_s=DEADLINE_S) == b"\1\1\1\0"


@pytest.mark.parametrize("cost_s", [-1.0, float("nan"), float("inf"), 1e9])
def test_store_cost_that_no_entry_has_raises_value_error(cost_s: float) -> None:
    store = MemoryStore(capacity_bytes=MIB).connect()
    with pytest.raises(ValueError, match="cost_s"):
        put(store, "a", "chat", cost_s=cost_s)


def test_reserve_request_of_an_older_client_names_no_cost() -> None:
    older = msgspec.msgpack.encode([3, key_of("a"), [65], "app", None, True])
    assert messages.request_decoder.decode(older) == messages.ReserveRequest(
        key_of("a"), [65], "app", None, True
    )


def test_daemon_logs_reads_and_writes_for_replay(
    start_daemon: Callable[..., subprocess.Popen[str]],
    connect: Callable[..., PoolStore],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    log = tmp_path / "log.jsonl"
    (path,) = toml(tmp_path, f'[store]\naccess_log = "{log}"\n').values()
    monkeypatch.setenv("CORNPLUG_CONFIG", path)
    daemon = start_daemon()
    store = connect()
    assert put(store, "a", "chat", cost_s=0.5)
    leases = store.lease([key_of("a"), key_of("absent")], ttl_s=9.0, deadline_s=DEADLINE_S)
    store.release([lease.token for lease in leases if lease], deadline_s=DEADLINE_S)
    daemon.terminate()
    assert daemon.wait() == 0
    calls = [msgspec.json.decode(line, type=LoggedCall) for line in log.read_bytes().splitlines()]
    noted = [LoggedEntry(key_of("a")[:8].hex(), MIB, 0.5)]
    assert [(call.op, call.app, call.entries) for call in calls] == [
        ("put", "chat", noted),
        ("get", "chat", noted),
    ]
