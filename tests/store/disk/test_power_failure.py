"""What a power failure leaves: all that was written and nothing that was deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cornplug.config import StoreConfig
from cornplug.private_paths import read_secret
from cornplug.store.base import PurgeRule
from cornplug.store.client import PoolStore
from cornplug.store.daemon.server import StoreServer
from cornplug.store.disk.segment_files import OpenedDisk, SegmentFiles
from cornplug.testing.store import DEADLINE_S, key_of

from ..conftest import eventually
from .disk_stage import KIB, MIB, live, put, written


class Device:
    """What a disk has of a folder: a file's content as of its last sync, at the earliest as of `took_all`."""

    def __init__(self, folder: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self.target = folder, target
        self._sync = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self._fdatasync)

    def took_all(self) -> None:
        """The device has taken everything that was written until now."""
        self.target.mkdir(mode=0o700)
        for file in self._folder.glob("segment-*"):
            shutil.copy(file, self.target)

    def _fdatasync(self, fd: int) -> None:
        self._sync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if self.target.exists() and path.parent == self._folder:
            shutil.copy(path, self.target)

    def keys(self, secret: bytes) -> set[bytes]:
        """Keys of the entries that a daemon finds after a power failure now."""
        files = SegmentFiles(self.target, secret, setting="store.disk_path")
        found = {one.header.key for number, _ in files.list_segments() for one in live(files, number)}
        files.close()
        return found


@pytest.mark.parametrize("how", ["delete", "purge"])
def test_power_failure_brings_no_deleted_entry_back(
    serve_in_thread: Callable[..., StoreServer],
    connect: Callable[..., PoolStore],
    disk: OpenedDisk,
    folder: Path,
    tmp_path: Path,
    store_config: StoreConfig,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    device = Device(folder, tmp_path / "device", monkeypatch)
    secret = read_secret(store_config.secret_file)
    serve_in_thread(size_bytes=MIB, disk=disk)
    store = connect()
    for name, app in (("a", "chat"), ("b", "chat"), ("kept", "docs")):
        put(store, name, KIB, app=app)
    eventually(lambda: written(store, 3))
    device.took_all()
    assert device.keys(secret) == {key_of("a"), key_of("b"), key_of("kept")}
    if how == "delete":
        assert store.delete([key_of("a"), key_of("b")], deadline_s=DEADLINE_S) == 2
    else:
        assert store.purge(PurgeRule(app="chat"), deadline_s=DEADLINE_S).entries == 2
    eventually(lambda: device.keys(secret) == {key_of("kept")}, within_s=10)


def test_power_failure_brings_no_dropped_segment_back(
    folder: Path, store_config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entries may have been deleted since it was dropped."""
    synced: list[str] = []
    sync = os.fsync

    def fsync(fd: int) -> None:
        sync(fd)
        synced.extend(os.listdir(fd))

    files = SegmentFiles(folder, read_secret(store_config.secret_file), setting="store.disk_path")
    files.create(1)
    monkeypatch.setattr(os, "fsync", fsync)
    files.drop(1)
    files.close()
    assert synced == ["lock"]
