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
        """Segments of a page that this rank writes."""
        return len(self.held.heads) * len(self.held.runs(self.page, self.page.layer_runs))

    @property
    def size_bytes(self) -> int:
        """Bytes of a page that this rank holds."""
        return len(self.held.heads) * len(self.held.layers) * self.page.layer_bytes

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
        page, held = self.page, self.held
        runs = len(checksums) // page.heads
        size = page.layers // runs
        mine = held.runs(page, runs)
        summed = range(mine.start * size, mine.stop * size)
        step = size * page.layer_bytes
        arena = self._arena(self.store.view(location), summed)
        for segments, here, there in zip(self._segments(runs), _rows(into), arena, strict=True):
            copied = here
            if summed == held.layers:
                np.copyto(here, there)
            else:
                # The writer's stages were others: verified are all layers of its segments.
                copied = there.copy()
                first = (held.layers.start - summed.start) * page.layer_bytes
                np.copyto(here, copied[first : first + here.size])
            if list(checksums[segments.start : segments.stop]) != checksums_of(copied.data, step):
                raise CodecError("a page is corrupt", reason="corrupt")

    def write(self, source: torch.Tensor, location: PayloadLocation) -> Mapping[int, int]:
        """Copy this rank's part of a page, of `shape`, into reserved room.

        Returns segment -> checksum of the source: a fault of the copy is found by readers.
        Raises StoreUnavailable.
        """
        sums: dict[int, int] = {}
        runs, step = self.page.layer_runs, self.page.segment_bytes
        arena = self._arena(self.store.view(location, writable=True), self.held.layers)
        for segments, here, there in zip(self._segments(runs), _rows(source), arena, strict=True):
            sums |= zip(segments, checksums_of(here.data, step), strict=True)
            np.copyto(there, here)
        return sums

    def discard(self, keys: Sequence[bytes], *, deadline_s: float) -> None:
        """Drop a damaged page and the pages that follow it.

        Where one is damaged others are. The engine computes them all again anyway, and whole prefixes heal
        at once instead of page by page.
        """
        with suppress(CornplugError):
            self.store.delete(list(dict.fromkeys(keys)), deadline_s=deadline_s)

    def _segments(self, runs: int) -> list[range]:
        """Of each head of this rank, the segments with its layers, in a page with `runs` of them a head."""
        mine = self.held.runs(self.page, runs)
        return [range(head * runs + mine.start, head * runs + mine.stop) for head in self.held.heads]

    def _arena(self, payload: memoryview, layers: range) -> Bytes:
        """This rank's heads of a page in the store, shape (heads, bytes of `layers`)."""
        step = self.page.layer_bytes
        whole = np.frombuffer(payload, np.uint8).reshape(self.page.heads, -1)
        heads = whole[self.held.heads.start : self.held.heads.stop]
        return heads[:, layers.start * step : layers.stop * step]


def _rows(part: torch.Tensor) -> Bytes:
    """Host memory as (heads, bytes of a head), writable, without a copy."""
    array: Bytes = part.view(torch.uint8).numpy()
    return array.reshape(len(part), -1)
