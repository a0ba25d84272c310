"""Copies of one rank's KV between vLLM's blocks and host memory. Several pages, a slab, are copied at a time.

On a CPU, planes (K, V or latents) are copied directly. On an accelerator, the pages of a slab (from one or
more requests) are gathered into a contiguous device buffer in page order. One contiguous copy then transfers
the buffer to or from pinned memory. Any other copy would go through a temporary pageable buffer, which
PyTorch may read while the transfer is still filling it. Two buffers alternate, so that one slab is
transferred while the host reads or fills the other slab. Host memory is accessed only after the slab's event.

This module needs torch, but not vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch

from cornplug.vllm_connector.kv_copies.cache_blocks import CacheBlocks, PageShape, Table
from cornplug.vllm_connector.kv_copies.copy_sides import CopySide, CpuSide, CudaSide, TokenIndex
from cornplug.vllm_connector.kv_copies.layout import BlockLayout

_DIRECT_TOKENS = 128
"""Maximum number of tokens in a slab on a CPU, unless a page has more. Copying several small blocks at a time
is faster than copying blocks one by one (LMCache measured 8 ms instead of 20 ms)."""
_STAGED_BYTES = 16 << 20
"""Size in bytes of a slab on an accelerator, large enough to hide the latency of a few kernel launches. Four
slabs (two per direction) are small compared to the memory that vLLM leaves free."""


class _Staging:
    """Host memory, device memory and token positions for one slab in transfer. All memory is allocated on
    first use and reused, because new memory would cost a page fault per 4 KiB."""

    def __init__(self, side: CopySide, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Prepare memory for a slab of `shape`: (pages, heads, layers, planes, tokens, dim)."""
        self._side, self._shape, self._dtype = side, shape, dtype
        self.end: Any = None
        """Event at the end of the last copies that use this memory, or None if no copy is in flight."""
        self._there: torch.Tensor | None = None
        self.index = TokenIndex(side, shape[0] * shape[4])

    @cached_property
    def host(self) -> torch.Tensor:
        return self._side.host(self._shape, self._dtype)

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the slab's device memory. It is allocated on first use. Call this within `CopySide.after`,
        so that the allocator assigns the memory to that stream."""
        if self._there is None:
            self._there = torch.empty(tuple(self._shape), dtype=self._dtype, device=device)
        return self._there

    def settle(self) -> None:
        """Wait until the slab's copies have completed."""
        if self.end is not None:
            end, self.end = self.end, None
            self._side.wait(end)


class Slab:
    """Several KV pages in transfer between a device and host memory, returned by `BlockCopies.begin_out` or
    `BlockCopies.slab`."""

    def __init__(self, staging: _Staging, pages: int) -> None:
        self._staging, self._pages = staging, pages

    @property
    def host(self) -> torch.Tensor:
        """Host memory of the pages, shape (pages, heads, layers, planes, tokens, dim)."""
        return self._staging.host[: self._pages]

    def arrived(self) -> torch.Tensor:
        """Wait until the pages have been copied to host memory, and return `host`."""
        self._staging.settle()
        return self.host


class BlockCopies:
    """Copies one rank's KV pages between vLLM's blocks and host memory, in one direction. Used by one thread.
    Block tables come from `kernel_table`."""

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        layouts: Sequence[BlockLayout],
        shape: PageShape,
        *,
        side: CopySide | None = None,
        direct: bool | None = None,
        urgent: bool = False,
        share: float = 1.0,
    ) -> None:
        """Prepare copies. `side` and `direct` are derived from the caches' device, unless a test sets them.
        `share` is the fraction of the maximum slab size that these copies use."""
        self._share = share
        self._caches, self._layouts, self._shape = caches, layouts, shape
        self.blocks = CacheBlocks(caches, layouts, shape)
        self._device, self._dtype = self.blocks.device, self.blocks.dtype
        self._direct = (self._device.type == "cpu" and self.blocks.is_affine) if direct is None else direct
        if side is None:
            side = CpuSide() if self._device.type == "cpu" else CudaSide(self._device, urgent=urgent)
        self.side = side
        stagings = 1 if self._direct else 2
        self._stagings = deque(
            _Staging(side, (self.slab_pages, *shape), self._dtype) for _ in range(stagings)
        )

    @property
    def slab_pages(self) -> int:
        """Maximum number of pages in a slab. The pages of a slab are copied together."""
        heads, layers, planes, tokens, dim = self._shape
        page_bytes = heads * layers * planes * tokens * dim * self._dtype.itemsize
        most = max(1, int(_STAGED_BYTES * self._share) // page_bytes)
        # A page of recurrent states has a single row of many bytes.
        return max(1, min(_DIRECT_TOKENS // tokens, most)) if self._direct else most

    @property
    def ahead(self) -> int:
        """Number of slabs that can be in transfer while the host reads or fills another slab."""
        return len(self._stagings) - 1

    def slab(self, pages: int) -> Slab:
        """Return a slab with host memory for `pages` pages, at most `slab_pages`. Waits for earlier copies
        that use the same memory."""
        self._stagings.rotate(-1)
        staging = self._stagings[-1]
        staging.settle()
        return Slab(staging, pages)

    def begin_out(self, pages: Sequence[tuple[Table, int]], mark: Any) -> Slab:
        """Start to copy pages from vLLM's blocks to host memory. Each page is given as (block table of its
        request, index of the page in the request).

        The slab's host memory is reused after `ahead` further slabs.
        """
        slab, size = self.slab(len(pages)), self._shape[3]
        with self._begun(slab, mark):
            if self._direct:
                for host, (table, page) in zip(slab.host, pages, strict=True):
                    self.blocks.read(table, page * size, host)
            else:
                staging = slab._staging
                there = staging.on(self._device)[: len(pages)]
                index = staging.index.send(*self.blocks.where_pages(pages), self._device)
                self.blocks.gather(there, *index)
                slab.host.copy_(there, non_blocking=True)
        return slab

    def begin_in(
        self, slab: Slab, table: Table, first_page: int, pages: int, tokens: tuple[int, int], mark: Any
    ) -> None:
        """Start to copy a request's tokens, from `tokens[0]` to before `tokens[1]`, from `slab` to the
        request's blocks.

        The slab's host memory begins with `pages` pages of the request, starting with page `first_page`. The
        tokens are in the blocks after `settle` returns.
        """
        host, size = slab.host[:pages], self._shape[3]
        first = first_page * size
        start, end = max(tokens[0], first), min(tokens[1], first + pages * size)
        if start >= end:
            return
        with self._begun(slab, mark):
            if self._direct:
                for row, part_of in enumerate(host):
                    at = first + row * size
                    low, high = max(start, at), min(end, at + size)
                    if low < high:
                        self.blocks.write(table, low, part_of[:, :, :, low - at : high - at])
            else:
                staging = slab._staging
                there = staging.on(self._device)[:pages]
                there.copy_(host, non_blocking=True)
                where = self.blocks.where(table, np.arange(start, end))
                index = staging.index.send(*where, self._device)
                self.blocks.scatter(there, slice(start - first, end - first), *index)

    def settle(self) -> None:
        """Wait until all started copies have completed."""
        for staging in self._stagings:
            staging.settle()

    @contextmanager
    def _begun(self, slab: Slab, mark: Any) -> Iterator[None]:
        """Enter a context in which copies start after `mark`. When the context exits, even by an exception,
        record the end of these copies in the slab."""
        try:
            with self.side.after(mark):
                yield
        finally:
            slab._staging.end = self.side.begun()
