"""Copies of one rank's KV between vLLM's blocks on a GPU and the store's memory, without a CPU in between.

Several pages form a slab. The GPU gathers a slab in page order and computes its checksums
(`device_checksums.py`). One call of vLLM's `swap_blocks_batch` then copies the slab to the pages' locations
in the store, one byte range per page. Loads do the reverse. All slabs of one direction use the same GPU
buffer and are ordered by the direction's stream. Therefore many slabs can be in flight, and the host does not
wait for them. The host receives only the checksums, 64 bytes per segment.

The caller checks directly before each copy to the store that the reservation still exists. A copy that is
nevertheless late overwrites another page. Readers of that page detect the corruption, because the page's
checksum was computed from the data on its writer's GPU.

This module needs torch and Triton, but not vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash

from cornplug.vllm_connector.kv_copies.cache_blocks import CacheBlocks, Table
from cornplug.vllm_connector.kv_copies.copy_sides import CopyBackend, TokenIndex
from cornplug.vllm_connector.kv_copies.device_checksums import (
    STATE_WORDS,
    DeviceChecksums,
    fold_checksums,
)

_SLAB_BYTES = 32 << 20
"""Size in bytes of the GPU buffer for each direction. This is small compared to the memory that vLLM does not
use."""

ByteRange = tuple[int, int, int]
"""Byte range to copy: (offset in the slab, address in the store's memory, number of bytes)."""
CopyBatch = Callable[..., None]
"""Signature of vLLM's `swap_blocks_batch`: (source addresses, target addresses, sizes,
is_src_access_order_any=...)."""


class ArenaSlab:
    """One slab of KV pages in transfer: token positions, checksums, and the event that marks the end of its
    copies."""

    def __init__(self, backend: CopyBackend, index: TokenIndex, sums: torch.Tensor) -> None:
        self._backend, self.index, self._words = backend, index, sums
        self.end: Any = None
        """Event at the end of the slab's copies, or None after they have completed."""
        self.segments = self.segment_bytes = 0

    def checksum_words(self, segments: int, segment_bytes: int) -> torch.Tensor:
        """Return host memory for the checksum words that the GPU computes for `segments` segments of
        `segment_bytes` bytes each."""
        self.segments, self.segment_bytes = segments, segment_bytes
        return self._words[:segments]

    def is_done(self) -> bool:
        """Return whether the slab's copies have completed."""
        if self.end is not None and self._backend.is_done(self.end):
            self.end = None
        return self.end is None

    def wait(self) -> None:
        """Wait until the slab's copies have completed."""
        if self.end is not None:
            end, self.end = self.end, None
            self._backend.wait(end)

    def checksums(self) -> list[int]:
        """Return the checksums of all segments, page by page, computed from the data on the GPU. Call this
        after the slab's copies have completed."""
        return fold_checksums(self._words[: self.segments], self.segment_bytes)


class ArenaCopies:
    """Copies one rank's KV pages between GPU blocks and the store, in one direction. Used only by the
    engine's thread."""

    def __init__(
        self,
        blocks: CacheBlocks,
        backend: CopyBackend,
        checksums: DeviceChecksums,
        copy_batch: CopyBatch,
        *,
        slab_share: float = 1.0,
    ) -> None:
        """Prepare copies. `slab_share` is the fraction of the maximum slab size that these copies use."""
        self._blocks, self.backend = blocks, backend
        self._checksums, self._copy_batch = checksums, copy_batch
        heads, layers, planes, tokens, dim = blocks.shape
        self.page_bytes = heads * layers * planes * tokens * dim * blocks.dtype.itemsize
        self.slab_pages = max(1, int(_SLAB_BYTES * slab_share) // self.page_bytes)
        self._buffer: torch.Tensor | None = None
        self._free_slabs: list[ArenaSlab] = []

    def begin_copy_out(
        self,
        pages: Sequence[tuple[Table, int]],
        byte_ranges: Sequence[ByteRange],
        segment_bytes: int,
        mark: Any,
    ) -> ArenaSlab:
        """Start to copy pages from vLLM's blocks to the store. Each page is given as (block table of its
        request, index of the page in the request)."""
        with self._copy_context(mark) as slab:
            there = self._device_buffer()[: len(pages)]
            index = slab.index.send(*self._blocks.locate_pages(pages), self._blocks.device)
            self._blocks.gather(there, *index)
            self._begin_checksums(slab, there, segment_bytes)
            self._copy_batch(*_to_columns(byte_ranges, _address(there)))
        return slab

    def begin_copy_in(
        self,
        table: Table,
        pages: range,
        byte_ranges: Sequence[ByteRange],
        segment_bytes: int,
        tokens: tuple[int, int],
        mark: Any,
    ) -> ArenaSlab:
        """Start to copy pages of a request from the store to the request's blocks.

        Only tokens from `tokens[0]` to before `tokens[1]` are written to the blocks. Their KV is valid if the
        result of `ArenaSlab.checksums` matches the pages' checksums.
        """
        size = self._blocks.shape[3]
        first = pages.start * size
        start, end = max(tokens[0], first), min(tokens[1], pages.stop * size)
        with self._copy_context(mark) as slab:
            there = self._device_buffer()[: len(pages)]
            here, addresses, sizes = _to_columns(byte_ranges, _address(there))
            # The source can be read in any order, because no process writes to the pages while their reader
            # holds leases.
            self._copy_batch(addresses, here, sizes, is_src_access_order_any=True)
            self._begin_checksums(slab, there, segment_bytes)
            if start < end:
                where = self._blocks.locate_tokens(table, np.arange(start, end))
                index = slab.index.send(*where, self._blocks.device)
                self._blocks.scatter(there, slice(start - first, end - first), *index)
        return slab

    def release_slab(self, slab: ArenaSlab) -> None:
        """Wait for a slab's copies to complete, and make its memory available to later slabs."""
        slab.wait()
        self._free_slabs.append(slab)

    def self_test(self, segment_bytes: int) -> bool:
        """Copy a test page from the GPU to host memory and back. Return whether its data and checksums are
        correct.

        Call this at start, because it also compiles the kernels and allocates all memory.
        """
        noise, back, again = (self.backend.allocate_host((self.page_bytes,), torch.int8) for _ in range(3))
        noise.copy_(torch.from_numpy(np.random.default_rng().integers(-128, 128, self.page_bytes, np.int8)))
        sizes = torch.tensor([self.page_bytes])
        with self._copy_context(self.backend.mark()) as slab:
            there = self._device_buffer()[:1].view(torch.int8).flatten()
            places, out = (torch.tensor([_address(one)]) for one in (there, back))
            there.copy_(noise, non_blocking=True)
            self._begin_checksums(slab, there, segment_bytes)
            self._copy_batch(places, out, sizes)
        self.release_slab(slab)
        found = slab.checksums()
        with self._copy_context(self.backend.mark()) as slab:
            there.zero_()
            self._copy_batch(out, places, sizes, is_src_access_order_any=True)
            again.copy_(there, non_blocking=True)
        self.release_slab(slab)
        whole = torch.equal(noise, back) and torch.equal(noise, again)
        rows = noise.numpy().reshape(-1, segment_bytes)
        return whole and found == [xxhash.xxh3_64_intdigest(row) for row in rows]

    def _device_buffer(self) -> torch.Tensor:
        """Return the device's buffer for slabs. The buffer is allocated on first use. Call this within
        `CopyBackend.start_after`, so that the allocator assigns the memory to that stream."""
        if self._buffer is None:
            shape = (self.slab_pages, *self._blocks.shape)
            self._buffer = torch.empty(shape, dtype=self._blocks.dtype, device=self._blocks.device)
        return self._buffer

    def _begin_checksums(self, slab: ArenaSlab, pages: torch.Tensor, segment_bytes: int) -> None:
        words = self._checksums.begin(pages, segment_bytes)
        slab.checksum_words(len(words), segment_bytes).copy_(words, non_blocking=True)

    @contextmanager
    def _copy_context(self, mark: Any) -> Iterator[ArenaSlab]:
        """Enter a context in which copies start after `mark`, and yield their slab. When the context exits,
        even by an exception, record the end of these copies in the slab."""
        slab = self._free_slabs.pop() if self._free_slabs else self._new_slab()
        whole = False
        try:
            with self.backend.start_after(mark):
                yield slab
            whole = True
        finally:
            slab.end = self.backend.record_end()
            if not whole:
                self.release_slab(slab)

    def _new_slab(self) -> ArenaSlab:
        heads, layers, _, tokens, _ = self._blocks.shape
        # A segment contains at least one layer of one head. This limits the number of segments.
        sums = self.backend.allocate_host((self.slab_pages * heads * layers, STATE_WORDS), torch.int64)
        return ArenaSlab(self.backend, TokenIndex(self.backend, self.slab_pages * tokens), sums)


def _to_columns(byte_ranges: Sequence[ByteRange], slab: int) -> list[torch.Tensor]:
    """Convert byte ranges to three tensors: addresses in the slab at address `slab`, addresses in the store's
    memory, and sizes."""
    columns = np.array(byte_ranges, np.int64).reshape(-1, 3).T.copy()
    columns[0] += slab
    return [torch.from_numpy(column) for column in columns]


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()
