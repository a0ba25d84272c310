"""One rank's part of store pages: to and from host memory of its own, checksummed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cornplug.codec import checksum, decode_header
from cornplug.errors import CodecError
from cornplug.kv_page import PageGeometry
from cornplug.store.base import Lease, Location, Store

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RankPages:
    """Pages as one rank sees them: all layers, `heads` of them, which it `writes` or only reads."""

    page: PageGeometry
    heads: range
    writes: bool
    store: Store

    def memory(self) -> torch.Tensor:
        """Host memory for this rank's part of a page: (heads, layers, planes, tokens, dim)."""
        return torch.empty((len(self.heads), *self.page.shape[1:]), dtype=getattr(torch, self.page.dtype))

    def read(self, lease: Lease, into: torch.Tensor) -> None:
        """Copy this rank's part of a leased page, and verify the copy.

        Raises CodecError for an entry that is not what it says, StoreUnavailable for one of
        another store.
        """
        header = decode_header(lease.meta, key=lease.key)
        if header.shape != self.page.shape or header.dtype != self.page.dtype:
            raise CodecError(f"page of shape {header.shape} {header.dtype}", reason="wrong_shape")
        if len(header.checksums) != self.page.segments or lease.location.size != self.page.page_bytes:
            raise CodecError("a page of other size than it says", reason="wrong_shape")
        rows = _rows(into)
        np.copyto(rows, self._arena(self.store.view(lease.location)))
        if any(header.checksums[segment] != value for segment, value in self._sums(rows).items()):
            raise CodecError("a page is corrupt", reason="corrupt")

    def write(self, source: torch.Tensor, location: Location) -> Mapping[int, int]:
        """Copy this rank's part of a page into room that is reserved for it; segment -> checksum
        of the source. Raises StoreUnavailable."""
        rows = _rows(source)
        sums = self._sums(rows)
        np.copyto(self._arena(self.store.view(location, writable=True)), rows)
        return sums

    @property
    def segments(self) -> list[int]:
        """Segments of the page that this rank holds, in the order of `write`'s checksums."""
        layers = self.page.layers
        return [head * layers + layer for head in self.heads for layer in range(layers)]

    def _sums(self, rows: Bytes) -> dict[int, int]:
        step = self.page.segment_bytes
        flat = rows.reshape(-1).data
        return {segment: checksum(flat[i * step : (i + 1) * step]) for i, segment in enumerate(self.segments)}

    def _arena(self, payload: memoryview) -> Bytes:
        whole = np.frombuffer(payload, np.uint8).reshape(self.page.heads, -1)
        return whole[self.heads.start : self.heads.stop]


def _rows(page: torch.Tensor) -> Bytes:
    """A page in host memory, shape (heads, bytes of a head), writable, without a copy."""
    return page.view(torch.uint8).numpy().reshape(len(page), -1)
