"""The envelope of a KV page, as both engines' rooms write and read it."""

from __future__ import annotations

from collections.abc import Mapping

from cornplug.codec import PayloadHeader, PayloadKind, decode_header, encode_header, encode_part
from cornplug.errors import CodecError
from cornplug.kv_page import PageGeometry
from cornplug.store.base import Lease


def page_header(key: bytes, page: PageGeometry, checksums: Mapping[int, int]) -> bytes:
    """A page's `meta`. `checksums`: of every segment, by its index in the page."""
    ordered = tuple(checksums[segment] for segment in range(page.segments))
    return encode_header(PayloadHeader(PayloadKind.KV_PAGE, key, page.dtype, page.shape, ordered))


def page_part(key: bytes, page: PageGeometry, checksums: Mapping[int, int]) -> bytes:
    """The `meta` of one rank's part of a page (`cornplug.store.base.WriterPart`). `checksums`: of the
    segments that this rank wrote, by their index in the page."""
    return encode_part(PayloadKind.KV_PAGE, key, page.dtype, page.shape, page.segments, checksums)


def read_page_header(lease: Lease, page: PageGeometry) -> PayloadHeader:
    """The header of a leased page. Raises CodecError, "wrong_shape" for a page of other geometry."""
    header = decode_header(lease.meta, key=lease.key)
    if header.shape != page.shape or header.dtype != page.dtype:
        raise CodecError(f"page of shape {header.shape} {header.dtype}", reason="wrong_shape")
    if len(header.checksums) != page.segments or lease.location.size != page.page_bytes:
        raise CodecError("a page of other size than it says", reason="wrong_shape")
    return header
