"""Adapters: equal bytes are one, and what may not be what the engine loaded is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from page_root_vectors import adapter

from cornplug.engine_common.lora_digests import LoraDigests, record_files
from cornplug.errors import CheckpointError


def refused(adapters: LoraDigests, path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        adapters.digest(path)
    return caught.value.reason


def test_lora_digests_equal_bytes_have_equal_digest(tmp_path: Path) -> None:
    one, same, other = (adapter(tmp_path / name) for name in "abc")
    (tmp_path / "c" / "adapter_model.safetensors").write_bytes(b"other")
    adapters = LoraDigests()
    assert adapters.digest(one) == adapters.digest(same) != adapters.digest(other)


@pytest.mark.parametrize("name", ["adapter_model-00002-of-00002.safetensors", "extra.safetensors"])
def test_lora_digests_several_weight_files_are_refused(tmp_path: Path, name: str) -> None:
    """SGLang would load them all, vLLM one: the same folder is two adapters."""
    path = adapter(tmp_path / "a")
    (tmp_path / "a" / name).write_bytes(b"more")
    assert refused(LoraDigests(), path) == "lora_files"


def test_lora_digests_second_weight_file_added_later_is_refused(tmp_path: Path) -> None:
    adapters, path = LoraDigests(), adapter(tmp_path / "a")
    adapters.digest(path)
    (tmp_path / "a" / "more.safetensors").write_bytes(b"more")
    assert refused(adapters, path) == "lora_files"


def test_lora_digests_file_changed_after_note_is_refused(tmp_path: Path) -> None:
    """Also where the digest was first asked for after the change."""
    adapters, path = LoraDigests(), adapter(tmp_path / "a")
    record_files(path)
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"retrained")
    assert refused(adapters, path) == "lora_changed"


def test_lora_digests_change_with_restored_mtime_is_refused(tmp_path: Path) -> None:
    adapters, path = LoraDigests(), adapter(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    adapters.digest(path)
    before = file.stat()
    with file.open("r+b") as f:  # the same size, the same inode
        f.write(b"x")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert refused(adapters, path) == "lora_changed"


def test_lora_digests_missing_files_are_refused(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a")
    adapters = LoraDigests()
    adapters.digest(path)
    shutil.rmtree(path)
    assert refused(adapters, path) == "lora"
    assert refused(LoraDigests(), str(tmp_path / "none")) == "lora"
