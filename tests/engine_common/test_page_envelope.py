"""Checksums of a page are read from its header, and from no other bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cornplug.codec import PayloadHeader, PayloadKind, checksum, encode_header
from cornplug.engine_common.rank_pages import check_page_headers, page_header, read_page_header
from cornplug.errors import CodecError
from cornplug.kv_page import PageGeometry
from cornplug.store.base import Lease, Leases, PayloadLocation, encode_location

PAGE = PageGeometry(page_tokens=64, heads=2, layers=3, dim=8, dtype="bfloat16")
KEY = bytes(range(32))
SUMS = {segment: (segment * 0x9E3779B97F4A7C15) % (1 << 64) for segment in range(PAGE.segments)}


def leased(meta: bytes, *, key: bytes = KEY, size: int = PAGE.page_bytes) -> Lease:
    return Lease(1, key, meta, PayloadLocation(bytes(16), 0, size, 1))


def other(**change: Any) -> bytes:
    """A whole header that differs from a page's."""
    fields = {"kind": PayloadKind.KV_PAGE, "key": KEY, "dtype": PAGE.dtype, "shape": PAGE.shape}
    return encode_header(PayloadHeader(**fields | {"checksums": tuple(SUMS.values())} | change))


def leases_of(*leases: Lease) -> Leases:
    places = b"".join(encode_location(lease.location) for lease in leases)
    keys, metas = [lease.key for lease in leases], [lease.meta for lease in leases]
    return Leases(bytes(16), keys, metas, places, [1] * len(leases))


def prompt(pages: int, writer: PageGeometry = PAGE) -> list[Lease]:
    """Leases of whole pages, of different keys and checksums."""
    found = []
    for number in range(pages):
        key = number.to_bytes(32, "little")
        found.append(leased(page_header(key, writer, dict.fromkeys(range(writer.segments), number)), key=key))
    return found


def resealed(meta: bytes, at: int, value: int) -> bytes:
    """A header with one byte changed, under a checksum that is right."""
    body = meta[:at] + bytes([value]) + meta[at + 1 : -8]
    return body + checksum(body).to_bytes(8, "little")


def test_page_header_bytes_are_the_codecs() -> None:
    assert page_header(KEY, PAGE, SUMS) == other()
    assert page_header(KEY, PAGE, dict(reversed(SUMS.items()))) == other()


def test_whole_pages_of_a_prompt_are_all() -> None:
    assert check_page_headers(leases_of(), PAGE) == (0, None)
    assert check_page_headers(leases_of(*prompt(40)), PAGE) == (40, None)


@pytest.mark.parametrize("layer_runs", [1, 3])
def test_read_page_header_of_any_writers_stages(layer_runs: int) -> None:
    """An engine with pipeline stages writes more segments; every engine reads them."""
    writer = dataclasses.replace(PAGE, layer_runs=layer_runs)
    sums = {segment: 5 + segment for segment in range(writer.segments)}
    lease = leased(page_header(KEY, writer, sums))
    for reader in (PAGE, writer):
        assert read_page_header(lease, reader).checksums == tuple(sums.values())
        assert check_page_headers(leases_of(*prompt(3, writer), lease, *prompt(3)), reader) == (7, None)


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
def test_read_page_header_of_another_header_raises_its_reason(lease: Lease, reason: str) -> None:
    with pytest.raises(CodecError) as e:
        read_page_header(lease, PAGE)
    assert e.value.reason == reason
    for before, behind in ((0, 0), (0, 3), (5, 3)):
        whole, error = check_page_headers(leases_of(*prompt(before), lease, *prompt(behind)), PAGE)
        assert whole == before
        assert error is not None
        assert error.reason == reason


@pytest.mark.parametrize("at_page", [0, 2])
def test_whole_pages_end_at_any_flipped_bit(at_page: int) -> None:
    pages = prompt(4)
    lease = pages[at_page]
    for at in range(len(lease.meta)):
        damaged = lease.meta[:at] + bytes([lease.meta[at] ^ 1]) + lease.meta[at + 1 :]
        pages[at_page] = leased(damaged, key=lease.key)
        whole, error = check_page_headers(leases_of(*pages), PAGE)
        assert whole == at_page
        assert error is not None


def test_whole_pages_of_another_geometry_are_none() -> None:
    for change in ({"heads": 3, "layers": 2}, {"dtype": "float16"}, {"page_tokens": 32, "dim": 16}):
        page = dataclasses.replace(PAGE, **change)  # type: ignore[arg-type]
        whole, error = check_page_headers(leases_of(*prompt(3)), page)
        assert whole == 0
        assert error is not None
        assert error.reason == "wrong_shape"
