"""Checksums of a page are read from its header, and from no other bytes."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import pytest

from cornplug.codec import PayloadHeader, PayloadKind, checksum, encode_header
from cornplug.engine_common.page_envelope import page_header, read_page_checksums, read_page_header
from cornplug.errors import CodecError
from cornplug.kv_page import PageGeometry
from cornplug.store.base import Lease, PayloadLocation

PAGE = PageGeometry(page_tokens=64, heads=2, layers=3, dim=8, dtype="bfloat16")
KEY = bytes(range(32))
SUMS = {segment: (segment * 0x9E3779B97F4A7C15) % (1 << 64) for segment in range(PAGE.segments)}


def leased(meta: bytes, *, key: bytes = KEY, size: int = PAGE.page_bytes) -> Lease:
    return Lease(1, key, meta, PayloadLocation(bytes(16), 0, size, 1))


def other(**change: Any) -> bytes:
    """A whole header that differs from a page's."""
    fields = {"kind": PayloadKind.KV_PAGE, "key": KEY, "dtype": PAGE.dtype, "shape": PAGE.shape}
    return encode_header(PayloadHeader(**fields | {"checksums": tuple(SUMS.values())} | change))


def checksums_of(lease: Lease, page: PageGeometry) -> array[int]:
    return next(read_page_checksums([lease], page))


def resealed(meta: bytes, at: int, value: int) -> bytes:
    """A header with one byte changed, under a checksum that is right."""
    body = meta[:at] + bytes([value]) + meta[at + 1 : -8]
    return body + checksum(body).to_bytes(8, "little")


def test_page_header_bytes_are_the_codecs() -> None:
    assert page_header(KEY, PAGE, SUMS) == other()
    assert page_header(KEY, PAGE, dict(reversed(SUMS.items()))) == other()


def test_read_page_checksums_equal_the_headers() -> None:
    for key in (KEY, bytes(32), b"\xff" * 32):
        lease = leased(page_header(key, PAGE, SUMS), key=key)
        assert tuple(checksums_of(lease, PAGE)) == read_page_header(lease, PAGE).checksums
        assert tuple(checksums_of(lease, PAGE)) == tuple(SUMS.values())


@pytest.mark.parametrize("layer_runs", [1, 3])
def test_read_page_checksums_of_any_writers_stages(layer_runs: int) -> None:
    """An engine with pipeline stages writes more segments; every engine reads them."""
    writer = dataclasses.replace(PAGE, layer_runs=layer_runs)
    sums = {segment: 5 + segment for segment in range(writer.segments)}
    lease = leased(page_header(KEY, writer, sums))
    for reader in (PAGE, writer):
        assert tuple(checksums_of(lease, reader)) == tuple(sums.values())


@pytest.mark.parametrize(
    ("lease", "reason"),
    [
        (leased(other(key=bytes(32))), "wrong_key"),
        (leased(other(), key=bytes(32)), "wrong_key"),
        (leased(other(dtype="float16")), "wrong_shape"),
        (leased(other(shape=(*PAGE.shape[:4], 16))), "wrong_shape"),
        (leased(other(shape=(3, 2, *PAGE.shape[2:]))), "wrong_shape"),
        (leased(other(checksums=(1, 2, 3))), "wrong_shape"),
        (leased(other(checksums=(1,))), "wrong_shape"),
        (leased(other(checksums=(1, 2, 3, 4))), "wrong_shape"),
        (leased(other(), size=PAGE.page_bytes - 1), "wrong_shape"),
        (leased(resealed(other(), 4, 9)), "version"),
        (leased(resealed(other(), 6, 99)), "version"),
        (leased(b""), "codec"),
        (leased(other()[:-1]), "codec"),
        (leased(other() + bytes(8)), "codec"),
    ],
)
def test_read_page_checksums_of_another_header_raises_its_reason(lease: Lease, reason: str) -> None:
    for read in (read_page_header, checksums_of):
        with pytest.raises(CodecError) as e:
            read(lease, PAGE)
        assert e.value.reason == reason


def test_read_page_checksums_of_any_flipped_bit_raises() -> None:
    meta = page_header(KEY, PAGE, SUMS)
    for at in range(len(meta)):
        with pytest.raises(CodecError):
            checksums_of(leased(meta[:at] + bytes([meta[at] ^ 1]) + meta[at + 1 :]), PAGE)


def test_read_page_checksums_of_another_geometry_raises() -> None:
    lease = leased(page_header(KEY, PAGE, SUMS))
    for change in ({"heads": 3, "layers": 2}, {"dtype": "float16"}, {"page_tokens": 32, "dim": 16}):
        with pytest.raises(CodecError) as e:
            checksums_of(lease, dataclasses.replace(PAGE, **change))  # type: ignore[arg-type]
        assert e.value.reason == "wrong_shape"
