"""`serve-store` as a process: start, end, bad clients, and shared memory that runs out."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from time_limits import TimeLimits

from cornplug.config import StoreConfig
from cornplug.private_paths import read_secret
from cornplug.store import daemon_link, messages
from cornplug.store.arena import host_memory
from cornplug.store.base import WriterPart
from cornplug.store.client import PoolStore
from cornplug.store.daemon import main as daemon
from cornplug.store.daemon import server
from cornplug.store.daemon.main import EXIT_SOCKET_IN_USE
from cornplug.store.daemon.server import StoreServer
from cornplug.testing.store import contains, fill

from ..conftest import answers, eventually

Connect = Callable[..., PoolStore]
Start = Callable[..., "subprocess.Popen[str]"]


def test_daemon_sigterm_ends_it_cleanly(start_daemon: Start, store_config: StoreConfig) -> None:
    process = start_daemon()
    assert store_config.socket.stat().st_mode & 0o777 == 0o600
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=5)
    assert process.returncode == 0
    assert not store_config.socket.exists()
    assert "serving" in log
    assert "received SIGTERM, so this store ends" in log


def test_daemon_second_at_one_socket_logs_and_exits(start_daemon: Start, connect: Connect) -> None:
    start_daemon()
    store = connect()
    second = start_daemon(wait=False)
    _, log = second.communicate(timeout=10)
    assert second.returncode == EXIT_SOCKET_IN_USE
    assert "another store serves" in log
    fill(store, "still", b"there")


def test_daemon_socket_of_dead_daemon_is_replaced(
    start_daemon: Start, store_config: StoreConfig, connect: Connect
) -> None:
    first = start_daemon()
    first.kill()
    first.wait()
    assert store_config.socket.exists()
    start_daemon()
    fill(connect(), "a", b"x")


def test_daemon_killed_leaves_no_shared_memory(start_daemon: Start, connect: Connect) -> None:
    process = start_daemon()
    # The daemon listens before it has its memory; whoever has written an entry has seen the memory.
    fill(connect(), "a", b"x" * 1000)
    memory = [os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert "/memfd:cornplug-store (deleted)" in memory
    process.kill()
    process.wait()
    assert not [path for path in Path("/dev/shm").iterdir() if "cornplug" in path.name]


def test_daemon_folder_open_to_others_is_refused(short_path: Path, start_daemon: Start) -> None:
    short_path.chmod(0o777)
    process = start_daemon(wait=False)
    _, log = process.communicate(timeout=10)
    assert process.returncode == 2
    assert "store.socket" in log
    assert "0700" in log


def test_daemon_path_too_long_is_explained(short_path: Path, start_daemon: Start) -> None:
    process = start_daemon("--socket", str(short_path / ("x" * 120)), wait=False)
    _, log = process.communicate(timeout=10)
    assert process.returncode == 2
    assert "shorter path" in log


def _raw(config: StoreConfig, *, hello: bool) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.settimeout(5)
    raw.connect(str(config.socket))
    if hello:
        tag = messages.secret_tag(read_secret(config.secret_file))
        raw.sendall(messages.frame(messages.ClientHello(messages.PROTOCOL_VERSION, tag)))
        assert raw.recv(4096)
    return raw


def _framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def _numbered(body: bytes, number: int = 7) -> bytes:
    return _framed(messages.NUMBER.pack(number) + body)


@pytest.mark.parametrize(
    ("hello", "sent"),
    [
        (False, b"\xff" * 64),
        (False, _framed(b"\xc1garbage")),
        (False, messages.frame(messages.StatRequest())),
        (False, _framed(b"\x91" * 100_000)),
        (True, struct.pack("<I", messages.MAX_FRAME_BYTES + 1)),
        (True, _framed(b"\x07")),
    ],
)
def test_server_client_without_frames_ends_alone(
    serve_in_thread: Callable[..., StoreServer],
    connect: Connect,
    store_config: StoreConfig,
    hello: bool,
    sent: bytes,
) -> None:
    serve_in_thread()
    store = connect()
    fill(store, "a", b"x")
    with _raw(store_config, hello=hello) as raw:
        raw.sendall(sent)
        while raw.recv(4096):
            pass
    assert contains(store, "a") == b"\1"


@pytest.mark.parametrize(
    "sent",
    [
        messages.frame(messages.ContainsRequest(b"k" * 33), 7),
        messages.frame(messages.ContainsRequest(b"k" * 32 * (messages.MAX_LOOKUP_KEYS + 1)), 7),
        messages.frame(messages.LeaseRequest(b"k" * 32 * (messages.MAX_KEYS + 1), 1.0), 7),
        *[
            messages.frame(messages.LeaseRequest(b"k" * 32, ttl_s), 7)
            for ttl_s in (math.nan, math.inf, -1.0, 0.0, 1e9)
        ],
        messages.frame(messages.ReserveRequest(b"k" * 32, [1, 2], "a"), 7),
        messages.frame(messages.ReserveRequest(b"k" * 32, [-5], "a"), 7),
        messages.frame(messages.ReserveRequest(b"k" * 32, [5], "a" * 10_000), 7),
        messages.frame(messages.ReserveRequest(b"k" * 32, [5], "a", WriterPart(b"g", 0, 1)), 7),
        messages.frame(messages.CommitRequest([1], [b"m" * (2 << 20)]), 7),
        messages.frame(messages.CommitRequest([1, 2], [b""]), 7),
        messages.frame(messages.DeleteRequest(b"k" * 32 * (messages.MAX_KEYS + 1)), 7),
        messages.frame(messages.ReleaseRequest([1] * (messages.MAX_KEYS + 1)), 7),
        messages.frame(messages.ClientHello(99, b""), 7),
        _numbered(b"\x92\x02\x01"),
        _numbered(b""),
        _numbered(b"\xc1garbage"),
        _numbered(b"\x92\x01" + b"\x91" * 100_000),
        _numbered(b"\x93\x01\xc4\x00" + b"\x91" * 100_000 + b"\xc0"),
    ],
)
def test_server_malformed_request_gets_a_fault(
    serve_in_thread: Callable[..., StoreServer], connect: Connect, store_config: StoreConfig, sent: bytes
) -> None:
    """Nothing but the socket's end ends a connection, and what is leased through it."""
    serve_in_thread()
    store = connect()
    fill(store, "a", b"x")
    with _raw(store_config, hello=True) as raw:
        raw.sendall(sent)
        number, answer = _answer(raw)
        assert number == 7
        assert isinstance(answer, messages.RequestFault)
        raw.sendall(messages.frame(messages.StatRequest(), 8))
        number, answer = _answer(raw)
        assert (number, type(answer)) == (8, messages.StatReply)
    assert contains(store, "a") == b"\1"


def _answer(raw: socket.socket) -> tuple[int, messages.Reply]:
    received = bytearray()
    while (body := messages.take_frame(received)) is None:
        received += raw.recv(1 << 16)
    number, message = messages.split_number(body)
    return number, messages.reply_decoder.decode(message)


def test_server_client_that_never_reads_delays_no_other(
    serve_in_thread: Callable[..., StoreServer], connect: Connect, store_config: StoreConfig
) -> None:
    serve_in_thread()
    store = connect()
    with _raw(store_config, hello=True) as raw:
        raw.setblocking(False)
        request = messages.frame(messages.ContainsRequest(b"k" * 32 * 4000), 1)
        sent, left = 0, memoryview(request)
        with pytest.raises(BlockingIOError):
            while sent < 100 << 20:
                taken = raw.send(left)
                # A part of a request, where the daemon makes room meanwhile.
                sent, left = sent + taken, left[taken:] or memoryview(request)
        assert contains(store, "a") == b"\0"
        raw.settimeout(5)
        assert raw.recv(4096), "and its answers come once it reads"
    assert store.stat(deadline_s=5).entries == 0


def test_server_client_without_hello_is_closed(
    serve_in_thread: Callable[..., StoreServer], store_config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HELLO_TIMEOUT_S", 0.1)
    serve_in_thread()
    with _raw(store_config, hello=False) as raw:
        assert raw.recv(1) == b""


def test_server_client_of_another_user_is_refused(
    serve_in_thread: Callable[..., StoreServer], store_config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_in_thread()
    uid = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr("cornplug.store.daemon.server.os.getuid", lambda: uid + 1)
        with _raw(store_config, hello=False) as raw:
            assert raw.recv(1) == b""


def test_server_idle_ends_busy_goes_on(serve_in_thread: Callable[..., StoreServer], connect: Connect) -> None:
    running = serve_in_thread(idle_exit_s=0.5)
    store = connect()
    time.sleep(1.2)
    assert not running.stop
    store.close()
    eventually(lambda: running.stop)


def test_daemon_size_beyond_host_memory_is_explained(start_daemon: Start) -> None:
    process = start_daemon("--size", "4096TiB", wait=False)
    _, log = process.communicate(timeout=10)
    assert process.returncode == 2
    assert "store.size_bytes: the store needs 4294967296 MiB" in log
    assert "--size" in log


def test_daemon_auto_started_too_large_takes_half_of_memory_left(store_config: StoreConfig) -> None:
    config = store_config.model_copy(update={"size_bytes": 1 << 52})
    left_bytes = host_memory().available_bytes
    store = PoolStore(config, autostart=True, connect_timeout_s=20, idle_exit_s=0.2)
    try:
        assert store.stat(deadline_s=5).capacity_bytes == pytest.approx(left_bytes / 2, rel=0.2)
        assert "uses half of what is left" in daemon_link.log_path(config.socket).read_text()
    finally:
        store.close()
    eventually(lambda: not config.socket.exists())


def test_daemon_without_size_takes_a_quarter_and_logs_it(store_config: StoreConfig) -> None:
    config = store_config.model_copy(update={"size_bytes": None})
    left_bytes = host_memory().available_bytes
    store = PoolStore(config, autostart=True, connect_timeout_s=20, idle_exit_s=0.2)
    try:
        assert store.stat(deadline_s=5).capacity_bytes == pytest.approx(left_bytes / 4, rel=0.2)
        assert (
            "size_bytes is not set, so this store uses a quarter"
            in daemon_link.log_path(config.socket).read_text()
        )
    finally:
        store.close()
    eventually(lambda: not config.socket.exists())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no other")
def test_daemon_auto_started_runs_on_all_cores(store_config: StoreConfig) -> None:
    """A vLLM worker that starts it is bound to cores that it keeps busy."""
    allowed = os.sched_getaffinity(0)
    starter = (
        "import os, socket, struct, sys\n"
        "from pathlib import Path\n"
        "from cornplug.config import StoreConfig\n"
        "from cornplug.store.client import PoolStore\n"
        f"os.sched_setaffinity(0, {{{min(allowed)}}})\n"
        "config = StoreConfig(socket=Path(sys.argv[1]), secret_file=Path(sys.argv[2]), size_bytes=1 << 26)\n"
        "store = PoolStore(config, autostart=True, connect_timeout_s=20, idle_exit_s=0.2)\n"
        "peer = store._link.connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)\n"
        "print(sorted(os.sched_getaffinity(struct.unpack('3i', peer)[0])))\n"
        "store.close()\n"
    )
    command = [sys.executable, "-c", starter, str(store_config.socket), str(store_config.secret_file)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert set(json.loads(out.stdout)) >= allowed
    eventually(lambda: not store_config.socket.exists())


def test_daemon_wrong_arguments_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        daemon.main(["--size", "none"])
    assert ended.value.code == 2
    assert "argument --size: 'none' is not a size: write 64GiB" in capsys.readouterr().err


def _started_under(limit: str, config: StoreConfig) -> subprocess.Popen[bytes]:
    """A daemon with a limit of 64 descriptors, "-Sn" the soft one or "-n" both."""
    command = [
        sys.executable,
        "-m",
        "cornplug.store.daemon.main",
        "--size",
        "1MiB",
        "--socket",
        str(config.socket),
    ]
    command += ["--secret-file", str(config.secret_file)]
    process = subprocess.Popen(["bash", "-c", f'ulimit {limit} 64; exec "$@"', "bash", *command])
    eventually(lambda: answers(config.socket))
    return process


@pytest.mark.parametrize("limit", ["-Sn", "-n"])
def test_daemon_many_idle_clients_slow_no_request(
    connect: Connect, store_config: StoreConfig, limit: str, within: TimeLimits
) -> None:
    process = _started_under(limit, store_config)
    idle: list[socket.socket] = []
    try:
        store = connect()
        fill(store, "a", b"x")
        for _ in range(100):
            idle.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            idle[-1].setblocking(False)
            idle[-1].connect_ex(str(store_config.socket))
        time.sleep(0.2)
        took_s = []
        for _ in range(30):
            began_s = time.monotonic()
            assert contains(store, "a") == b"\1"
            took_s.append(time.monotonic() - began_s)
        within.check(statistics.median(took_s), 0.05, "they stand in line outside")
        if limit == "-Sn":
            assert contains(connect(), "a") == b"\1", "the soft limit is no limit"
        for each in idle:
            each.close()
        eventually(lambda: connect().is_connected)
    finally:
        for each in idle:
            each.close()
        process.kill()
        process.wait()
