"""A disk that is slow, full, broken, another's or gone: the memory tier serves as before."""

from __future__ import annotations

import errno
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from time_limits import TimeLimits

from cornplug.config import StoreConfig
from cornplug.private_paths import read_secret
from cornplug.store.base import Tier
from cornplug.store.client import PoolStore
from cornplug.store.daemon.server import StoreServer
from cornplug.store.disk import disk_tier
from cornplug.store.disk.segment_files import OpenedDisk, open_disk

from ..conftest import answers, eventually
from .disk_stage import KIB, MIB, disk_of, end, get, payload_of, put, scanned, tier_of, written

Serve = Callable[..., StoreServer]
Connect = Callable[..., PoolStore]
Start = Callable[..., "subprocess.Popen[str]"]


def test_disk_tier_damaged_record_is_a_miss_once(connect: Connect, start_daemon: Start, folder: Path) -> None:
    daemon = start_daemon("--disk", str(folder))
    store = connect()
    put(store, "a", 100 * KIB)
    put(store, "b", 100 * KIB)
    eventually(lambda: written(store, 2))
    end(daemon)
    (segment,) = folder.glob("segment-*")
    data = bytearray(segment.read_bytes())
    data[50 * KIB] ^= 1  # in the first record's payload
    segment.write_bytes(data)
    start_daemon("--disk", str(folder))
    eventually(lambda: written(store, 2))
    assert [get(store, "a"), get(store, "b")].count(None) == 1
    stat = disk_of(store)
    assert (stat.entries, stat.reads) == (1, {"damaged": 1, "read": 1})
    lost = "a" if get(store, "a") is None else "b"
    assert tier_of(store, lost) == Tier.ABSENT, "no reader waits for it again"
    put(store, lost, 100 * KIB)
    eventually(lambda: written(store, 2))


def test_disk_tier_of_another_secret_finds_nothing(
    connect: Connect, start_daemon: Start, folder: Path, store_config: StoreConfig
) -> None:
    daemon = start_daemon("--disk", str(folder))
    store = connect()
    put(store, "a")
    end(daemon)
    store.close()
    store_config.secret_file.write_bytes(b"o" * 32)
    start_daemon("--disk", str(folder))
    other = connect()
    eventually(lambda: scanned(other))
    assert (disk_of(other).entries, get(other, "a")) == (0, None)


def test_disk_tier_slow_disk_drops_writes_and_delays_no_answer(
    serve_in_thread: Serve, connect: Connect, folder: Path, store_config: StoreConfig, within: TimeLimits
) -> None:
    """At 100 KiB/s a store of 1 MiB evicts entries long before their turn."""
    secret = read_secret(store_config.secret_file)
    disk = open_disk(folder, secret, size_bytes=64 * MIB, write_bytes_s=100 * KIB)
    serve_in_thread(size_bytes=MIB, disk=disk)
    with within(30, "40 writes at that pace take 40 s"):
        store = connect()
        for name in range(40):
            put(store, name, 100 * KIB)
    eventually(lambda: disk_of(store).writes.get("gone", 0) > 0, within_s=60)
    assert get(store, 39) == payload_of(39, 100 * KIB)


def test_disk_tier_long_queue_refuses_the_newest_until_it_is_read(
    serve_in_thread: Serve, connect: Connect, disk: OpenedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "MAX_QUEUED", 0)
    serve_in_thread(size_bytes=MIB, disk=disk)
    store = connect()
    put(store, "a")
    assert disk_of(store).writes == {"dropped": 1}
    monkeypatch.setattr(disk_tier, "MAX_QUEUED", 10)
    assert get(store, "a") is not None
    eventually(lambda: written(store, 1))


@pytest.mark.parametrize(
    ("number", "outcome"),
    [(errno.ENOSPC, "disk_full"), (errno.EROFS, "disk_readonly"), (errno.EIO, "disk_error")],
)
def test_disk_tier_disk_that_refuses_writes_costs_the_disk_only(
    serve_in_thread: Serve, connect: Connect, disk: OpenedDisk, monkeypatch: pytest.MonkeyPatch,
    number: int, outcome: str,
) -> None:  # fmt: skip
    refusing = True
    write = disk.files.write

    def refuse(*args: object, **kwargs: object) -> object:
        if refusing:
            raise OSError(number, "refused")
        return write(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_tier, "RETRY_S", 0.2)
    monkeypatch.setattr(type(disk.files), "write", lambda self, *a, **k: refuse(*a, **k))
    serve_in_thread(size_bytes=MIB, disk=disk)
    store = connect()
    put(store, "a")
    eventually(lambda: disk_of(store).writes.get(outcome, 0) > 0)
    assert get(store, "a") == payload_of("a", 20 * KIB)
    refusing = False

    def read_and_written() -> bool:
        get(store, "a")
        return written(store, 1)

    eventually(read_and_written)


def test_disk_tier_folder_that_goes_away_costs_the_disk_only(
    serve_in_thread: Serve, connect: Connect, folder: Path, store_config: StoreConfig
) -> None:
    disk = open_disk(folder, read_secret(store_config.secret_file), size_bytes=4 * MIB)
    serve_in_thread(size_bytes=4 * MIB, disk=disk)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    store = connect()
    for name in range(4):
        put(store, name)
    eventually(lambda: disk_of(store).writes.get("disk_error", 0) > 0)
    assert get(store, 3) == payload_of(3, 20 * KIB)


def test_disk_tier_folder_of_a_running_daemon_is_refused(
    connect: Connect, start_daemon: Start, folder: Path, store_config: StoreConfig, short_path: Path
) -> None:
    start_daemon("--disk", str(folder))
    second = start_daemon("--disk", str(folder), "--socket", str(short_path / "t.sock"), wait=False)
    assert second.wait(20) == 2
    assert second.stderr is not None
    assert "is in use by another store" in second.stderr.read()
    third = short_path / "u.sock"
    start_daemon(
        "--disk", str(folder), "--socket", str(third), "--detach", "--idle-exit-s", "1", wait=False
    )  # fmt: skip
    eventually(lambda: answers(third))


def test_disk_tier_ended_client_sock_is_not_its_descriptor(
    serve_in_thread: Serve, connect: Connect, disk: OpenedDisk, store_config: StoreConfig
) -> None:
    """The loop tells the disk's results from clients that send nonsense."""
    serve_in_thread(size_bytes=MIB, disk=disk)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.connect(str(store_config.socket))
        raw.sendall(b"nonsense" * 100)
    store = connect()
    put(store, "a")
    eventually(lambda: written(store, 1))
