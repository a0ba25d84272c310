"""Header of a KV page, as both plugins write and read it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
import xxhash

from cornplug.codec import (
    KEY_AT,
    PayloadHeader,
    PayloadKind,
    decode_header,
    encode_header,
    encode_part,
    header_checksums,
)
from cornplug.errors import CodecError
from cornplug.kv_page import PageGeometry
from cornplug.store.base import KEY_BYTES, Lease
from cornplug.store.leases import Leases


def page_header(key: bytes, page: PageGeometry, checksums: Mapping[int, int]) -> bytes:
    """Return a page's `meta`. `checksums` maps each segment's index in the page to its checksum."""
    return page_headers([(key, checksums)], page)[0]


def page_headers(pages: Iterable[tuple[bytes, Mapping[int, int]]], page: PageGeometry) -> list[bytes]:
    """Return the `page_header` of each (key, checksums)."""
    # Several pages may complete in a step. Their headers differ only in key and checksums.
    before, after, sums = _around_key(page)
    segments, digest, headers = range(page.segments), xxhash.xxh3_64_intdigest, []
    for key, checksums in pages:
        body = before + key + after + sums.pack(*map(checksums.__getitem__, segments))
        headers.append(body + digest(body).to_bytes(8, "little"))
    return headers


def page_part(key: bytes, page: PageGeometry, checksums: Mapping[int, int]) -> bytes:
    """Return the `meta` of one rank's part of a page (`cornplug.store.base.WriterPart`). `checksums` maps the
    index of each segment that this rank wrote to its checksum."""
    return encode_part(PayloadKind.KV_PAGE, key, page.dtype, page.shape, page.segments, checksums)


def whole_pages(leases: Leases, page: PageGeometry) -> tuple[int, CodecError | None]:
    """Return (number of leading leases whose headers are valid, error of the next lease).

    All keys are present. `read_page_header` reads only headers that differ from the first: a prompt can have
    thousands of pages, whose headers differ only in key and checksums.
    """
    if leases and _alike(leases, page):
        return len(leases), None
    for index, lease in enumerate(leases):
        assert lease is not None
        try:
            read_page_header(lease, page)
        except CodecError as e:
            return index, e
    return len(leases), None


def _alike(leases: Leases, page: PageGeometry) -> bool:
    """Return whether all headers describe whole pages with the same number of segments."""
    metas = [meta for meta in leases.metas if meta is not None]
    first, lease = metas[0], leases[0]
    if lease is None or len(metas) < len(leases) or set(map(len, metas)) != {len(first)}:
        return False
    try:
        segments = len(read_page_header(lease, page).checksums)
    except CodecError:
        return False
    headers = np.frombuffer(b"".join(metas), np.uint8).reshape(len(metas), -1)
    key, sums = KEY_AT + KEY_BYTES, len(first) - 8 * segments - 8
    return (
        bool((headers[:, :KEY_AT] == headers[0, :KEY_AT]).all())
        and headers[:, KEY_AT:key].tobytes() == b"".join(leases.keys)
        and bool((headers[:, key:sums] == headers[0, key:sums]).all())
        and headers[:, -8:].tobytes() == np.array(header_checksums(metas), "<u8").tobytes()
        and bool((leases.sizes == page.page_bytes).all())
    )


@lru_cache
def _around_key(page: PageGeometry) -> tuple[bytes, bytes, struct.Struct]:
    """Bytes of a page header before the key, bytes between key and checksums, and the struct of the
    checksums."""
    key = bytes(range(1, 33))
    header = encode_header(
        PayloadHeader(PayloadKind.KV_PAGE, key, page.dtype, page.shape, (0,) * page.segments)
    )
    before, _, after = header.partition(key)
    return before, after[: -8 * page.segments - 8], struct.Struct(f"<{page.segments}Q")


def read_page_header(lease: Lease, page: PageGeometry) -> PayloadHeader:
    """Read the header of a leased page. Raises CodecError, "wrong_shape" if the page has another geometry."""
    header = decode_header(lease.meta, key=lease.key)
    if header.shape != page.shape or header.dtype != page.dtype:
        raise CodecError(f"unexpected page: shape {header.shape} {header.dtype}", reason="wrong_shape")
    if page.runs_in(len(header.checksums)) is None or lease.location.size != page.page_bytes:
        raise CodecError("the size of a page does not match its header", reason="wrong_shape")
    return header
