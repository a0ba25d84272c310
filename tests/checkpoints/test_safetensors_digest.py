"""Safetensors files: damage is told, never read past, and digests are of the raw bytes."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from expected_errors import expect_error
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cornplug.checkpoints import safetensors_digest
from cornplug.checkpoints.safetensors_digest import MAX_HEADER_BYTES, TensorEntry, read_header, tensor_digests
from cornplug.errors import CheckpointError
from devkit.checkpoints import bare


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


def test_safetensors_digest_agrees_with_the_library(tmp_path: Path) -> None:
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
def test_safetensors_digest_inconsistent_header_is_refused(
    tmp_path: Path, header: object, data: bytes
) -> None:
    with expect_error(CheckpointError, reason="bad_header"):
        read_header(_file(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("length", [3, 64, MAX_HEADER_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_safetensors_digest_oversized_header_costs_no_memory(tmp_path: Path, length: int) -> None:
    path = _file(tmp_path / "x.safetensors", b"{}", length=length)
    if length == MAX_HEADER_BYTES + 1:  # a file that is really as long: sparse
        os.truncate(path, length + 64)
    tracemalloc.start()
    with expect_error(CheckpointError, reason="bad_header"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.integers(0, 400))
@example(b"", 0)
def test_safetensors_digest_damaged_header_never_changes_tensors_silently(
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
def test_safetensors_digest_truncated_file_is_an_error(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    bare.write_safetensors(path, {"a": bare.bare("a")})
    os.truncate(path, size)
    with pytest.raises(CheckpointError):
        read_header(path)


def test_safetensors_digest_absent_file_is_an_error(tmp_path: Path) -> None:
    with expect_error(CheckpointError, reason="unreadable"):
        read_header(tmp_path / "absent.safetensors")
    with expect_error(CheckpointError, reason="unreadable"):
        tensor_digests({tmp_path / "absent.safetensors": {"a": TensorEntry("F32", (1,), 0, 4)}})


# --- digests ---


def test_safetensors_digest_is_sha256_for_any_piece_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_digest, "_PIECE_BYTES", 7)
    tensors = {name: bare.bare(name, shape=(5, n)) for n, name in enumerate("abc")}
    path = tmp_path / "x.safetensors"
    bare.write_safetensors(path, tensors)
    digests = tensor_digests({path: read_header(path)})[path]
    assert digests == {name: hashlib.sha256(data).digest() for name, (_, _, data) in tensors.items()}


def test_safetensors_digest_file_shrinking_meanwhile_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    bare.write_safetensors(path, {"a": bare.bare("a")})
    entries = read_header(path)
    os.truncate(path, path.stat().st_size - 1)
    with expect_error(CheckpointError, reason="changed", match="'a'"):
        tensor_digests({path: entries})


def test_safetensors_digest_file_changing_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    bare.write_safetensors(path, {"a": bare.bare("a")})
    original = safetensors_digest._hash_tensors

    def meanwhile(*args: Any) -> dict[str, bytes]:
        out = original(*args)
        os.utime(path, ns=(1, 1))
        return out

    monkeypatch.setattr(safetensors_digest, "_hash_tensors", meanwhile)
    with expect_error(CheckpointError, reason="changed"):
        tensor_digests({path: read_header(path)})


def test_safetensors_digest_only_long_reading_shows_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if on a terminal
    path = tmp_path / "big-file.safetensors"
    bare.write_safetensors(path, {"a": bare.bare("a")})
    tensor_digests({path: read_header(path)})
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(safetensors_digest, "_SHOW_PROGRESS_BYTES", 0)
    tensor_digests({path: read_header(path)})
    shown = capsys.readouterr()
    assert "reading big-file.safetensors" in shown.err
    assert shown.out == ""
