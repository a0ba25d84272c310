"""Digests kept by file: a host reads a file once, and never takes one content for another."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cornplug.checkpoints import safetensors_digest
from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.safetensors_digest import read_header, tensor_digests
from cornplug.private_paths import cache_dir
from devkit.checkpoints import bare


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The names of the tensors read in this test's folder, one list a time.

    A test before it in this process may have left a thread that still reads a checkpoint of its own.
    """
    seen: list[list[str]] = []
    original = safetensors_digest._hash_tensors

    def counted(path: Path, entries: Any, advance: Any) -> dict[str, bytes]:
        if path.is_relative_to(tmp_path):
            seen.append(sorted(entries))
        return original(path, entries, advance)

    monkeypatch.setattr(safetensors_digest, "_hash_tensors", counted)
    return seen


@pytest.fixture
def old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose time stamps may be trusted."""
    path = tmp_path / "old.safetensors"
    bare.write_safetensors(path, {"a": bare.bare("a"), "b": bare.bare("b")})
    monkeypatch.setattr(safetensors_digest, "_MIN_STABLE_AGE_S", -1.0)
    return path


def test_fingerprint_cache_cached_file_is_not_read_again(old_file: Path, reads: list[list[str]]) -> None:
    entries = read_header(old_file)
    first = tensor_digests({old_file: {"a": entries["a"]}})[old_file]
    both = tensor_digests({old_file: entries})[old_file]
    assert tensor_digests({old_file: entries})[old_file] == both
    assert both["a"] == first["a"]
    assert reads == [["a"], ["b"]]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"identity":"x","sha256":{}}', b"\xff" * 9])
def test_fingerprint_cache_damaged_is_ignored_and_rewritten(
    old_file: Path, reads: list[list[str]], damage: bytes
) -> None:
    entries = read_header(old_file)
    before = tensor_digests({old_file: entries})
    (slot,) = (cache_dir() / "fingerprints").glob("*.json")
    whole = slot.read_bytes()
    slot.write_bytes(damage)
    assert tensor_digests({old_file: entries}) == before
    assert slot.read_bytes() == whole
    assert len(reads) == 2


@pytest.mark.parametrize("digest", ["zz", "ab", ""])
def test_fingerprint_cache_wrong_digest_length_is_ignored(
    old_file: Path, reads: list[list[str]], digest: str
) -> None:
    entries = read_header(old_file)
    before = tensor_digests({old_file: entries})
    (slot,) = (cache_dir() / "fingerprints").glob("*.json")
    cached = json.loads(slot.read_bytes())
    cached["sha256"]["a"] = digest
    slot.write_text(json.dumps(cached))
    assert tensor_digests({old_file: entries}) == before
    assert len(reads) == 2


def test_fingerprint_cache_fresh_file_is_not_cached(tmp_path: Path, reads: list[list[str]]) -> None:
    path = tmp_path / "fresh.safetensors"
    bare.write_safetensors(path, {"a": bare.bare("a")})
    for _ in range(2):
        tensor_digests({path: read_header(path)})
    assert len(reads) == 2


def test_fingerprint_cache_touched_file_is_read_again(old_file: Path, reads: list[list[str]]) -> None:
    entries = read_header(old_file)
    tensor_digests({old_file: entries})
    os.utime(old_file)
    tensor_digests({old_file: entries})
    assert len(reads) == 2


def test_fingerprint_cache_hub_blob_goes_by_its_name(tmp_path: Path, reads: list[list[str]]) -> None:
    """Fresh or moved to another cache folder: what is named by its content is read once."""
    paths = []
    for i in range(2):
        blob = tmp_path / str(i) / "blobs" / ("ab" * 32)
        blob.parent.mkdir(parents=True)
        bare.write_safetensors(blob, {"a": bare.bare("a")})
        link = tmp_path / str(i) / "model.safetensors"
        link.symlink_to(blob)
        paths.append(link)
    seen = [tensor_digests({path: read_header(path)})[path] for path in paths]
    assert seen[0] == seen[1]
    assert len(reads) == 1


_CLASS = "vision_tower.vision_model.embeddings.class_embedding"


def _llava(folder: Path) -> Checkpoint:
    return Checkpoint.open(str(bare.write(folder, bare.llava_tensors())))


def _many_fingerprints(folder: str, count: Any, start: Any) -> None:
    original = safetensors_digest._hash_tensors

    def counted(path: Path, entries: Any, advance: Any) -> dict[str, bytes]:
        with count.get_lock():
            count.value += 1
        time.sleep(0.1)  # long enough for the others to come by
        return original(path, entries, advance)

    safetensors_digest._hash_tensors = counted  # in a process of its own
    start.wait(30)
    Checkpoint.open(folder).fingerprint("tower")


def test_fingerprint_cache_of_many_processes_one_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_digest, "_MIN_STABLE_AGE_S", -1.0)
    _llava(tmp_path / "x")
    fork = multiprocessing.get_context("fork")
    count, start = fork.Value("i", 0), fork.Barrier(4)
    readers = [
        fork.Process(target=_many_fingerprints, args=(str(tmp_path / "x"), count, start)) for _ in range(4)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert [reader.exitcode for reader in readers] == [0] * 4
    assert count.value == 1
    assert len(list((cache_dir() / "fingerprints").glob("*.json"))) == 1


def test_fingerprint_cache_unwritable_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _llava(tmp_path / "x").fingerprint("tower")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert Checkpoint.open(str(tmp_path / "x")).fingerprint("tower") == before


def test_fingerprint_cache_rewritten_file_with_old_time_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_digest, "_MIN_STABLE_AGE_S", -1.0)
    checkpoint = _llava(tmp_path / "x")
    before = checkpoint.fingerprint("tower")
    file = tmp_path / "x" / "model.safetensors"
    stamp = file.stat()
    time.sleep(0.02)  # more than a tick of the file system's clock
    bare.write_safetensors(file, bare.llava_tensors() | {_CLASS: bare.bare("rewritten")})
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert Checkpoint.open(str(tmp_path / "x")).fingerprint("tower") != before


def test_fingerprint_cache_full_disk_costs_time_only(
    old_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    entries = read_header(old_file)
    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", full)
        first = tensor_digests({old_file: entries})
    assert "No space left" in caplog.text
    assert tensor_digests({old_file: entries}) == first
