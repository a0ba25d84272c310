"""One rank's part of store pages: to and from the engine's host memory, checksummed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cornplug.codec import checksums as checksums_of
from cornplug.engine_common.page_envelope import read_page_header
from cornplug.errors import CodecError, CornplugError
from cornplug.kv_page import PageGeometry, RankSlice
from cornplug.store.base import Lease, PayloadLocation, Store

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RankPages:
    """The heads and layers of pages that one rank holds."""

    page: PageGeometry
    held: RankSlice
    store: Store

    @property
    def segments(self) -> int:
        """Segments of a page that this rank holds."""
        return len(self.held.heads) * len(self.held.layers)

    @property
    def size_bytes(self) -> int:
        """Bytes of a page that this rank holds."""
        return self.segments * self.page.segment_bytes

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(heads, layers, planes, tokens, dim) of this rank's part of a page."""
        return len(self.held.heads), len(self.held.layers), *self.page.shape[2:]

    def memory(self) -> torch.Tensor:
        """Host memory of `shape`."""
        return torch.empty(self.shape, dtype=getattr(torch, self.page.dtype))

    def read(self, lease: Lease, into: torch.Tensor) -> None:
        """Copy this rank's part of a leased page into memory of `shape`, and verify the copy.

        Raises CodecError for an entry that is not the page of its header, StoreUnavailable for a lease of
        another store.
        """
        self.copy(lease.location, read_page_header(lease, self.page).checksums, into)

    def copy(self, location: PayloadLocation, checksums: Sequence[int], into: torch.Tensor) -> None:
        """`read`, with the checksums of the page's header. Raises CodecError("corrupt"), StoreUnavailable."""
        arena = self._arena(self.store.view(location))
        for head, here, there in zip(self.held.heads, _rows(into), arena, strict=True):
            np.copyto(here, there)
            segments = self._segments(head)
            if list(checksums[segments.start : segments.stop]) != self._sums(here):
                raise CodecError("a page is corrupt", reason="corrupt")

    def write(self, source: torch.Tensor, location: PayloadLocation) -> Mapping[int, int]:
        """Copy this rank's part of a page, of `shape`, into reserved room.

        Returns segment -> checksum of the source: a fault of the copy is found by readers.
        Raises StoreUnavailable.
        """
        sums: dict[int, int] = {}
        arena = self._arena(self.store.view(location, writable=True))
        for head, here, there in zip(self.held.heads, _rows(source), arena, strict=True):
            sums |= zip(self._segments(head), self._sums(here), strict=True)
            np.copyto(there, here)
        return sums

    def discard(self, keys: Sequence[bytes], *, deadline_s: float) -> None:
        """Drop a damaged page and the pages that follow it.

        Where one is damaged others are. The engine computes them all again anyway, and whole prefixes heal
        at once instead of page by page.
        """
        with suppress(CornplugError):
            self.store.delete(list(dict.fromkeys(keys)), deadline_s=deadline_s)

    def _arena(self, payload: memoryview) -> Bytes:
        """This rank's part of a page in the store, shape (heads, bytes of its layers)."""
        step, layers = self.page.segment_bytes, self.held.layers
        whole = np.frombuffer(payload, np.uint8).reshape(self.page.heads, -1)
        heads = whole[self.held.heads.start : self.held.heads.stop]
        return heads[:, layers.start * step : layers.stop * step]

    def _segments(self, head: int) -> range:
        """The segments of one head that this rank holds."""
        first, layers = head * self.page.layers, self.held.layers
        return range(first + layers.start, first + layers.stop)

    def _sums(self, row: Bytes) -> list[int]:
        """Checksums of one head's bytes, a segment each."""
        return checksums_of(row.data, self.page.segment_bytes)


def _rows(part: torch.Tensor) -> Bytes:
    """Host memory as (heads, bytes of a head), writable, without a copy."""
    array: Bytes = part.view(torch.uint8).numpy()
    return array.reshape(len(part), -1)
