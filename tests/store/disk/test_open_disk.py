"""A disk as the settings name it, and errors that say what to do."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from expected_errors import expect_error

from cornplug.errors import ConfigError
from cornplug.store.disk.segment_files import open_disk

SECRET = b"s" * 32


def test_open_disk_without_size_takes_half_of_what_is_free_beside_its_own(tmp_path: Path) -> None:
    about = os.statvfs(tmp_path)
    disk = open_disk(tmp_path / "tier", SECRET)
    free = about.f_bavail * about.f_frsize
    assert abs(disk.size_bytes - free // 2) < max(free // 10, 64 << 20)
    disk.files.close()
    with (tmp_path / "tier" / "segment-00000001").open("wb") as file:
        file.truncate(free)  # sparse: its size counts
    disk = open_disk(tmp_path / "tier", SECRET)
    assert disk.size_bytes > free * 9 // 10
    disk.files.close()


def test_open_disk_without_cryptography_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, *args: Any) -> Any:
        return None if name == "cryptography" else real(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with expect_error(ConfigError, field="store.disk_path", match=r"cornplug\[disk\]"):
        open_disk(tmp_path / "tier", SECRET)
    assert not (tmp_path / "tier").exists()


def test_open_disk_too_small_is_refused_and_folder_is_free_again(tmp_path: Path) -> None:
    with expect_error(ConfigError, field="store.disk_size_bytes"):
        open_disk(tmp_path / "tier", SECRET, size_bytes=4096)
    open_disk(tmp_path / "tier", SECRET, size_bytes=1 << 20, write_bytes_s=5).files.close()
