"""Entries of the soak: key, size and bytes follow from seed and number, so that any reader can check them."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

KEYS: Final = 400
SIZES: Final = (64, 1_000, 4_096, 65_536, 300_000, 1 << 20, 5 << 20, 20 << 20)
"""In bytes, from a header's worth to a page of a large model."""
_ODDS: Final = (0.15, 0.15, 0.15, 0.2, 0.15, 0.12, 0.06, 0.02)


def key_of(seed: int, number: int) -> bytes:
    """The key of an entry."""
    return hashlib.blake2b(f"soak {seed} {number}".encode(), digest_size=32).digest()


def size_of(key: bytes) -> int:
    """Bytes of the payload under this key, one of SIZES."""
    at = int.from_bytes(key[:4], "little") / 2**32
    for size, odds in zip(SIZES, _ODDS, strict=True):
        if at < odds:
            return size
        at -= odds
    return SIZES[-1]


def payload_of(key: bytes) -> bytes:
    """The payload under this key."""
    return np.random.Generator(np.random.PCG64(int.from_bytes(key, "little"))).bytes(size_of(key))
