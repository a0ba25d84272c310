"""script/gpu-pack: GPU code that is blanked, the archive, and its size."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from devkit.gpu_pack import build, fatbin
from devkit.gpu_pack.fatbin import Pruned

CUBIN, PTX = 2, 1


def kernel(name: bytes, *, size: int = 64) -> bytes:
    return (b"\x7fELF.text." + name + b"\0").ljust(size, b"k")


def fat_binary(*images: tuple[int, int, bytes]) -> bytes:
    """A fat binary of (kind, chip, payload)."""
    body = b""
    for kind, chip, payload in images:
        head = struct.pack("<HHIQIII", kind, 0x101, 64, len(payload), 0, 0, 0) + struct.pack("<I", chip)
        body += head.ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(path: Path, section: bytes, *, name: bytes = b".nv_fatbin") -> Path:
    """A shared library with one section."""
    names = b"\0" + name + b"\0.shstrtab\0"
    start = 64
    table = start + len(section) + len(names)
    header = b"\x7fELF\x02\x01\x01".ljust(40, b"\0") + struct.pack("<Q", table)
    header = header.ljust(58, b"\0") + struct.pack("<HHH", 64, 3, 2)
    sections = [bytes(64)]
    for at, offset, size in ((1, start, len(section)), (1 + len(name) + 1, start + len(section), len(names))):
        sections.append(struct.pack("<IIQQQQ", at, 1, 0, 0, offset, size).ljust(64, b"\0"))
    path.write_bytes(header + section + names + b"".join(sections))
    return path


def test_gpu_code_for_other_chips_is_blanked(tmp_path: Path) -> None:
    kept, other, ptx = kernel(b"wanted"), kernel(b"other"), b"ptx text".ljust(64, b".")
    padding = bytes(8)
    section = fat_binary((CUBIN, 80, other), (CUBIN, 90, kept), (PTX, 90, ptx))
    file = library(tmp_path / "a.so", section + padding + fat_binary((CUBIN, 100, other)))
    before = file.read_bytes()
    assert fatbin.prune(file, 90) == Pruned(kept=64, blanked=3 * 64)
    after = file.read_bytes()
    assert len(after) == len(before)
    assert kept in after
    assert other not in after
    assert ptx not in after
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same.count(False) <= 3 * 64  # headers and the rest of the file stay


def test_gpu_code_with_named_kernels_is_blanked(tmp_path: Path) -> None:
    kept, dropped = kernel(b"attention_bfloat16_t"), kernel(b"attention_half_t")
    compressed = b"\x28\xb5\x2f\xfd half_t".ljust(64, b"z")
    file = library(
        tmp_path / "a.so", fat_binary(*((CUBIN, 90, data) for data in (kept, dropped, compressed)))
    )
    fatbin.prune(file, 90, drop=re.compile(rb"half_t"))
    after = file.read_bytes()
    assert kept in after
    assert dropped not in after
    assert compressed in after


def test_library_without_gpu_code_is_rejected(tmp_path: Path) -> None:
    file = library(tmp_path / "a.so", b"code", name=b".text")
    with pytest.raises(ValueError, match="no section"):
        fatbin.prune(file, 90)
    file.write_bytes(b"#!/bin/sh\n")
    with pytest.raises(ValueError, match="ELF"):
        fatbin.prune(file, 90)


def test_archive_and_checkout_above_limit_are_refused() -> None:
    checkout = 10 << 20
    assert build.size_problem(build.LIMIT_BYTES - checkout, checkout) is None
    problem = build.size_problem(build.LIMIT_BYTES - checkout + 1, checkout)
    assert problem is not None
    assert "--without-sglang" in problem


def test_archive_unpacks_to_what_was_packed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "site" / "__pycache__").mkdir(parents=True)
    (root / "site" / "__pycache__" / "a.pyc").write_bytes(b"left out")
    (root / "site" / "a.py").write_text("A = 1\n")
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o755)
    archive = tmp_path / "engines.tar.xz"
    build.compress(root, archive)
    unpack = [sys.executable, build.__file__.replace("build.py", "unpack.py"), archive, tmp_path / "out"]
    subprocess.run(unpack, check=True)
    found = {
        path.relative_to(tmp_path / "out"): path for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    assert {str(name) for name in found} == {"site/a.py", "run"}
    assert found[Path("site/a.py")].read_text() == "A = 1\n"
    assert found[Path("run")].stat().st_mode & 0o111


def test_every_packed_requirement_has_one_version() -> None:
    pinned = list(build.requirements())
    assert all(name and version for name, version in pinned)
    assert len({name for name, _ in pinned}) == len(pinned)
