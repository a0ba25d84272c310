"""A folder for a disk, and the disk there."""

from __future__ import annotations

from pathlib import Path

import pytest

from cornplug.config import StoreConfig
from cornplug.private_paths import read_secret
from cornplug.store.disk.open_disk import OpenedDisk, open_disk

from .disk_stage import MIB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def disk(folder: Path, store_config: StoreConfig) -> OpenedDisk:
    return open_disk(folder, read_secret(store_config.secret_file), size_bytes=64 * MIB)
