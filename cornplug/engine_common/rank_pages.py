"""Headers of KV pages in the store, and checksummed copies of one rank's shard of a page between host memory
and the store."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from cornplug.codec import (
    KEY_OFFSET,
    PayloadHeader,
    PayloadKind,
    decode_header,
    encode_header,
    encode_partial_header,
    expected_header_checksums,
    segment_checksums,
)
from cornplug.errors import CodecError, CornplugError
from cornplug.kv_page import PageGeometry, RankSlice
from cornplug.store.base import KEY_BYTES, Lease, Leases, PayloadLocation, Store

Bytes = NDArray[np.uint8]


def page_header(key: bytes, page: PageGeometry, checksums: Mapping[int, int]) -> bytes:
    """Return the header (`meta`) of a page for the store. `checksums` maps each segment's index in the page
    to its checksum."""
    return page_headers([(key, checksums)], page)[0]


def page_headers(pages: Iterable[tuple[bytes, Mapping[int, int]]], page: PageGeometry) -> list[bytes]:
    """Return the header (`meta`) of each page, given as (key, checksums)."""
    # The headers of several pages differ only in key and checksums. Encode the other fields once.
    before, after, sums = _constant_header_fields(page)
    segments, digest, headers = range(page.segments), xxhash.xxh3_64_intdigest, []
    for key, checksums in pages:
        body = before + key + after + sums.pack(*map(checksums.__getitem__, segments))
        headers.append(body + digest(body).to_bytes(8, "little"))
    return headers


def partial_page_header(key: bytes, page: PageGeometry, checksums: Mapping[int, int]) -> bytes:
    """Return the `meta` for one rank's part of a page (`cornplug.store.base.WriterPart`). `checksums` maps
    the index of each segment that this rank wrote to its checksum."""
    return encode_partial_header(PayloadKind.KV_PAGE, key, page.dtype, page.shape, page.segments, checksums)


def check_page_headers(leases: Leases, page: PageGeometry) -> tuple[int, CodecError | None]:
    """Return (number of leading leases with valid page headers, error of the next lease). The error is None
    if all headers are valid.

    The leases must not contain absent pages. If all headers differ only in key and checksums,
    `read_page_header` is called only for the first header, because a prompt can have thousands of pages.
    """
    if leases and _are_headers_alike(leases, page):
        return len(leases), None
    for index, lease in enumerate(leases):
        assert lease is not None
        try:
            read_page_header(lease, page)
        except CodecError as e:
            return index, e
    return len(leases), None


def _are_headers_alike(leases: Leases, page: PageGeometry) -> bool:
    """Return whether all headers are valid and describe complete pages with the same number of segments."""
    metas = [meta for meta in leases.metas if meta is not None]
    first, lease = metas[0], leases[0]
    if lease is None or len(metas) < len(leases) or set(map(len, metas)) != {len(first)}:
        return False
    try:
        segments = len(read_page_header(lease, page).checksums)
    except CodecError:
        return False
    headers = np.frombuffer(b"".join(metas), np.uint8).reshape(len(metas), -1)
    key, sums = KEY_OFFSET + KEY_BYTES, len(first) - 8 * segments - 8
    return (
        bool((headers[:, :KEY_OFFSET] == headers[0, :KEY_OFFSET]).all())
        and headers[:, KEY_OFFSET:key].tobytes() == b"".join(leases.keys)
        and bool((headers[:, key:sums] == headers[0, key:sums]).all())
        and headers[:, -8:].tobytes() == np.array(expected_header_checksums(metas), "<u8").tobytes()
        and bool((leases.sizes == page.page_bytes).all())
    )


@lru_cache
def _constant_header_fields(page: PageGeometry) -> tuple[bytes, bytes, struct.Struct]:
    """Return the constant parts of page headers: (bytes before the key, bytes between key and checksums,
    struct that packs the checksums)."""
    key = bytes(range(1, 33))
    header = encode_header(
        PayloadHeader(PayloadKind.KV_PAGE, key, page.dtype, page.shape, (0,) * page.segments)
    )
    before, _, after = header.partition(key)
    return before, after[: -8 * page.segments - 8], struct.Struct(f"<{page.segments}Q")


def read_page_header(lease: Lease, page: PageGeometry) -> PayloadHeader:
    """Decode and check the header of a leased page. Raises CodecError. Its reason is "wrong_shape" if the
    page has another geometry."""
    header = decode_header(lease.meta, key=lease.key)
    if header.shape != page.shape or header.dtype != page.dtype:
        raise CodecError(f"unexpected page: shape {header.shape} {header.dtype}", reason="wrong_shape")
    if page.runs_for_segments(len(header.checksums)) is None or lease.location.size != page.page_bytes:
        raise CodecError("the size of a page does not match its header", reason="wrong_shape")
    return header


def checksum_table(metas: Sequence[bytes | None]) -> NDArray[np.uint64]:
    """Return the segments' checksums from headers of equal length that `decode_header` has validated, shape
    (headers, segments)."""
    headers = [meta for meta in metas if meta is not None]
    end, segments = len(headers[0]) - 8, len(segment_checksums(headers[0]))
    rows = np.frombuffer(b"".join(headers), np.uint8).reshape(len(metas), -1)
    return np.ascontiguousarray(rows[:, end - 8 * segments : end]).view("<u8")


@dataclass(frozen=True, slots=True)
class RankPages:
    """Reads and writes one rank's part (`rank_slice` heads and layers) of KV pages in the store."""

    page: PageGeometry
    rank_slice: RankSlice
    store: Store

    @property
    def segments(self) -> int:
        """Number of segments that this rank writes in each page."""
        return len(self.rank_slice.heads) * len(self.rank_slice.run_range(self.page, self.page.layer_runs))

    @property
    def size_bytes(self) -> int:
        """Size in bytes of this rank's part of a page."""
        return len(self.rank_slice.heads) * len(self.rank_slice.layers) * self.page.layer_bytes

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of this rank's part of a page: (heads, layers, planes, tokens, dim)."""
        return len(self.rank_slice.heads), len(self.rank_slice.layers), *self.page.shape[2:]

    def has_complete_runs(self, runs_per_head: int) -> bool:
        """Return whether the segments with this rank's layers contain no other layers, in a page with
        `runs_per_head` segments per head."""
        mine, size = self.rank_slice.run_range(self.page, runs_per_head), self.page.layers // runs_per_head
        return range(mine.start * size, mine.stop * size) == self.rank_slice.layers

    def segment_indices(self, runs_per_head: int) -> list[int]:
        """Return the indices of the segments with this rank's heads and layers, in the order of the rank's
        shard. The page has `runs_per_head` segments per head."""
        return [number for of_head in self._segment_ranges(runs_per_head) for number in of_head]

    def byte_ranges(self) -> list[tuple[int, int, int]]:
        """Return (offset in the page, offset in this rank's part, size in bytes) for each contiguous range of
        this rank's part."""
        step, layers, heads = self.page.layer_bytes, self.rank_slice.layers, self.rank_slice.heads
        head, size = self.page.layers * step, len(layers) * step
        if size == head:
            return [(heads.start * head, 0, len(heads) * head)]
        return [(at * head + layers.start * step, i * size, size) for i, at in enumerate(heads)]

    def allocate_shard(self) -> torch.Tensor:
        """Allocate host memory for this rank's part of one page, with shape `shape`."""
        return torch.empty(self.shape, dtype=getattr(torch, self.page.dtype))

    def read(self, lease: Lease, target: torch.Tensor) -> None:
        """Copy this rank's part of a leased page into `target`, of shape `shape`, and verify the copy.

        Raises CodecError if the page's data do not match its header, StoreUnavailable if the lease is from
        another store.
        """
        self.copy(lease.location, read_page_header(lease, self.page).checksums, target)

    def copy(self, location: PayloadLocation, checksums: Sequence[int], target: torch.Tensor) -> None:
        """Copy this rank's shard of a page and verify it with `checksums` from the page's header. Raises
        CodecError("corrupt"), StoreUnavailable."""
        page, held, digest = self.page, self.rank_slice, xxhash.xxh3_64_intdigest
        runs = len(checksums) // page.heads
        arena = self._view_segments(self.store.view(location), runs)
        here = _bytes_by_head(target)
        whole = self.has_complete_runs(runs)
        # If the writer had other pipeline stages, segments also contain other layers. These layers are needed
        # to verify the checksums.
        copied = here.reshape(arena.shape) if whole else np.empty(arena.shape, np.uint8)
        for numbers, heads_copied, head in zip(self._segment_ranges(runs), copied, arena, strict=True):
            for number, one, source in zip(numbers, heads_copied, head, strict=True):
                one[:] = source
                if digest(one) != checksums[number]:
                    raise CodecError("checksum mismatch in a page", reason="corrupt")
        if not whole:
            first = held.layers.start % (page.layers // runs) * page.layer_bytes
            here[:] = copied.reshape(len(here), -1)[:, first : first + here.shape[1]]

    def write(self, source: torch.Tensor, location: PayloadLocation) -> dict[int, int]:
        """Copy this rank's part of a page from `source`, of shape `shape`, into a reservation.

        Returns the checksum of each segment of `source`, by segment index, so that readers can detect a
        corrupt copy. Raises StoreUnavailable.
        """
        sums: dict[int, int] = {}
        digest, runs = xxhash.xxh3_64_intdigest, self.page.layer_runs
        arena = self._view_segments(self.store.view(location, writable=True), runs)
        here = _bytes_by_head(source).reshape(arena.shape)
        # Compute the checksum of a segment and copy it while it is in a CPU cache.
        for numbers, head, target in zip(self._segment_ranges(runs), here, arena, strict=True):
            for number, segment, place in zip(numbers, head, target, strict=True):
                sums[number] = digest(segment)
                place[:] = segment
        return sums

    def discard(self, keys: Sequence[bytes], *, deadline_s: float) -> None:
        """Delete a corrupt page and the request's following pages from the store.

        The following pages are likely corrupt too. The engine computes all of them again in any case.
        """
        with suppress(CornplugError):
            self.store.delete(list(dict.fromkeys(keys)), deadline_s=deadline_s)

    def _segment_ranges(self, runs_per_head: int) -> list[range]:
        """Return the indices of the segments with this rank's layers, for each of its heads, in a page with
        `runs_per_head` segments per head."""
        mine = self.rank_slice.run_range(self.page, runs_per_head)
        return [
            range(head * runs_per_head + mine.start, head * runs_per_head + mine.stop)
            for head in self.rank_slice.heads
        ]

    def _view_segments(self, payload: memoryview, runs_per_head: int) -> Bytes:
        """Return a view of the segments that contain this rank's heads and layers in a stored page with
        `runs_per_head` segments per head, of shape (heads, runs, bytes)."""
        heads, mine = self.rank_slice.heads, self.rank_slice.run_range(self.page, runs_per_head)
        whole = np.frombuffer(payload, np.uint8).reshape(self.page.heads, runs_per_head, -1)
        return whole[heads.start : heads.stop, mine.start : mine.stop]


def _bytes_by_head(shard: torch.Tensor) -> Bytes:
    """Return a writable view of a rank's part in host memory, of shape (heads, bytes per head)."""
    array: Bytes = shard.view(torch.uint8).numpy()
    return array.reshape(len(shard), -1)
