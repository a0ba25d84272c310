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
from cornplug.vllm_connector.kv_copies.copy_sides import CopyBackend, CpuBackend, CudaBackend, TokenIndex
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

    def __init__(self, backend: CopyBackend, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Prepare memory for a slab of `shape`: (pages, heads, layers, planes, tokens, dim)."""
        self._backend, self._shape, self._dtype = backend, shape, dtype
        self.end: Any = None
        """Event at the end of the last copies that use this memory, or None if no copy is in flight."""
        self._device_buffer: torch.Tensor | None = None
        self.index = TokenIndex(backend, shape[0] * shape[4])

    @cached_property
    def host(self) -> torch.Tensor:
        return self._backend.allocate_host(self._shape, self._dtype)

    def device_buffer(self, device: torch.device) -> torch.Tensor:
        """Return the slab's device memory. It is allocated on first use. Call this within
        `CopyBackend.start_after`, so that the allocator assigns the memory to that stream."""
        if self._device_buffer is None:
            self._device_buffer = torch.empty(tuple(self._shape), dtype=self._dtype, device=device)
        return self._device_buffer

    def wait(self) -> None:
        """Wait until the slab's copies have completed."""
        if self.end is not None:
            end, self.end = self.end, None
            self._backend.wait(end)


class Slab:
    """Several KV pages in transfer between a device and host memory, returned by `BlockCopies.begin_copy_out`
    or `BlockCopies.slab`."""

    def __init__(self, staging: _Staging, pages: int) -> None:
        self._staging, self._pages = staging, pages

    @property
    def host(self) -> torch.Tensor:
        """Host memory of the pages, shape (pages, heads, layers, planes, tokens, dim)."""
        return self._staging.host[: self._pages]

    def wait_host(self) -> torch.Tensor:
        """Wait until the pages have been copied to host memory, and return `host`."""
        self._staging.wait()
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
        backend: CopyBackend | None = None,
        direct: bool | None = None,
        urgent: bool = False,
        slab_share: float = 1.0,
    ) -> None:
        """Prepare copies. `backend` and `direct` are derived from the caches' device, unless a test sets
        them. `slab_share` is the fraction of the maximum slab size that these copies use."""
        self._slab_share = slab_share
        self._caches, self._layouts, self._shape = caches, layouts, shape
        self.blocks = CacheBlocks(caches, layouts, shape)
        self._device, self._dtype = self.blocks.device, self.blocks.dtype
        self._direct = (self._device.type == "cpu" and self.blocks.is_affine) if direct is None else direct
        if backend is None:
            backend = CpuBackend() if self._device.type == "cpu" else CudaBackend(self._device, urgent=urgent)
        self.backend = backend
        stagings = 1 if self._direct else 2
        self._stagings = deque(
            _Staging(backend, (self.slab_pages, *shape), self._dtype) for _ in range(stagings)
        )

    @property
    def slab_pages(self) -> int:
        """Maximum number of pages in a slab. The pages of a slab are copied together."""
        heads, layers, planes, tokens, dim = self._shape
        page_bytes = heads * layers * planes * tokens * dim * self._dtype.itemsize
        most = max(1, int(_STAGED_BYTES * self._slab_share) // page_bytes)
        # A page of recurrent states has a single row of many bytes.
        return max(1, min(_DIRECT_TOKENS // tokens, most)) if self._direct else most

    @property
    def slabs_ahead(self) -> int:
        """Number of slabs that can be in transfer while the host reads or fills another slab."""
        return len(self._stagings) - 1

    def next_slab(self, pages: int) -> Slab:
        """Return a slab with host memory for `pages` pages, at most `slab_pages`. Waits for earlier copies
        that use the same memory."""
        self._stagings.rotate(-1)
        staging = self._stagings[-1]
        staging.wait()
        return Slab(staging, pages)

    def begin_copy_out(self, pages: Sequence[tuple[Table, int]], mark: Any) -> Slab:
        """Start to copy pages from vLLM's blocks to host memory. Each page is given as (block table of its
        request, index of the page in the request).

        The slab's host memory is reused after `slabs_ahead` further slabs.
        """
        slab, size = self.next_slab(len(pages)), self._shape[3]
        with self._copy_context(slab, mark):
            if self._direct:
                for host, (table, page) in zip(slab.host, pages, strict=True):
                    self.blocks.read(table, page * size, host)
            else:
                staging = slab._staging
                there = staging.device_buffer(self._device)[: len(pages)]
                index = staging.index.send(*self.blocks.locate_pages(pages), self._device)
                self.blocks.gather(there, *index)
                slab.host.copy_(there, non_blocking=True)
        return slab

    def begin_copy_in(
        self, slab: Slab, table: Table, first_page: int, pages: int, tokens: tuple[int, int], mark: Any
    ) -> None:
        """Start to copy a request's tokens, from `tokens[0]` to before `tokens[1]`, from `slab` to the
        request's blocks.

        The slab's host memory begins with `pages` pages of the request, starting with page `first_page`. The
        tokens are in the blocks after `wait` returns.
        """
        host, size = slab.host[:pages], self._shape[3]
        first = first_page * size
        start, end = max(tokens[0], first), min(tokens[1], first + pages * size)
        if start >= end:
            return
        with self._copy_context(slab, mark):
            if self._direct:
                for row, part_of in enumerate(host):
                    at = first + row * size
                    low, high = max(start, at), min(end, at + size)
                    if low < high:
                        self.blocks.write(table, low, part_of[:, :, :, low - at : high - at])
            else:
                staging = slab._staging
                there = staging.device_buffer(self._device)[:pages]
                there.copy_(host, non_blocking=True)
                where = self.blocks.locate_tokens(table, np.arange(start, end))
                index = staging.index.send(*where, self._device)
                self.blocks.scatter(there, slice(start - first, end - first), *index)

    def wait(self) -> None:
        """Wait until all started copies have completed."""
        for staging in self._stagings:
            staging.wait()

    @contextmanager
    def _copy_context(self, slab: Slab, mark: Any) -> Iterator[None]:
        """Enter a context in which copies start after `mark`. When the context exits, even by an exception,
        record the end of these copies in the slab."""
        try:
            with self.backend.start_after(mark):
                yield
        finally:
            slab._staging.end = self.backend.record_end()
