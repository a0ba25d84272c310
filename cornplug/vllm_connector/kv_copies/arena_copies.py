"""Copies of this rank's KV between vLLM's blocks on a GPU and the store's memory, without a CPU in between.

A slab of pages is gathered on the GPU in page order, summed there (`device_checksums.py`) and copied by one
call of vLLM's `swap_blocks_batch`, one run of bytes a page, to where the store keeps it; the way back is the
reverse. All slabs of one way pass one buffer on the GPU: its stream orders them, so many may be begun before
the first has ended, and the host waits for none. The host gets the checksums, 64 bytes a segment.

Whoever begins a copy into the store has looked at the reservation right before. A copy that is late all the
same damages another page, whose readers then find it damaged: its checksum is of what its own GPU held.

Needs torch, Triton and nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash

from cornplug.vllm_connector.kv_copies.cache_blocks import CacheBlocks, Table
from cornplug.vllm_connector.kv_copies.copy_sides import CopySide, TokenIndex
from cornplug.vllm_connector.kv_copies.device_checksums import (
    STATE,
    DeviceChecksums,
    folded,
)

_SLAB_BYTES = 32 << 20
"""One buffer each way: small beside the memory that vLLM leaves."""

Run = tuple[int, int, int]
"""(place in the slab, address in the store's memory, bytes)"""
CopyBatch = Callable[..., None]
"""vLLM's `swap_blocks_batch`: (source addresses, target addresses, sizes, is_src_access_order_any=...)."""


class ArenaSlab:
    """Pages on their way."""

    def __init__(self, side: CopySide, index: TokenIndex, sums: torch.Tensor) -> None:
        self._side, self.index, self._sums = side, index, sums
        self.end: Any = None
        """Of its copies; None where they have happened."""
        self.segments = self.segment_bytes = 0

    def sums(self, segments: int, segment_bytes: int) -> torch.Tensor:
        """Host memory for the words of so many segments of so many bytes."""
        self.segments, self.segment_bytes = segments, segment_bytes
        return self._sums[:segments]

    def done(self) -> bool:
        """Whether its copies have happened."""
        if self.end is not None and self._side.done(self.end):
            self.end = None
        return self.end is None

    def wait(self) -> None:
        """Wait until its copies have happened."""
        if self.end is not None:
            end, self.end = self.end, None
            self._side.wait(end)

    def checksums(self) -> list[int]:
        """Of each segment, page by page: of what the GPU held. Called once its copies have happened."""
        return folded(self._sums[: self.segments], self.segment_bytes)


class ArenaCopies:
    """One rank's, one way, used by the engine's thread."""

    def __init__(
        self,
        blocks: CacheBlocks,
        side: CopySide,
        checksums: DeviceChecksums,
        copy_batch: CopyBatch,
        *,
        share: float = 1.0,
    ) -> None:
        """`share` of a slab's memory."""
        self._blocks, self.side = blocks, side
        self._checksums, self._copy_batch = checksums, copy_batch
        heads, layers, planes, tokens, dim = blocks.shape
        self.page_bytes = heads * layers * planes * tokens * dim * blocks.dtype.itemsize
        self.slab_pages = max(1, int(_SLAB_BYTES * share) // self.page_bytes)
        self._there: torch.Tensor | None = None
        self._free: list[ArenaSlab] = []

    def begin_out(
        self,
        pages: Sequence[tuple[Table, int]],
        runs: Sequence[Run],
        segment_bytes: int,
        mark: Any,
    ) -> ArenaSlab:
        """Begin to copy pages to the store, each named by its request's table and its place in it."""
        with self._begun(mark) as slab:
            there = self._slab()[: len(pages)]
            index = slab.index.send(*self._blocks.where_pages(pages), self._blocks.device)
            self._blocks.gather(there, *index)
            self._sum(slab, there, segment_bytes)
            self._copy_batch(*_columns(runs, _address(there)))
        return slab

    def begin_in(
        self,
        table: Table,
        pages: range,
        runs: Sequence[Run],
        segment_bytes: int,
        tokens: tuple[int, int],
        mark: Any,
    ) -> ArenaSlab:
        """Begin to copy these pages of a request from the store; of them the `tokens` (from, to) of the
        request into its blocks. These are right if `ArenaSlab.checksums` are those of the pages."""
        size = self._blocks.shape[3]
        first = pages.start * size
        start, end = max(tokens[0], first), min(tokens[1], pages.stop * size)
        with self._begun(mark) as slab:
            there = self._slab()[: len(pages)]
            here, addresses, sizes = _columns(runs, _address(there))
            # Nothing writes into the pages: their reader holds leases.
            self._copy_batch(addresses, here, sizes, is_src_access_order_any=True)
            self._sum(slab, there, segment_bytes)
            if start < end:
                where = self._blocks.where(table, np.arange(start, end))
                index = slab.index.send(*where, self._blocks.device)
                self._blocks.scatter(there, slice(start - first, end - first), *index)
        return slab

    def put_back(self, slab: ArenaSlab) -> None:
        """Wait for a slab's copies; its memory may be used for another."""
        slab.wait()
        self._free.append(slab)

    def works(self, segment_bytes: int) -> bool:
        """Whether a page of noise comes and goes whole, with the checksums that a CPU finds.

        Compiles the kernels, makes all memory, and so is called at start."""
        noise, back, again = (self.side.host((self.page_bytes,), torch.int8) for _ in range(3))
        noise.copy_(torch.from_numpy(np.random.default_rng().integers(-128, 128, self.page_bytes, np.int8)))
        sizes = torch.tensor([self.page_bytes])
        with self._begun(self.side.mark()) as slab:
            there = self._slab()[:1].view(torch.int8).flatten()
            places, out = (torch.tensor([_address(one)]) for one in (there, back))
            there.copy_(noise, non_blocking=True)
            self._sum(slab, there, segment_bytes)
            self._copy_batch(places, out, sizes)
        self.put_back(slab)
        found = slab.checksums()
        with self._begun(self.side.mark()) as slab:
            there.zero_()
            self._copy_batch(out, places, sizes, is_src_access_order_any=True)
            again.copy_(there, non_blocking=True)
        self.put_back(slab)
        whole = torch.equal(noise, back) and torch.equal(noise, again)
        rows = noise.numpy().reshape(-1, segment_bytes)
        return whole and found == [xxhash.xxh3_64_intdigest(row) for row in rows]

    def _slab(self) -> torch.Tensor:
        """The buffer on the device; made within `CopySide.after`, so that the allocator knows its stream."""
        if self._there is None:
            shape = (self.slab_pages, *self._blocks.shape)
            self._there = torch.empty(shape, dtype=self._blocks.dtype, device=self._blocks.device)
        return self._there

    def _sum(self, slab: ArenaSlab, there: torch.Tensor, segment_bytes: int) -> None:
        words = self._checksums.begin(there, segment_bytes)
        slab.sums(len(words), segment_bytes).copy_(words, non_blocking=True)

    @contextmanager
    def _begun(self, mark: Any) -> Iterator[ArenaSlab]:
        """A slab whose copies are those begun inside, those too that an exception cuts short."""
        slab = self._free.pop() if self._free else self._new()
        whole = False
        try:
            with self.side.after(mark):
                yield slab
            whole = True
        finally:
            slab.end = self.side.begun()
            if not whole:
                self.put_back(slab)

    def _new(self) -> ArenaSlab:
        heads, layers, _, tokens, _ = self._blocks.shape
        # No segment is less than one layer of a head.
        sums = self.side.host((self.slab_pages * heads * layers, STATE), torch.int64)
        return ArenaSlab(self.side, TokenIndex(self.side, self.slab_pages * tokens), sums)


def _columns(runs: Sequence[Run], slab: int) -> list[torch.Tensor]:
    """(addresses in a slab that begins there, addresses in the store's memory, sizes)"""
    columns = np.array(runs, np.int64).reshape(-1, 3).T.copy()
    columns[0] += slab
    return [torch.from_numpy(column) for column in columns]


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()
