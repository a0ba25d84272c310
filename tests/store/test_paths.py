"""What lies beside the socket: strangers, cleaners of /tmp, two daemons, other releases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from expected_errors import expect_error

from cornplug import codec, private_paths
from cornplug.config import StoreConfig, load
from cornplug.errors import CodecError, ConfigError, StoreUnavailable
from cornplug.local_socket import SocketClaim
from cornplug.store import daemon_link
from cornplug.store.base import Reservation
from cornplug.store.client import PoolStore
from cornplug.store.daemon.main import EXIT_SOCKET_IN_USE
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import get_payload, get_payload_into
from cornplug.testing.store import contains, fill, key_of, reserve

from .conftest import answers, eventually

Connect = Callable[..., PoolStore]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every file so far is another user's."""
    mine = os.getuid()
    monkeypatch.setattr(private_paths.os, "getuid", lambda: mine + 1)


def _start(config: StoreConfig) -> None:
    with daemon_link.start_lock(config.socket) as ours:
        assert ours
        daemon_link.spawn_daemon(config, idle_exit_s=1)


@pytest.mark.usefixtures("stranger")
def test_autostart_in_strangers_folder_opens_and_makes_nothing(store_config: StoreConfig) -> None:
    log = daemon_link.log_path(store_config.socket)
    log.write_bytes(b"x" * (2 << 20))
    for attempt in (
        lambda: _start(store_config),
        lambda: daemon_link.spawn_daemon(store_config, idle_exit_s=1),
        lambda: SocketClaim(store_config.socket, setting="store.socket"),
    ):
        with expect_error(ConfigError, field="store.socket", match="0700"):
            attempt()
    assert [p.name for p in store_config.socket.parent.iterdir()] == [log.name]
    assert log.stat().st_size == 2 << 20


@pytest.mark.parametrize("name", ["s.log", "s.sock.start", "s.sock.lock"])
def test_autostart_symbolic_link_is_not_followed(
    store_config: StoreConfig, tmp_path: Path, name: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"x" * (2 << 20))
    (store_config.socket.parent / name).symlink_to(victim)
    with pytest.raises((OSError, ConfigError), match="symbolic link"):
        SocketClaim(store_config.socket, setting="store.socket") if name.endswith("lock") else _start(
            store_config
        )
    assert victim.read_bytes() == b"x" * (2 << 20)


def test_socket_claim_folder_that_is_a_link_is_refused(short_path: Path, tmp_path: Path) -> None:
    (short_path / "run").symlink_to(tmp_path)
    with expect_error(ConfigError, field="store.socket", match="symbolic link"):
        SocketClaim(short_path / "run" / "s.sock", setting="store.socket")
    assert list(tmp_path.iterdir()) == []


def test_folder_and_files_are_made_for_their_owner_only(store_config: StoreConfig, short_path: Path) -> None:
    config = store_config.model_copy(update={"socket": short_path / "deep" / "run" / "s.sock"})
    store = PoolStore(config, autostart=True, connect_timeout_s=20, idle_exit_s=0.2)
    try:
        folder = config.socket.parent
        assert folder.stat().st_mode & 0o777 == 0o700
        modes = {p.name: p.stat().st_mode & 0o777 for p in folder.iterdir()}
        assert modes == dict.fromkeys(["s.sock", "s.log", "s.sock.start", "s.sock.lock"], 0o600)
    finally:
        store.close()
    eventually(lambda: not config.socket.exists())


def test_pool_store_strangers_folder_costs_sharing_only(
    store_config: StoreConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, *, setting: str) -> int:
        raise ConfigError(setting, f"{path} belongs to user 1", "Name a folder of yours.")

    monkeypatch.setattr(daemon_link, "open_folder", refuse)
    store = PoolStore(store_config, autostart=True, connect_timeout_s=0.5)
    try:
        with expect_error(StoreUnavailable, reason="store_down", match="user 1"):
            contains(store, "a")
        assert caplog.text.count("belongs to user 1") == 1
    finally:
        store.close()


# -- cleaners, and daemons that meet --


@pytest.mark.more
def test_daemon_files_cleaned_away_are_made_again(
    start_daemon: Start, connect: Connect, store_config: StoreConfig
) -> None:
    start_daemon()
    store = connect()
    fill(store, "a", b"x")
    lock = store_config.socket.with_name("s.sock.lock")
    for gone in ([lock], [store_config.socket], [lock, store_config.socket]):
        for path in gone:
            path.unlink()
        eventually(lambda: lock.exists() and answers(store_config.socket))
    assert start_daemon(wait=False).wait(timeout=20) == EXIT_SOCKET_IN_USE, "the lock is held again"
    assert contains(store, "a") == b"\1", "who was connected noticed nothing"
    assert contains(connect(), "a") == b"\1"


def test_daemon_replaced_ends_and_leaves_the_others_socket(
    start_daemon: Start, connect: Connect, store_config: StoreConfig
) -> None:
    """A cleaner took the lock, and a second daemon came before the first noticed."""
    first = start_daemon()
    old = connect()
    os.kill(first.pid, signal.SIGSTOP)
    store_config.socket.with_name("s.sock.lock").unlink()
    second = start_daemon(wait=False)
    assert second.stderr is not None
    while "serving" not in second.stderr.readline():
        assert second.poll() is None
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait(timeout=60) == 0
    assert second.poll() is None
    new = connect()
    fill(new, "a", b"x")
    eventually(lambda: _has(old, "a"))


def _has(store: PoolStore, name: str) -> bool:
    try:
        return contains(store, name) == b"\1"
    except StoreUnavailable:
        return False


# -- how it is started --


def test_autostart_relative_settings_reach_the_daemon(
    short_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "cornplug.toml").write_text(
        f'[store]\nsocket = "{short_path / "s.sock"}"\nsize_bytes = 1048576\nsecret_file = "secret"\n'
        'access_log = "reads.jsonl"\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORNPLUG_CONFIG", "conf/cornplug.toml")
    config = load().store
    store = PoolStore(config, autostart=True, connect_timeout_s=20, idle_exit_s=0.2)
    try:
        assert store.is_connected, daemon_link.log_path(config.socket).read_text()
        fill(store, "a", b"x")
    finally:
        store.close()
    log = tmp_path / "conf" / "reads.jsonl"
    eventually(lambda: log.exists() and '"put"' in log.read_text(), within_s=60)
    assert (tmp_path / "conf" / "secret").exists()


def test_autostart_daemon_has_its_starters_settings(
    short_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's settings need not be those of the environment: flags, Ray's workers."""
    monkeypatch.setenv("CORNPLUG_STORE_ACCESS_LOG", str(tmp_path / "of_the_environment"))
    config = load(
        {
            "store.socket": short_path / "s.sock", "store.secret_file": short_path / "secret",
            "store.size_bytes": 1 << 20, "store.access_log": tmp_path / "log",
            "store.namespaces": {"chat": {"share": 0.5}},
        }
    ).store  # fmt: skip
    store = PoolStore(config, autostart=True, connect_timeout_s=20, idle_exit_s=0.2)
    try:
        assert store.is_connected, daemon_link.log_path(config.socket).read_text()
        assert set(store.stat(deadline_s=20).namespaces) == {"chat", "default"}
    finally:
        store.close()
    eventually(lambda: (tmp_path / "log").exists())
    assert not (tmp_path / "of_the_environment").exists()


def test_autostart_users_modules_are_not_the_daemons(store_config: StoreConfig, tmp_path: Path) -> None:
    (tmp_path / "secrets.py").write_text("raise SystemExit('the wrong secrets')")
    code = (
        "import sys; from pathlib import Path; from cornplug.config import StoreConfig\n"
        "from cornplug.store.client import PoolStore\n"
        "import os; os.chdir(sys.argv[3])\n"
        "config = StoreConfig(socket=Path(sys.argv[1]), secret_file=Path(sys.argv[2]), size_bytes=1 << 24)\n"
        "store = PoolStore(config, autostart=True, connect_timeout_s=20, idle_exit_s=0.2)\n"
        "print(store.is_connected)\n"
        "store.close()\n"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(store_config.socket),
        str(store_config.secret_file),
        str(tmp_path),
    ]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout == "True\n", daemon_link.log_path(store_config.socket).read_text()
    eventually(lambda: not store_config.socket.exists())


# -- other releases --


def test_pool_store_other_release_is_refused_and_logged_once(
    start_daemon: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start_daemon()
    monkeypatch.setattr("cornplug.store.messages.PROTOCOL_VERSION", 99)
    store = connect()
    with expect_error(StoreUnavailable, reason="store_refused", match="protocol"):
        contains(store, "a")
    assert caplog.text.count("uses protocol") == 1
    monkeypatch.undo()
    eventually(lambda: store.is_connected)


def test_store_config_each_protocol_has_its_own_socket() -> None:
    from cornplug.store.messages import PROTOCOL_VERSION

    assert StoreConfig().socket.name == f"store-{PROTOCOL_VERSION}.sock"


@pytest.mark.parametrize(
    "read", [get_payload, lambda s, k, **d: get_payload_into(s, k, memoryview(bytearray(4)), **d)]
)
def test_get_payload_entry_of_other_release_is_a_miss_and_stays(
    read: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore(capacity_bytes=1 << 20).connect()
    room = reserve(store, "a", 4)
    assert isinstance(room, Reservation)
    with monkeypatch.context() as newer:
        newer.setattr(codec, "VERSION", codec.VERSION + 1)
        meta = codec.encode_header(
            codec.PayloadHeader(codec.PayloadKind.EMBEDDING, key_of("a"), "uint8", (4,), (0,))
        )
    assert store.commit([(room, meta)], deadline_s=1) == [True]
    with pytest.raises(CodecError) as e:
        read(store, key_of("a"), deadline_s=1)
    assert (e.value.reason, e.value.is_damage) == ("version", False)
    assert contains(store, "a") == b"\1"
    assert store.stat(deadline_s=1).leases == 0
