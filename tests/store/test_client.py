"""The pool against the contract, and its client against a daemon that misbehaves or dies."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from expected_errors import expect_error
from time_limits import TimeLimits

from cornplug.config import StoreConfig
from cornplug.errors import StoreUnavailable
from cornplug.store import daemon_link
from cornplug.store.base import Reservation, ReserveRefusal, ReserveTerms, Tier
from cornplug.store.client import PoolStore
from cornplug.store.daemon.server import StoreServer
from cornplug.testing import StoreContract
from cornplug.testing.store import StoreStage, contains, fill, key_of, lease, reserve

from .conftest import ServerClock, answers, eventually, pool_stage

Connect = Callable[..., PoolStore]
Start = Callable[..., "subprocess.Popen[str]"]


class TestPoolStore(StoreContract):
    @pytest.fixture
    def stage(
        self, serve_in_thread: Callable[..., StoreServer], connect: Connect, server_clock: ServerClock
    ) -> StoreStage:
        return pool_stage(serve_in_thread, connect, server_clock, size_bytes=self.capacity_bytes)


def _refused(call: Callable[[], object]) -> tuple[str, float]:
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailable) as e:
        call()
    return e.value.reason, time.monotonic() - began_s


def test_pool_store_without_daemon_every_call_fails_at_once(connect: Connect, within: TimeLimits) -> None:
    store = connect()
    reason, took_s = _refused(lambda: store.stat(deadline_s=60))
    assert reason == "store_down"
    within.check(took_s, 20)


def test_pool_store_daemon_comes_later_sharing_begins(connect: Connect, start_daemon: Start) -> None:
    store = connect()
    assert not store.is_connected
    start_daemon()
    eventually(lambda: store.is_connected)
    fill(store, "a", b"x")


@pytest.mark.parametrize("again", [False, True])
def test_pool_store_killed_daemon_is_survived(
    connect: Connect, start_daemon: Start, again: bool, within: TimeLimits
) -> None:
    daemon = start_daemon()
    store = connect()
    fill(store, "a", b"payload")
    held = lease(store, "a")
    assert held is not None
    daemon.kill()
    daemon.wait()
    reason, took_s = _refused(lambda: store.lease([key_of("a")], ttl_s=60, deadline_s=60))
    assert reason == "store_down"
    within.check(took_s, 20)
    eventually(lambda: not store.is_connected)
    assert _refused(lambda: contains(store, "a"))[0] == "store_down", "its table is not believed for long"
    view = store.view(held.location)
    assert bytes(view) == b"payload"
    if again:
        start_daemon()
        eventually(lambda: store.is_connected)
        assert contains(store, "a") == b"\0"
        assert _refused(lambda: store.view(held.location))[0] == "stale_location"
        assert bytes(view) == b"payload"
        fill(store, "a", b"x")


def test_pool_store_reservation_ends_with_its_daemon(connect: Connect, start_daemon: Start) -> None:
    daemon = start_daemon()
    store = connect()
    room = reserve(store, "a", 8)
    assert isinstance(room, Reservation)
    daemon.kill()
    start_daemon()
    eventually(lambda: store.is_connected and _stat_works(store))
    fresh = reserve(store, "b", 8)
    assert isinstance(fresh, Reservation)
    assert store.commit([(room, b"")], deadline_s=5) == [False]
    store.release([room.token], deadline_s=5)
    assert store.commit([(fresh, b"")], deadline_s=5) == [True]


def _stat_works(store: PoolStore) -> bool:
    try:
        store.stat(deadline_s=5)
    except StoreUnavailable:
        return False
    return True


def test_pool_store_stopped_daemon_costs_one_deadline(
    connect: Connect, start_daemon: Start, within: TimeLimits
) -> None:
    daemon = start_daemon()
    store = connect()
    fill(store, "a", b"x")
    held = lease(store, "a")
    os.kill(daemon.pid, signal.SIGSTOP)
    reason, took_s = _refused(lambda: store.stat(deadline_s=0.05))
    assert reason == "store_timeout"
    assert took_s > 0.04
    time.sleep(0.1)
    refused = [_refused(lambda: store.stat(deadline_s=0.05)) for _ in range(20)]
    assert {reason for reason, _ in refused} == {"store_slow"}
    within.check(sum(took_s > 0.04 for _, took_s in refused), 10, "each may have waited that long")
    os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: _stat_works(store))
    assert held is not None
    assert store.stat(deadline_s=5).leases == 1, "the connection went on, and what it holds"


def test_pool_store_lookup_needs_no_answer_of_the_daemon(connect: Connect, start_daemon: Start) -> None:
    daemon = start_daemon()
    store = connect()
    for name in range(4):
        fill(store, name, b"x")
    store.delete([key_of(1)], deadline_s=5)
    os.kill(daemon.pid, signal.SIGSTOP)
    assert contains(store, *range(5)) == b"\1\0\1\1\0"
    assert contains(store, *range(300)) == b"\1\0\1\1" + bytes(296)


def test_pool_store_peek_asks_no_daemon_and_counts_nothing(connect: Connect, start_daemon: Start) -> None:
    daemon = start_daemon()
    store = connect()
    fill(store, 0, b"x")
    before = store.stat(deadline_s=5)
    os.kill(daemon.pid, signal.SIGSTOP)
    assert store.can_peek
    assert store.peek([key_of(0), key_of(1)]) == bytes([Tier.MEMORY, Tier.ABSENT])
    assert store.peek([key_of(name) for name in range(300)])[:2] == bytes([Tier.MEMORY, Tier.ABSENT])
    os.kill(daemon.pid, signal.SIGCONT)
    now = store.stat(deadline_s=5)
    assert (now.found, now.absent) == (before.found, before.absent)


def test_pool_store_lookup_beyond_a_full_table_asks_the_daemon(
    connect: Connect, serve_in_thread: Callable[..., StoreServer]
) -> None:
    serve_in_thread()
    store = connect()
    names = range(2048)
    rooms = store.reserve([(key_of(name), 64) for name in names], ReserveTerms("test"), deadline_s=20)
    written = [(room, b"") for room in rooms if isinstance(room, Reservation)]
    assert all(store.commit(written, deadline_s=20))
    assert len(written) == len(names), "twice as many as the table has records"
    assert contains(store, *names, "absent") == b"\1" * len(names) + b"\0"
    store.delete([key_of(name) for name in names], deadline_s=20)
    assert contains(store, *names) == bytes(len(names))


def test_pool_store_damaged_table_never_raises(
    connect: Connect, serve_in_thread: Callable[..., StoreServer]
) -> None:
    """A wrong answer to a lookup is a miss later on: leases and checksums are not of the table."""
    server = serve_in_thread()
    store = connect()
    for name in range(50):
        fill(store, name, bytes([name]) * 64)
    source = random.Random(3)
    table = server._table
    for _ in range(5000):
        table._bytes[source.randrange(4096, len(table._bytes))] = source.randrange(256)
    assert len(contains(store, *range(100))) == 100
    for name in range(50):
        held = lease(store, name)
        assert held is not None
        assert bytes(store.view(held.location)) == bytes([name]) * 64


def test_threads_wait_for_their_turn_no_longer_than_asked(
    connect: Connect, start_daemon: Start, within: TimeLimits
) -> None:
    daemon = start_daemon()
    store = connect()
    os.kill(daemon.pid, signal.SIGSTOP)
    took: list[tuple[str, float]] = []
    threads = [
        threading.Thread(target=lambda: took.append(_refused(lambda: store.stat(deadline_s=1.0))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(took) == 4
    within.check(max(took_s for _, took_s in took), 3.5, "one after the other takes 4 s")


def test_threads_share_a_connection(connect: Connect, serve_in_thread: Callable[..., StoreServer]) -> None:
    serve_in_thread()
    store = connect()
    wrong: list[int] = []

    def work(number: int) -> None:
        for i in range(30):
            fill(store, (number, i), bytes([number]) * 64)
            held = lease(store, (number, i))
            if held is None or bytes(store.view(held.location)) != bytes([number]) * 64:
                wrong.append(i)
            else:
                store.release([held.token], deadline_s=5)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.stat(deadline_s=5).entries == 120


CLIENT = """
import sys, time
from cornplug.config import StoreConfig
from cornplug.store.client import PoolStore
from cornplug.testing.store import lease, reserve
store = PoolStore(StoreConfig(socket=sys.argv[1], secret_file=sys.argv[2], autostart=False))
assert lease(store, "leased") is not None
room = reserve(store, "written", 8 << 20)
print("ready", flush=True)
view = store.view(room.location, writable=True)
while True:
    view[:1024] = b"z" * 1024
"""


def test_daemon_killed_client_leaves_nothing_behind(
    connect: Connect, start_daemon: Start, store_config: StoreConfig
) -> None:
    start_daemon()
    store = connect()
    fill(store, "leased", b"x" * (8 << 20))
    command = [sys.executable, "-c", CLIENT, str(store_config.socket), str(store_config.secret_file)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    assert client.stdout.readline() == "ready\n"
    assert reserve(store, "big", 8 << 20) is ReserveRefusal.FULL
    client.kill()
    client.communicate()
    eventually(lambda: store.stat(deadline_s=5).leases == 0)
    stat = store.stat(deadline_s=5)
    assert (stat.reservations, stat.used_bytes) == (0, 16 << 20)
    assert isinstance(reserve(store, "big", 8 << 20), Reservation), "the leased entry can go again"
    eventually(lambda: isinstance(reserve(store, "other", 8 << 20), Reservation))


def test_pool_store_forked_child_leaves_parents_connection_alone(
    connect: Connect, serve_in_thread: Callable[..., StoreServer]
) -> None:
    serve_in_thread()
    store = connect()
    fill(store, "a", b"x")
    child = os.fork()
    if child == 0:
        reason = "no error"
        try:
            store.stat(deadline_s=1)
        except StoreUnavailable as e:
            reason = e.reason
        os._exit(0 if reason == "store_down" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert contains(store, "a") == b"\1"


@pytest.mark.parametrize("closed", [False, True])
def test_pool_store_forked_child_gets_its_own_connection(
    connect: Connect, serve_in_thread: Callable[..., StoreServer], closed: bool
) -> None:
    """Web servers fork their workers after the application was loaded."""
    serve_in_thread()
    store = connect()
    fill(store, "a", b"of the parent")
    if closed:
        store.close()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if closed:
                time.sleep(0.3)
                status = int(store.is_connected)
            else:
                eventually(lambda: store.is_connected)
                held = lease(store, "a")
                assert held is not None
                assert bytes(store.view(held.location)) == b"of the parent"
                fill(store, "b", b"of the child")
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    if not closed:
        held = lease(store, "b")
        assert held is not None
        assert bytes(store.view(held.location)) == b"of the child"


def test_pool_store_failing_daemon_is_started_ever_less_often(
    store_config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[float] = []
    monkeypatch.setattr(
        "cornplug.store.daemon_link.spawn_daemon", lambda *a, **k: starts.append(time.monotonic())
    )
    monkeypatch.setattr("cornplug.store.daemon_link._START_WAIT_S", 0.01)
    monkeypatch.setattr("cornplug.store.daemon_link._LAST_BACKOFF_S", 0.01)
    monkeypatch.setattr("cornplug.store.daemon_link._FIRST_PAUSE_S", 0.2)
    store = PoolStore(store_config, autostart=True, connect_timeout_s=0)
    eventually(lambda: len(starts) >= 4)
    store.close()
    pauses = [after - before for before, after in pairwise(starts)]
    assert all(pause >= 0.19 * 2**i for i, pause in enumerate(pauses))


def test_pool_store_other_secret_is_refused_with_remedy(
    start_daemon: Start, store_config: StoreConfig, short_path: Path
) -> None:
    start_daemon()
    other = PoolStore(store_config.model_copy(update={"secret_file": short_path / "other"}))
    try:
        with expect_error(StoreUnavailable, reason="store_refused", match=r"store\.secret_file"):
            other.stat(deadline_s=1)
    finally:
        other.close()


def test_pool_store_other_listener_at_socket_is_no_store(store_config: StoreConfig, connect: Connect) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(store_config.socket))
        listener.listen()

        def talk() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"\x04\0\0\0junk")

        thread = threading.Thread(target=talk)
        thread.start()
        store = connect()
        thread.join()
    assert _refused(lambda: contains(store, "a"))[0] == "store_down"


def _daemons_of(path: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"cornplug.store.daemon.main" in command and str(path).encode() in command:
                found.append(int(entry.name))
    return found


def test_pool_store_two_starters_get_one_daemon_that_ends_idle(store_config: StoreConfig) -> None:
    stores: list[PoolStore] = []

    def start() -> None:
        stores.append(PoolStore(store_config, autostart=True, connect_timeout_s=20, idle_exit_s=0.5))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        fill(stores[0], "a", b"x")
        assert [contains(store, "a") for store in stores] == [b"\1"] * 3
        assert len(_daemons_of(store_config.socket)) == 1
        assert "serving" in daemon_link.log_path(store_config.socket).read_text()
    finally:
        for store in stores:
            store.close()
    eventually(lambda: not _daemons_of(store_config.socket))
    assert not answers(store_config.socket)
