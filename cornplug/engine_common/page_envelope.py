"""The envelope of a KV page, as both engines' rooms write and read it."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Final

from cornplug.codec import PayloadHeader, PayloadKind, checksum, decode_header, encode_header, encode_part
from cornplug.errors import CodecError
from cornplug.kv_page import PageGeometry
from cornplug.store.base import KEY_BYTES, Lease

_BIG_ENDIAN: Final = sys.byteorder == "big"


def page_header(key: bytes, page: PageGeometry, checksums: Mapping[int, int]) -> bytes:
    """A page's `meta`. `checksums`: of every segment, by its index in the page."""
    before, after, sums = _around_key(page)
    # Several pages may complete in a step: their headers differ in key and checksums alone.
    body = before + key + after + sums.pack(*map(checksums.__getitem__, range(page.segments)))
    return body + checksum(body).to_bytes(8, "little")


def page_part(key: bytes, page: PageGeometry, checksums: Mapping[int, int]) -> bytes:
    """The `meta` of one rank's part of a page (`cornplug.store.base.WriterPart`). `checksums`: of the
    segments that this rank wrote, by their index in the page."""
    return encode_part(PayloadKind.KV_PAGE, key, page.dtype, page.shape, page.segments, checksums)


def read_page_checksums(leases: Iterable[Lease], page: PageGeometry) -> Iterator[array[int]]:
    """The checksums of leased pages, one a segment of its writer's: those of `read_page_header`, which
    raises.
    """
    (before, after, sums), size = _around_key(page), page.page_bytes
    end = len(before) + KEY_BYTES + len(after)
    whole = end + sums.size + 8
    # A prompt has thousands of pages, and their headers differ in key and checksums alone.
    for lease in leases:
        meta = lease.meta
        if (
            len(meta) == whole
            and meta.startswith(before + lease.key + after)
            and checksum(meta[:-8]) == int.from_bytes(meta[-8:], "little")
            and lease.location.size == size
        ):
            found = array("Q", meta[end:-8])
            if _BIG_ENDIAN:
                found.byteswap()
            yield found
        else:
            yield array("Q", read_page_header(lease, page).checksums)


@lru_cache
def _around_key(page: PageGeometry) -> tuple[bytes, bytes, struct.Struct]:
    """The bytes before and behind the key in the headers of such pages, up to the checksums; these packed."""
    key = bytes(range(1, 33))
    header = encode_header(
        PayloadHeader(PayloadKind.KV_PAGE, key, page.dtype, page.shape, (0,) * page.segments)
    )
    before, _, after = header.partition(key)
    return before, after[: -8 * page.segments - 8], struct.Struct(f"<{page.segments}Q")


def read_page_header(lease: Lease, page: PageGeometry) -> PayloadHeader:
    """The header of a leased page. Raises CodecError, "wrong_shape" for a page of other geometry."""
    header = decode_header(lease.meta, key=lease.key)
    if header.shape != page.shape or header.dtype != page.dtype:
        raise CodecError(f"page of shape {header.shape} {header.dtype}", reason="wrong_shape")
    if page.runs_in(len(header.checksums)) is None or lease.location.size != page.page_bytes:
        raise CodecError("a page of other size than it says", reason="wrong_shape")
    return header
