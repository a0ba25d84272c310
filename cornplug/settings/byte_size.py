"""Parsing of sizes such as 64GiB, 512 MiB, 1.5GB or a number of bytes."""

from __future__ import annotations

import argparse
import re
from typing import Annotated, Final

from pydantic import BeforeValidator

_UNITS: Final = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip


def bytes_of(text: str) -> int:
    """Parse "4GiB", "512 MiB", "1.5GB" or "1048576" into bytes. Raises ValueError for any other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B|)\s*", text.upper())
    size_bytes = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size_bytes < 1:
        raise ValueError(f"{text!r} is not a size: write 64GiB, 512MiB or a number of bytes")
    return size_bytes


def parse_size(text: str) -> int:
    """Parse a size for argparse, which adds the name of the flag to the error."""
    try:
        return bytes_of(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _read(value: object) -> object:
    return bytes_of(value) if isinstance(value, str) else value


ByteSize = Annotated[int, BeforeValidator(_read)]
"""Number of bytes, for settings. Text can have a unit."""
