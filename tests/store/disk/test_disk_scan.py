"""While a daemon looks for the records of an earlier one it reads and writes entries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from cornplug.config import StoreConfig
from cornplug.private_paths import read_secret
from cornplug.store.client import PoolStore
from cornplug.store.daemon.server import StoreServer
from cornplug.store.disk.record_format import RecordHeader, new_salt
from cornplug.store.disk.segment_files import OpenedDisk, SegmentFiles, open_disk
from cornplug.testing.store import DEADLINE_S, key_of

from ..conftest import end_server, eventually
from .disk_stage import KIB, MIB, disk_of, get, live, payload_of, put, written

Connect = Callable[..., PoolStore]
Serve = Callable[..., StoreServer]


@pytest.fixture
def restarted(
    gate: Event, folder: Path, serve_in_thread: Serve, connect: Connect, store_config: StoreConfig
) -> PoolStore:
    """A client of a daemon that has begun to look at 4 segments, which have 2 entries each."""

    def opened() -> OpenedDisk:
        return open_disk(folder, read_secret(store_config.secret_file), size_bytes=8 * MIB)

    first, store = serve_in_thread(size_bytes=8 * MIB, disk=opened()), connect()
    for name in range(8):
        put(store, name, 400 * KIB)
    eventually(lambda: written(store, 8))
    end_server(first, store_config.socket)
    eventually(lambda: not store.is_connected)
    serve_in_thread(size_bytes=8 * MIB, disk=opened())
    eventually(lambda: store.is_connected)
    return store


def test_disk_scan_waits_for_recalls(restarted: PoolStore) -> None:
    eventually(lambda: disk_of(restarted).entries == 2)
    assert get(restarted, 7) == payload_of(7, 400 * KIB)
    assert disk_of(restarted).scanning


def test_disk_writes_go_on_during_a_scan(restarted: PoolStore, gate: Event) -> None:
    put(restarted, "new", KIB)
    eventually(lambda: disk_of(restarted).writes == {"written": 1})
    assert disk_of(restarted).scanning
    gate.set()
    eventually(lambda: written(restarted, 9))


def test_disk_entry_written_again_during_a_scan_has_one_record(
    restarted: PoolStore, gate: Event, folder: Path, store_config: StoreConfig
) -> None:
    put(restarted, 0, 400 * KIB)
    eventually(lambda: disk_of(restarted).writes == {"written": 1})
    gate.set()
    eventually(lambda: written(restarted, 8))
    assert restarted.delete([key_of(0)], deadline_s=DEADLINE_S) == 1
    eventually(lambda: written(restarted, 7))

    def left() -> set[bytes]:
        keys = set()
        for file in folder.glob("segment-*"):
            number = int(file.name[-8:])
            keys |= {found.header.key for found in live(copy, number)}
        return keys

    # The daemon has the folder's lock: this copy of its files shares their bytes.
    copy_folder = folder.parent / "copy"
    copy_folder.mkdir(mode=0o700)
    for file in folder.glob("segment-*"):
        os.link(file, copy_folder / file.name)
    copy = SegmentFiles(copy_folder, read_secret(store_config.secret_file), setting="store.disk_path")
    eventually(lambda: left() == {key_of(name) for name in range(1, 8)})
    copy.close()


def test_segment_scan_skips_bytes_without_a_header_fast(
    folder: Path, store_config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, reads, pread = SegmentFiles(folder, b"s" * 32, setting="store.disk_path"), list[int](), os.pread
    files.create(1)
    at = 64 * MIB
    header = RecordHeader(key_of("a"), "a", 7, 0, 0.0, 0.0, new_salt())
    files.write(1, at, header, b"", memoryview(b"payload"))

    def counted(fd: int, size: int, offset: int) -> bytes:
        reads.append(size)
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert [found.offset for found in live(files, 1)] == [at]
    assert len(reads) < 200
    files.close()
