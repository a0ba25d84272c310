"""Safetensors files: damage is told, never read past, and a file is read once a host."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cornplug import tensor_files
from cornplug.checkpoint import Checkpoint
from cornplug.config import cache_dir
from cornplug.errors import CheckpointError
from cornplug.tensor_files import MAX_HEADER_BYTES, TensorEntry, read_header, tensor_digests
from cornplug.testing import bare_checkpoints as bare


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _file(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _row(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# --- headers ---


def test_agrees_with_the_safetensors_library(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    np = pytest.importorskip("numpy")
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.ones((), np.int64),
        "e": np.zeros((0, 4)),
    }
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "np"})
    entries = read_header(tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    assert {name: entry.shape for name, entry in entries.items()} == {"b": (2, 3), "a": (), "e": (0, 4)}
    assert {name: entry.dtype for name, entry in entries.items()} == {"b": "F32", "a": "I64", "e": "F64"}
    for name, entry in entries.items():
        assert content[entry.offset : entry.offset + entry.size_bytes] == arrays[name].tobytes()


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": _row(0, 8, [2])}, b"1234567"),
        ({"a": _row(0, 8, [2])}, b"123456789"),
        ({"a": _row(0, 8, [2]), "b": _row(4, 12, [2])}, bytes(12)),
        ({"a": _row(0, 8, [2]), "b": _row(0, 8, [2])}, bytes(8)),
        ({"a": _row(0, 4, [1]), "b": _row(8, 12, [1])}, bytes(12)),
        ({"a": _row(0, 8, [3])}, bytes(8)),
        ({"a": _row(8, 0, [2])}, bytes(8)),
        ({"a": _row(-8, 0, [2])}, bytes(8)),
        ({"a": _row(0, 8, [-1, -2])}, bytes(8)),
        ({"a": _row(0, 8, [1 << 62] * 16)}, bytes(8)),
        ({"a": _row(0, 8, [1] * 17 + [2])}, bytes(8)),
        ({"a": _row(0, 8, [2], "F31")}, bytes(8)),
        ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
        ({"a": _row(0, 8, [2]) | {"extra": 1}}, bytes(8)),
        ({"a": 1}, bytes(8)),
        ([], b""),
        (b"", b""),
        (b"{", b""),
        (b'{"\xff": 1}', b""),
        (b"[" * 200_000, b""),
        (b'{"a":' * 200_000, b""),
    ],
    ids=lambda v: None if isinstance(v, bytes) and len(v) < 20 else repr(v)[:40],
)
def test_a_header_that_does_not_add_up_is_refused(tmp_path: Path, header: object, data: bytes) -> None:
    with pytest.raises(CheckpointError, match="Download it again") as caught:
        read_header(_file(tmp_path / "x.safetensors", header, data))
    assert caught.value.reason == "bad_header"


@pytest.mark.parametrize("length", [3, 64, MAX_HEADER_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_an_oversized_header_costs_no_memory(tmp_path: Path, length: int) -> None:
    path = _file(tmp_path / "x.safetensors", b"{}", length=length)
    if length == MAX_HEADER_BYTES + 1:  # a file that is really as long: sparse
        os.truncate(path, length + 64)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="header of"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.integers(0, 400))
@example(b"", 0)
def test_any_damage_to_a_header_is_told_or_changes_nothing_silently(
    tmp_path: Path, noise: bytes, at: int
) -> None:
    """Overwrite anywhere: an error of ours, or a table that still fills the file exactly."""
    path = tmp_path / "x.safetensors"
    bare.write_safetensors(path, {"a": bare.bare("a"), "b": bare.bare("b", "F16")})
    content = path.read_bytes()
    path.write_bytes(content[:at] + noise + content[at + len(noise) :])
    try:
        entries = read_header(path)
    except CheckpointError:
        return
    at_byte = path.stat().st_size - sum(entry.size_bytes for entry in entries.values())
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.size_bytes)):
        assert entry.offset == at_byte
        at_byte += entry.size_bytes


@pytest.mark.parametrize("size", range(0, 90, 7))
def test_a_truncated_file_is_told(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    bare.write_safetensors(path, {"a": bare.bare("a")})
    os.truncate(path, size)
    with pytest.raises(CheckpointError):
        read_header(path)


def test_an_absent_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="cannot read"):
        tensor_digests({tmp_path / "absent.safetensors": {"a": TensorEntry("F32", (1,), 0, 4)}})


# --- digests ---


def test_digests_are_sha256_of_the_raw_bytes_whatever_the_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "_PIECE_BYTES", 7)
    tensors = {name: bare.bare(name, shape=(5, n)) for n, name in enumerate("abc")}
    path = tmp_path / "x.safetensors"
    bare.write_safetensors(path, tensors)
    digests = tensor_digests({path: read_header(path)})[path]
    assert digests == {name: hashlib.sha256(data).digest() for name, (_, _, data) in tensors.items()}


def test_a_file_that_shrinks_meanwhile_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    bare.write_safetensors(path, {"a": bare.bare("a")})
    entries = read_header(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="ended inside 'a'") as caught:
        tensor_digests({path: entries})
    assert caught.value.reason == "changed"


def test_a_file_that_changes_meanwhile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    bare.write_safetensors(path, {"a": bare.bare("a")})
    original = tensor_files._hash_tensors

    def meanwhile(*args: Any) -> dict[str, bytes]:
        out = original(*args)
        os.utime(path, ns=(1, 1))
        return out

    monkeypatch.setattr(tensor_files, "_hash_tensors", meanwhile)
    with pytest.raises(CheckpointError, match="changed while"):
        tensor_digests({path: read_header(path)})


def test_only_a_long_reading_shows_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if on a terminal
    path = tmp_path / "big-file.safetensors"
    bare.write_safetensors(path, {"a": bare.bare("a")})
    tensor_digests({path: read_header(path)})
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(tensor_files, "_SHOW_PROGRESS_BYTES", 0)
    tensor_digests({path: read_header(path)})
    shown = capsys.readouterr()
    assert "reading big-file.safetensors" in shown.err
    assert shown.out == ""


# --- a host reads a file once ---


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the tensors read, one list a time."""
    seen: list[list[str]] = []
    original = tensor_files._hash_tensors

    def counted(path: Path, entries: Any, advance: Any) -> dict[str, bytes]:
        seen.append(sorted(entries))
        return original(path, entries, advance)

    monkeypatch.setattr(tensor_files, "_hash_tensors", counted)
    return seen


@pytest.fixture
def old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose time stamps may be trusted."""
    path = tmp_path / "old.safetensors"
    bare.write_safetensors(path, {"a": bare.bare("a"), "b": bare.bare("b")})
    monkeypatch.setattr(tensor_files, "_SETTLED_S", -1.0)
    return path


def test_only_what_no_cache_holds_is_read(old_file: Path, reads: list[list[str]]) -> None:
    entries = read_header(old_file)
    first = tensor_digests({old_file: {"a": entries["a"]}})[old_file]
    both = tensor_digests({old_file: entries})[old_file]
    assert tensor_digests({old_file: entries})[old_file] == both
    assert both["a"] == first["a"]
    assert reads == [["a"], ["b"]]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"identity":"x","sha256":{}}', b"\xff" * 9])
def test_a_damaged_cache_is_ignored_and_rewritten(
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
def test_a_cache_with_a_wrong_digest_length_is_ignored(
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


def test_a_fresh_file_is_not_cached(tmp_path: Path, reads: list[list[str]]) -> None:
    path = tmp_path / "fresh.safetensors"
    bare.write_safetensors(path, {"a": bare.bare("a")})
    for _ in range(2):
        tensor_digests({path: read_header(path)})
    assert len(reads) == 2


def test_a_touched_file_is_read_again(old_file: Path, reads: list[list[str]]) -> None:
    entries = read_header(old_file)
    tensor_digests({old_file: entries})
    os.utime(old_file)
    tensor_digests({old_file: entries})
    assert len(reads) == 2


def test_a_blob_of_the_hub_s_cache_goes_by_its_name(tmp_path: Path, reads: list[list[str]]) -> None:
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
    original = tensor_files._hash_tensors

    def counted(path: Path, entries: Any, advance: Any) -> dict[str, bytes]:
        with count.get_lock():
            count.value += 1
        time.sleep(0.1)  # long enough for the others to come by
        return original(path, entries, advance)

    tensor_files._hash_tensors = counted  # in a process of its own
    start.wait(30)
    Checkpoint.open(folder).fingerprint("tower")


def test_of_many_processes_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "_SETTLED_S", -1.0)
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


def test_an_unwritable_cache_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _llava(tmp_path / "x").fingerprint("tower")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert Checkpoint.open(str(tmp_path / "x")).fingerprint("tower") == before


def test_a_file_rewritten_with_its_time_set_back_is_not_taken_for_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "_SETTLED_S", -1.0)
    checkpoint = _llava(tmp_path / "x")
    before = checkpoint.fingerprint("tower")
    file = tmp_path / "x" / "model.safetensors"
    stamp = file.stat()
    time.sleep(0.02)  # more than a tick of the file system's clock
    bare.write_safetensors(file, bare.llava_tensors() | {_CLASS: bare.bare("rewritten")})
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert Checkpoint.open(str(tmp_path / "x")).fingerprint("tower") != before


def test_a_full_disk_costs_time_only(old_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    entries = read_header(old_file)
    monkeypatch.setattr(os, "replace", full)
    first = tensor_digests({old_file: entries})
    assert "No space left" in caplog.text
    monkeypatch.undo()
    assert tensor_digests({old_file: entries}) == first
