"""The bytes of a record on disk: a header in clear, then the sealed entry. Pure: no I/O, no keys.

    magic "CPDR" | u16 version | u16 state | u64 payload bytes | u32 header bytes of the entry ("meta") |
    u16 app bytes | f64 seconds of recomputation | f64 time of writing (Unix) | 32-byte key | 16-byte salt |
    app | 16-byte tag of all the above with state 0
    sealed meta | sealed chunk of the payload ... | zeros up to a multiple of 4 KiB

All integers are little-endian. Records begin at multiples of 4 KiB, so that one damaged header hides one
record and not those behind it. The tag is keyed by the store's secret: a scan takes no header for its own
that another secret has made. `state` is the only field that is ever written again: 0 becomes 1 when the
entry is deleted.

Each sealed piece is its AES-256-GCM ciphertext and 16 bytes of tag, with the header (state 0) as associated
data and its number as nonce, under a key that only this record has (`record_seal.py`). Chunks have
CHUNK_BYTES of payload, so that a part of a payload can be read and verified alone.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

ALIGN_BYTES: Final = 4096
CHUNK_BYTES: Final = 1 << 20
TAG_BYTES: Final = 16
SALT_BYTES: Final = 16
MAGIC: Final = b"CPDR"
VERSION: Final = 1
STATE_AT: Final = 6
"""Where a record has its state."""
DEAD: Final = b"\x01\x00"
_FIXED: Final = struct.Struct("<4sHHQIHdd32s16s")
_MOST_APP_BYTES: Final = 1024
MOST_HEADER_BYTES: Final = _FIXED.size + _MOST_APP_BYTES + TAG_BYTES
"""A header is no longer, and within the first ALIGN_BYTES of its record."""
_MOST_META_BYTES: Final = 1 << 24

Authenticate = Callable[[bytes], bytes]
"""The tag of a header's bytes."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record says of its entry in clear."""

    key: bytes
    app: str
    payload_bytes: int
    meta_bytes: int
    cost_s: float
    written_s: float
    """Unix time: entries of a namespace with a time to live end by it after a restart too."""
    salt: bytes
    dead: bool = False

    @property
    def header_bytes(self) -> int:
        """Of the header with its tag."""
        return _FIXED.size + len(self.app.encode()) + TAG_BYTES

    @property
    def chunks(self) -> int:
        """Sealed chunks of the payload."""
        return -(-self.payload_bytes // CHUNK_BYTES)

    @property
    def used_bytes(self) -> int:
        """Of the record without the zeros behind it."""
        sealed = self.meta_bytes + self.payload_bytes + TAG_BYTES * (1 + self.chunks)
        return self.header_bytes + sealed

    @property
    def record_bytes(self) -> int:
        """Of the record."""
        return -(-self.used_bytes // ALIGN_BYTES) * ALIGN_BYTES

    def chunk_at(self, number: int) -> tuple[int, int]:
        """(offset in the record, bytes with the tag) of a chunk of the payload."""
        start = self.header_bytes + self.meta_bytes + TAG_BYTES + number * (CHUNK_BYTES + TAG_BYTES)
        return start, min(CHUNK_BYTES, self.payload_bytes - number * CHUNK_BYTES) + TAG_BYTES


def encode_record_header(header: RecordHeader, authenticate: Authenticate) -> bytes:
    """The header's bytes with its tag, state 0. Raises ValueError when a field does not fit."""
    app = header.app.encode()
    if len(app) > _MOST_APP_BYTES or header.meta_bytes > _MOST_META_BYTES:
        raise ValueError(f"an app of {len(app)} bytes, a header of {header.meta_bytes} bytes")
    fields = (header.payload_bytes, header.meta_bytes, len(app), header.cost_s, header.written_s)
    body = _FIXED.pack(MAGIC, VERSION, 0, *fields, header.key, header.salt) + app
    return body + authenticate(body)


def decode_record_header(data: bytes, authenticate: Authenticate) -> RecordHeader | None:
    """The header at the begin of `data`; None where none is whole, of this format and of this secret."""
    if len(data) < _FIXED.size or data[:4] != MAGIC:
        return None
    _, version, state, payload_bytes, meta_bytes, app_bytes, cost_s, written_s, key, salt = (
        _FIXED.unpack_from(data)
    )
    end = _FIXED.size + app_bytes
    if version != VERSION or app_bytes > _MOST_APP_BYTES or len(data) < end + TAG_BYTES:
        return None
    body = data[:STATE_AT] + b"\0\0" + data[STATE_AT + 2 : end]
    if authenticate(body) != data[end : end + TAG_BYTES]:
        return None
    app = data[_FIXED.size : end].decode(errors="replace")
    if not math.isfinite(cost_s) or not math.isfinite(written_s):
        return None
    return RecordHeader(key, app, payload_bytes, meta_bytes, cost_s, written_s, salt, dead=state != 0)
