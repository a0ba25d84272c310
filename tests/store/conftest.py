"""Daemons for tests: in a thread where speed counts, as processes where they must die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import pytest

from cornplug.config import StoreConfig
from cornplug.private_paths import read_secret
from cornplug.store import daemon_link
from cornplug.store.arena import SharedArena
from cornplug.store.client import PoolStore
from cornplug.store.daemon import server as server_module
from cornplug.store.daemon.reservations import ReservationTimes
from cornplug.store.daemon.server import OpenedTiers, ServedSocket, StoreServer
from cornplug.testing.store import StoreStage

T = TypeVar("T")


def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Fails unless `condition` becomes true in time."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "did not become true in time"
        time.sleep(0.01)


class ServerClock:
    """The time of servers in a thread: a test puts it forward, and no term ends by a slow machine."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    perf_counter = staticmethod(time.perf_counter)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def server_clock(monkeypatch: pytest.MonkeyPatch) -> ServerClock:
    clock = ServerClock()
    monkeypatch.setattr(server_module, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def slow_hello_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose test asks at once has connected, however busy the machine is."""
    monkeypatch.setattr(daemon_link, "_HELLO_TIMEOUT_S", 30.0)


@pytest.fixture
def store_config(short_path: Path) -> StoreConfig:
    return StoreConfig(
        socket=short_path / "s.sock",
        size_bytes=16 << 20,
        secret_file=short_path / "secret",
        autostart=False,
        quarantine_s=0.3,
    )


@pytest.fixture
def serve_in_thread(
    store_config: StoreConfig, server_clock: ServerClock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., StoreServer]]:
    """Serve `store_config.socket` from a thread of this process."""
    running: list[tuple[StoreServer, threading.Thread, socket.socket, SharedArena]] = []
    # The daemon collects garbage when its last client ends. In this process that takes half a second.
    monkeypatch.setattr(server_module, "gc", SimpleNamespace(collect=lambda: None))

    def serve(*, size_bytes: int = 1 << 20, **settings: Any) -> StoreServer:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(store_config.socket))
        listener.listen()
        arena = SharedArena(size_bytes)

        def taken(made: type[T], **defaults: Any) -> T:
            """The structure of those settings that are its fields."""
            own = {field.name: settings.pop(field.name) for field in fields(made) if field.name in settings}  # type: ignore[arg-type]
            return made(**{**defaults, **own})

        server = StoreServer(
            taken(ServedSocket, listener=listener),
            arena,
            secret=read_secret(store_config.secret_file),
            times=taken(ReservationTimes, quarantine_s=store_config.quarantine_s),
            tiers=taken(OpenedTiers),
            **settings,
        )
        thread = threading.Thread(target=server.serve)
        thread.start()
        _threads[server] = thread
        running.append((server, thread, listener, arena))
        return server

    yield serve
    for server, thread, listener, arena in running:
        server.stop = True
        answers(store_config.socket)  # wakes the server, which otherwise waits for its next tick
        thread.join()
        listener.close()
        arena.close()


@pytest.fixture
def connect(store_config: StoreConfig) -> Iterator[Callable[..., PoolStore]]:
    """Clients of `store_config.socket`, closed at the end."""
    stores: list[PoolStore] = []

    def make(**arguments: float | bool) -> PoolStore:
        stores.append(PoolStore(store_config, **arguments))  # type: ignore[arg-type]
        return stores[-1]

    yield make
    for store in stores:
        store.close()


_threads: WeakKeyDictionary[StoreServer, threading.Thread] = WeakKeyDictionary()


def end_server(server: StoreServer, path: Path) -> None:
    """End a server in a thread, so that another one can serve at its socket."""
    server.stop = True
    answers(path)  # wakes it
    _threads[server].join(30)
    # A client that connected meanwhile tries again.
    server._listener.close()
    path.unlink()


def pool_stage(
    serve: Callable[..., StoreServer],
    connect: Callable[..., PoolStore],
    clock: ServerClock,
    *,
    size_bytes: int,
    **settings: Any,
) -> StoreStage:
    """A daemon, as `StoreContract` needs it. `settings` are those of `StoreServer`."""
    terms = {"quarantine_s": 5.0, "reservation_s": 30.0, "reclaim_s": 600.0}
    serve(size_bytes=size_bytes, **terms, **settings)

    def advance(seconds: float) -> None:
        probe = connect()
        for _ in range(3):  # it has seen by then which connections have ended
            probe.stat(deadline_s=30)
        clock.ahead_s += seconds
        probe.stat(deadline_s=30)

    return StoreStage(
        connect,
        advance,
        **terms,
        raw_view=lambda store, at: store._link.arena.bytes_at(at.offset, at.size, writable=True),  # type: ignore[attr-defined]
    )


@pytest.fixture
def start_daemon(store_config: StoreConfig) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`serve-store` as a process; returns once it serves, or has ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*extra: str, wait: bool = True) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "cornplug.store.daemon.main", "--size", str(store_config.size_bytes)]
        command += ["--socket", str(store_config.socket), "--secret-file", str(store_config.secret_file)]
        command += ["--quarantine-s", str(store_config.quarantine_s), *extra]
        daemon = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(daemon)
        if wait:
            eventually(lambda: daemon.poll() is not None or answers(store_config.socket))
        return daemon

    yield start
    for daemon in started:
        if daemon.poll() is None:
            os.kill(daemon.pid, signal.SIGCONT)
            daemon.kill()
        daemon.communicate()


def answers(path: Path) -> bool:
    """Whether somebody accepts connections at this socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0
