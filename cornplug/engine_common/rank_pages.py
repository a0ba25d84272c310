"""One rank's part of store pages: to and from host memory of its own, checksummed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cornplug.codec import checksum
from cornplug.engine_common.page_envelope import read_page_header
from cornplug.engine_common.page_tensors import rows
from cornplug.errors import CodecError
from cornplug.kv_page import PageGeometry
from cornplug.store.base import Lease, PayloadLocation, Store

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
        header = read_page_header(lease, self.page)
        copied = rows(into)
        np.copyto(copied, self._arena(self.store.view(lease.location)))
        if any(header.checksums[segment] != value for segment, value in self._sums(copied).items()):
            raise CodecError("a page is corrupt", reason="corrupt")

    def write(self, source: torch.Tensor, location: PayloadLocation) -> Mapping[int, int]:
        """Copy this rank's part of a page into room that is reserved for it; segment -> checksum
        of the source. Raises StoreUnavailable."""
        mine = rows(source)
        sums = self._sums(mine)
        np.copyto(self._arena(self.store.view(location, writable=True)), mine)
        return sums

    @property
    def segments(self) -> list[int]:
        """Segments of the page that this rank holds, in the order of `write`'s checksums."""
        return self.page.segments_of(self.heads)

    def _sums(self, mine: Bytes) -> dict[int, int]:
        step = self.page.segment_bytes
        flat = mine.reshape(-1).data
        return {segment: checksum(flat[i * step : (i + 1) * step]) for i, segment in enumerate(self.segments)}

    def _arena(self, payload: memoryview) -> Bytes:
        whole = np.frombuffer(payload, np.uint8).reshape(self.page.heads, -1)
        return whole[self.heads.start : self.heads.stop]
