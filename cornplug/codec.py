"""Header of a payload: the payload's kind, key and shape, and checksums of its data.

The header is stored as an entry's `meta`, separate from the payload, so that several ranks can write a
payload in place:

    magic "CPLG" | u16 version | u8 kind | u8 dtype-name length | u8 dimensions | u8 zero |
    u16 segments | 32-byte key | dtype name | u64 dimension ... | u64 segment checksum ... |
    u64 checksum of all the above

If several ranks write a payload, each rank encodes the checksums of its part (`encode_partial_header`), and
`merge_partial_headers` creates the header from the parts. A part has this format:

    magic "CPPT" | u16 segments of the payload | u16 segments of this part | u16 index ... | a header
    as above, with only this part's checksums

All integers are little-endian. A payload consists of `segments` segments of equal size, each with its own
checksum (XXH3-64), so that a tensor-parallel rank verifies only the heads that it reads. Checksums detect
damage, but do not protect against an attacker. Only processes with the secret can compute keys.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import xxhash

from cornplug.errors import CodecError

MAGIC: Final = b"CPLG"
VERSION: Final = 1
_FIXED_FIELDS: Final = struct.Struct("<4sHBBBBH32s")
KEY_OFFSET: Final = _FIXED_FIELDS.size - 32
"""Offset of the key in a header, in bytes."""
PARTIAL_MAGIC: Final = b"CPPT"
_PARTIAL_FIELDS: Final = struct.Struct("<4sHH")

ITEM_BYTES: Final[Mapping[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Size in bytes of one value, for each dtype of embeddings and KV pages (torch's name without "torch.")."""


class PayloadKind(enum.IntEnum):
    EMBEDDING = 1
    FEATURE = 2
    KV_PAGE = 3


class PayloadHeader(msgspec.Struct, frozen=True):
    """Decoded header of a payload. `dtype` is torch's name without "torch." ("float32", "bfloat16")."""

    kind: PayloadKind
    key: bytes
    dtype: str
    shape: tuple[int, ...]
    checksums: tuple[int, ...]


def checksum(payload: bytes | memoryview) -> int:
    """Return the XXH3-64 of the bytes."""
    return xxhash.xxh3_64_intdigest(payload)


def expected_header_checksums(headers: Sequence[bytes]) -> list[int]:
    """Return, for each header, the checksum that an undamaged header ends with."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(header[:-8]) for header in headers]


def encode_header(header: PayloadHeader) -> bytes:
    """Encode a header. Raises CodecError if a field is too large for the format."""
    name = header.dtype.encode()
    if len(header.key) != 32 or len(name) > 255 or len(header.shape) > 255:
        raise CodecError(f"header does not fit its format: {header}", reason="codec")
    if not 1 <= len(header.checksums) <= 0xFFFF:
        raise CodecError(f"{len(header.checksums)} segments, must be between 1 and 65535", reason="codec")
    body = _FIXED_FIELDS.pack(
        MAGIC, VERSION, header.kind, len(name), len(header.shape), 0, len(header.checksums), header.key
    )
    body += name
    body += struct.pack(f"<{len(header.shape)}Q", *header.shape)
    body += struct.pack(f"<{len(header.checksums)}Q", *header.checksums)
    return body + struct.pack("<Q", checksum(body))


def decode_header(meta: bytes | memoryview, *, key: bytes) -> PayloadHeader:
    """Decode a header, and verify that it belongs to the entry `key`.

    Raises CodecError with reason "codec" (not a cornplug header, or damaged), "version" (format of another
    release) or "wrong_key" (header of another entry).
    """
    data = bytes(meta)
    if len(data) < _FIXED_FIELDS.size + 8 or data[:4] != MAGIC:
        raise CodecError("not a cornplug header", reason="codec")
    _, version, kind, name_len, dims, _, segments, found_key = _FIXED_FIELDS.unpack_from(data)
    if version != VERSION:
        raise CodecError(f"header version {version}, this release reads {VERSION}", reason="version")
    expected = _FIXED_FIELDS.size + name_len + 8 * dims + 8 * segments + 8
    if len(data) != expected or struct.unpack_from("<Q", data, expected - 8)[0] != checksum(data[:-8]):
        raise CodecError("header is damaged", reason="codec")
    if found_key != key:
        raise CodecError("header belongs to another key", reason="wrong_key")
    at = _FIXED_FIELDS.size + name_len
    try:
        named, dtype = PayloadKind(kind), data[_FIXED_FIELDS.size : at].decode()
    except ValueError as e:  # The checksum is correct, but another release wrote the header.
        raise CodecError(f"header is from another release: {e}", reason="version") from e
    return PayloadHeader(
        kind=named,
        key=found_key,
        dtype=dtype,
        shape=struct.unpack_from(f"<{dims}Q", data, at),
        checksums=struct.unpack_from(f"<{segments}Q", data, at + 8 * dims),
    )


def segment_checksums(meta: bytes) -> tuple[int, ...]:
    """Return the segments' checksums from a header that `decode_header` has validated."""
    segments = _FIXED_FIELDS.unpack_from(meta)[6]
    return struct.unpack_from(f"<{segments}Q", meta, len(meta) - 8 * segments - 8)


def encode_partial_header(
    kind: PayloadKind,
    key: bytes,
    dtype: str,
    shape: Sequence[int],
    segments: int,
    checksums: Mapping[int, int],
) -> bytes:
    """Encode one writer's part of a header, for a payload that several writers write.

    Args:
        segments: number of segments of the payload.
        checksums: index -> checksum, for the segments of this writer.

    Raises CodecError if a field is too large for the format.
    """
    if not checksums or not 1 <= segments <= 0xFFFF or not all(0 <= i < segments for i in checksums):
        raise CodecError(f"invalid part: segments {sorted(checksums)} of {segments}", reason="codec")
    header = PayloadHeader(kind, key, dtype, tuple(shape), tuple(checksums.values()))
    fixed = _PARTIAL_FIELDS.pack(PARTIAL_MAGIC, segments, len(checksums))
    return fixed + struct.pack(f"<{len(checksums)}H", *checksums) + encode_header(header)


def merge_partial_headers(partial_headers: Iterable[bytes], *, key: bytes) -> bytes:
    """Join the parts of the header for `key`. The result equals the header that a single writer would encode.

    Raises the errors of `decode_header`, and CodecError("parts") if parts contradict each other, overlap or
    do not cover all segments.
    """
    found: dict[int, int] = {}
    claims: set[tuple[PayloadKind, str, tuple[int, ...], int]] = set()
    for part in partial_headers:
        if len(part) < _PARTIAL_FIELDS.size or part[:4] != PARTIAL_MAGIC:
            raise CodecError("not a part of a cornplug header", reason="codec")
        _, total, count = _PARTIAL_FIELDS.unpack_from(part)
        at = _PARTIAL_FIELDS.size + 2 * count
        if len(part) < at:
            raise CodecError("part of a header is damaged", reason="codec")
        header = decode_header(part[at:], key=key)
        indices = struct.unpack_from(f"<{count}H", part, _PARTIAL_FIELDS.size)
        claims.add((header.kind, header.dtype, header.shape, total))
        if len(header.checksums) != count or not found.keys().isdisjoint(indices):
            raise CodecError("two parts contain the same segment", reason="parts")
        found.update(zip(indices, header.checksums, strict=True))
    if len(claims) != 1:
        raise CodecError(f"the parts belong to {len(claims)} different payloads", reason="parts")
    ((kind, dtype, shape, total),) = claims
    if sorted(found) != list(range(total)):
        raise CodecError(f"the parts contain only {len(found)} of {total} segments", reason="parts")
    return encode_header(PayloadHeader(kind, key, dtype, shape, tuple(found[i] for i in range(total))))


def verify_checksums(
    header: PayloadHeader, payload: memoryview, segments: Sequence[int] | None = None
) -> None:
    """Verify the checksums of a payload, or of only the given segments, against the header.

    Raises CodecError("corrupt") at the first segment whose checksum differs.
    """
    count = len(header.checksums)
    if payload.nbytes % count:
        raise CodecError(f"{payload.nbytes} bytes are not {count} equal segments", reason="corrupt")
    step = payload.nbytes // count
    for i in range(count) if segments is None else segments:
        if checksum(payload[i * step : (i + 1) * step]) != header.checksums[i]:
            raise CodecError(f"segment {i} of {count} is corrupt", reason="corrupt")
