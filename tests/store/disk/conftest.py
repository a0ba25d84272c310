"""A folder for a disk, and the disk there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from cornplug.config import StoreConfig
from cornplug.private_paths import read_secret
from cornplug.store.disk.segment_files import FoundRecord, OpenedDisk, SegmentFiles, open_disk

from .disk_stage import MIB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def disk(folder: Path, store_config: StoreConfig) -> OpenedDisk:
    return open_disk(folder, read_secret(store_config.secret_file), size_bytes=64 * MIB)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Scans of all segments but the newest one are not over until this event."""
    opened, scan = Event(), SegmentFiles.scan

    def slow(files: SegmentFiles, segment: int) -> Iterator[FoundRecord | None]:
        if segment != files.list_segments()[-1][0]:
            while not opened.is_set():
                time.sleep(1e-3)
                yield None
        yield from scan(files, segment)

    monkeypatch.setattr(SegmentFiles, "scan", slow)
    yield opened
    opened.set()
