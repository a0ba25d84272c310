"""The envelope: frozen bytes, and no damage that goes unseen."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from expected_errors import expect_error
from hypothesis import given
from hypothesis import strategies as st

from cornplug import codec
from cornplug.codec import (
    PayloadHeader,
    PayloadKind,
    checksum,
    decode_header,
    encode_header,
    verify_checksums,
)
from cornplug.errors import CodecError

GOLDEN = json.loads((Path(__file__).parent / "golden" / "codec.json").read_text())
KEY = bytes(range(32))
PAYLOAD = bytes(range(240))
HEADER = PayloadHeader(
    PayloadKind.EMBEDDING, KEY, "bfloat16", (6, 20), (checksum(PAYLOAD[:120]), checksum(PAYLOAD[120:]))
)
META = encode_header(HEADER)

headers = st.builds(
    PayloadHeader,
    kind=st.sampled_from(PayloadKind),
    key=st.binary(min_size=32, max_size=32),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "uint8", ""]),
    shape=st.lists(st.integers(0, (1 << 64) - 1), max_size=5).map(tuple),
    checksums=st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=5).map(tuple),
)


@pytest.mark.parametrize("row", GOLDEN, ids=[row["header"]["kind"] for row in GOLDEN])
def test_codec_headers_equal_golden_bytes(row: dict[str, object]) -> None:
    h = dict(row["header"])  # type: ignore[call-overload]
    header = PayloadHeader(
        PayloadKind[h["kind"]], bytes.fromhex(h["key"]), h["dtype"], tuple(h["shape"]), tuple(h["checksums"])
    )
    assert encode_header(header).hex() == row["meta"]
    assert decode_header(bytes.fromhex(str(row["meta"])), key=header.key) == header


def test_checksum_is_xxh3_64() -> None:
    # The published value for no input: a change of seed or variant would be a change of format.
    assert checksum(b"") == 0x2D06800538D394C2


@given(headers)
def test_codec_header_comes_back_equal(header: PayloadHeader) -> None:
    assert decode_header(memoryview(encode_header(header)), key=header.key) == header


@given(st.integers(0, len(META) * 8 - 1))
def test_decode_header_any_flipped_bit_is_seen(bit: int) -> None:
    with pytest.raises(CodecError):
        decode_header(_flip(META, bit), key=KEY)


@given(st.integers(0, len(PAYLOAD) * 8 - 1))
def test_verify_any_flipped_bit_is_seen_in_its_segment(bit: int) -> None:
    damaged = memoryview(_flip(PAYLOAD, bit))
    hit = bit // 8 // 120
    with expect_error(CodecError, reason="corrupt", match=f"segment {hit} of 2"):
        verify_checksums(HEADER, damaged)
    verify_checksums(HEADER, damaged, segments=[1 - hit])


@pytest.mark.parametrize("size", range(len(META)))
def test_decode_header_truncated_is_seen(size: int) -> None:
    with pytest.raises(CodecError) as caught:
        decode_header(META[:size], key=KEY)
    assert caught.value.reason == "codec"


def test_decode_header_longer_one_is_seen() -> None:
    with expect_error(CodecError, reason="codec", match="damaged"):
        decode_header(META + b"\0", key=KEY)


@pytest.mark.parametrize("size", [0, 1, 120, 238, 239, 241, 242])
def test_verify_payload_of_other_size_is_seen(size: int) -> None:
    with pytest.raises(CodecError) as caught:
        verify_checksums(HEADER, memoryview((PAYLOAD * 2)[:size]))
    assert caught.value.reason == "corrupt"


def test_verify_swapped_segments_are_seen() -> None:
    with expect_error(CodecError, reason="corrupt", match="segment 0"):
        verify_checksums(HEADER, memoryview(PAYLOAD[120:] + PAYLOAD[:120]))


def test_verify_whole_payload_passes() -> None:
    verify_checksums(HEADER, memoryview(PAYLOAD))
    verify_checksums(HEADER, memoryview(PAYLOAD), segments=[])


def test_decode_header_of_another_entry_is_refused() -> None:
    with pytest.raises(CodecError) as caught:
        decode_header(META, key=bytes(32))
    assert caught.value.reason == "wrong_key"


def test_decode_header_of_another_release_is_named() -> None:
    with expect_error(CodecError, reason="version", match="version 2"):
        decode_header(_resealed(META, 4, struct.pack("<H", codec.VERSION + 1)), key=KEY)


@pytest.mark.parametrize(("at", "patch"), [(6, b"\x63"), (44, b"\xff")], ids=["kind", "dtype"])
def test_decode_header_of_unknown_content_is_refused(at: int, patch: bytes) -> None:
    with expect_error(CodecError, reason="version") as caught:
        decode_header(_resealed(META, at, patch), key=KEY)
    assert not caught.value.is_damage


@pytest.mark.parametrize(
    "header",
    [
        PayloadHeader(PayloadKind.FEATURE, KEY[:31], "float32", (1,), (0,)),
        PayloadHeader(PayloadKind.FEATURE, KEY, "x" * 256, (1,), (0,)),
        PayloadHeader(PayloadKind.FEATURE, KEY, "float32", (1,) * 256, (0,)),
        PayloadHeader(PayloadKind.FEATURE, KEY, "float32", (1,), ()),
        PayloadHeader(PayloadKind.FEATURE, KEY, "float32", (1,), (0,) * 65536),
    ],
    ids=["key", "dtype", "dimensions", "no segments", "segments"],
)
def test_encode_header_field_out_of_format_is_refused(header: PayloadHeader) -> None:
    with pytest.raises(CodecError):
        encode_header(header)


def _flip(data: bytes, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def _resealed(meta: bytes, at: int, patch: bytes) -> bytes:
    """A header with a patched field and a checksum that agrees."""
    body = meta[:at] + patch + meta[at + len(patch) : -8]
    return body + struct.pack("<Q", checksum(body))


def _part(checksums: dict[int, int], *, shape: tuple[int, ...] = (4, 2), segments: int = 4) -> bytes:
    return codec.encode_partial_header(PayloadKind.KV_PAGE, KEY, "float16", shape, segments, checksums)


def test_parts_join_to_what_one_writer_gives() -> None:
    whole = codec.encode_header(PayloadHeader(PayloadKind.KV_PAGE, KEY, "float16", (4, 2), (10, 11, 12, 13)))
    parts = [_part({3: 13, 1: 11}), _part({0: 10, 2: 12})]
    assert codec.merge_partial_headers(parts, key=KEY) == whole


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (_part({1: 1, 2: 2, 3: 3}), "parts"),
        (_part({2: 2}), "parts"),
        (_part({2: 2, 3: 3}, shape=(8,)), "parts"),
        (_part({2: 2, 3: 3}, segments=5), "parts"),
        (_part({2: 2, 3: 3})[:-1], "codec"),
        (b"CPPT\4\0\xff\xff", "codec"),
        (b"", "codec"),
    ],
)
def test_parts_that_make_no_whole_are_refused(other: bytes, reason: str) -> None:
    with pytest.raises(CodecError) as e:
        codec.merge_partial_headers([_part({0: 0, 1: 1}), other], key=KEY)
    assert e.value.reason == reason


@pytest.mark.parametrize("checksums", [{}, {4: 1}, {-1: 1}])
def test_encode_part_without_segment_is_refused(checksums: dict[int, int]) -> None:
    with pytest.raises(CodecError):
        _part(checksums)
