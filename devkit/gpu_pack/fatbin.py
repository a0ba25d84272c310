"""GPU code inside shared libraries: blank what one kind of GPU never runs, so that it compresses to nothing.

Nothing in the library moves. Headers stay as they are and payloads become zeros, which CUDA's driver never
reads: it picks by the chip that a header names, and loads a module when one of its kernels is first launched.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SECTION: Final = ".nv_fatbin"
_MAGIC: Final = 0xBA55ED50
_CUBIN: Final = 2
_ELF: Final = b"\x7fELF"
_KERNEL: Final = re.compile(rb"\.text\.([A-Za-z0-9_]+)")


@dataclass(frozen=True, slots=True)
class Image:
    """One payload of a fat binary: machine code (a cubin) or PTX for one chip."""

    kind: int
    chip: int
    """Compute capability, as 90."""
    start: int
    """Offset in the file, in bytes."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """Bytes of GPU code that a library kept and lost."""

    kept: int
    blanked: int


def images(data: bytes | bytearray) -> Iterator[Image]:
    """The images of all fat binaries in a shared library. Raises ValueError for a library without any."""
    at, end = _section(data)
    while at + 16 <= end:
        magic, _, header, body = struct.unpack_from("<IHHQ", data, at)
        if magic != _MAGIC:
            at += 8  # padding between two fat binaries
            continue
        inner = at + header
        at += header + body
        while inner < at:
            kind, _, head, size = struct.unpack_from("<HHIQ", data, inner)
            (chip,) = struct.unpack_from("<I", data, inner + 28)
            yield Image(kind, chip, inner + head, size)
            inner += head + size


def prune(library: Path, chip: int, *, drop: re.Pattern[bytes] | None = None) -> Pruned:
    """Blank all of a library's GPU code but the machine code for `chip`, in place.

    PTX goes, too: kernels that are there as PTX alone (vLLM's for some quantised weights) fail when launched.

    Args:
        drop: Also blank images with a kernel whose mangled name matches. Compressed images are not searched.
    """
    data = bytearray(library.read_bytes())
    kept = blanked = 0
    for image in list(images(data)):
        end = image.start + image.size
        if (image.kind, image.chip) == (_CUBIN, chip) and not _has_kernel(data[image.start : end], drop):
            kept += image.size
        else:
            data[image.start : end] = bytes(image.size)
            blanked += image.size
    library.write_bytes(data)
    return Pruned(kept, blanked)


def _has_kernel(cubin: bytearray, name: re.Pattern[bytes] | None) -> bool:
    if name is None or not cubin.startswith(_ELF):
        return False
    return any(name.search(kernel) for kernel in set(_KERNEL.findall(cubin)))


def _section(data: bytes | bytearray) -> tuple[int, int]:
    """Where the fat binaries begin and end in a 64-bit ELF file."""
    if data[:4] != _ELF:
        raise ValueError("not an ELF file")
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, length in headers:
        start = strings + name
        if bytes(data[start : start + len(_SECTION) + 1]) == _SECTION.encode() + b"\0":
            return offset, offset + length
    raise ValueError(f"no section {_SECTION}: this library has no GPU code")
