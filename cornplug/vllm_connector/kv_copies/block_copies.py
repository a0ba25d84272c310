"""Copies of one rank's KV between vLLM's blocks and host memory. Several pages, a slab, are copied at a time.

On a CPU, planes (K, V or latents) are copied directly. On an accelerator, the pages of a slab (from one or
more requests) are gathered into a contiguous device buffer in page order. One contiguous copy then transfers
the buffer to or from pinned memory. Any other copy would go through a temporary pageable buffer, which
PyTorch may read while the transfer is still filling it. Two buffers alternate, so that one slab is
transferred while the host reads or fills the other slab. Host memory is accessed only after the slab's event.

The thread that copies KV on a CPU must not delay the forward pass. vLLM pins its compute threads, and a
thread that the pinned main thread starts inherits the main thread's core. PyTorch would also split each
larger copy over all compute cores. Therefore the copying thread moves to other cores, and does not use
PyTorch's worker threads.

This module needs torch, but not vLLM.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cornplug.vllm_connector.kv_copies.cache_blocks import CacheBlocks, PageShape, Table
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
    or `BlockCopies.next_slab`."""

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


def leave_compute_cores() -> None:
    """Move the calling thread to cores of the same NUMA node to which no thread of this process is pinned.
    From then on, PyTorch runs this thread's operations only in this thread."""
    _limit_to_one_thread()
    with suppress(OSError):
        allowed, pinned = os.sched_getaffinity(os.getppid()), _pinned_cores()
        free, nodes = allowed - pinned, {_numa_node(core) for core in pinned}
        os.sched_setaffinity(0, {core for core in free if _numa_node(core) in nodes} or free or allowed)


class CopyBackend(Protocol):
    """Interface to the device or stream on which copies run in parallel with the engine's own work."""

    def enter_thread(self) -> None:
        """Set the device of the calling thread. Call this before anything else in that thread."""

    def mark(self) -> Any:
        """Return a mark for the current position in the engine's work, as an argument for `start_after`."""

    def start_after(self, mark: Any) -> AbstractContextManager[None]:
        """Return a context. Copies that start within the context begin after the engine's work has reached
        `mark`."""

    def record_end(self) -> Any:
        """Return an event that occurs when all copies that have been started within `start_after` have
        completed."""

    def wait(self, end: Any) -> None:
        """Wait for the event `end`, which `record_end` returned."""

    def is_done(self, end: Any) -> bool:
        """Return whether the event `end`, which `record_end` returned, has occurred."""

    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory that the device can access directly."""


class CpuBackend:
    """Synchronous copies, for a device without streams."""

    def enter_thread(self) -> None:
        leave_compute_cores()

    def mark(self) -> None:
        return None

    @contextmanager
    def start_after(self, mark: None) -> Iterator[None]:
        yield

    def record_end(self) -> None:
        return None

    def wait(self, end: None) -> None:
        """Do nothing, because copies are synchronous."""

    def is_done(self, end: None) -> bool:
        return True

    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


class CudaBackend:
    """Asynchronous copies on a separate CUDA stream. `mark` returns an event on the engine's stream."""

    def __init__(self, device: torch.device, *, urgent: bool = False) -> None:
        """Create a stream for copies. If `urgent`, the device runs its kernels before the kernels of other
        streams."""
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)

    def enter_thread(self) -> None:
        # A new thread uses device 0 by default, and would create a CUDA context on it.
        torch.cuda.set_device(self._device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def start_after(self, mark: torch.cuda.Event) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def record_end(self) -> torch.cuda.Event:
        # With a blocking event, the waiting thread sleeps and does not occupy a core that the engine needs.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def wait(self, end: torch.cuda.Event) -> None:
        end.synchronize()

    def is_done(self, end: torch.cuda.Event) -> bool:
        return end.query()

    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


class TokenIndex:
    """Buffers for the block and slot numbers of a slab's tokens, on the host and on the device. They are
    allocated on first use and reused."""

    def __init__(self, backend: CopyBackend, tokens: int) -> None:
        """Prepare buffers for at most `tokens` tokens."""
        self._backend, self._tokens = backend, tokens
        self._device_buffer: torch.Tensor | None = None

    @cached_property
    def _host_buffer(self) -> torch.Tensor:
        return self._backend.allocate_host((2 * self._tokens,), torch.int64)

    def send(
        self, blocks: NDArray[np.int64], slots: NDArray[np.int64], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the block and slot numbers of n tokens to the device, and return both as tensors of shape
        (n,). Call this within `CopyBackend.start_after`. Do not call it again until the slab's copies have
        completed."""
        if self._device_buffer is None:
            self._device_buffer = torch.empty_like(self._host_buffer, device=device)
        n, there = len(blocks), self._device_buffer
        here = self._host_buffer[: 2 * n]
        here.copy_(torch.from_numpy(np.concatenate([blocks, slots])))
        there[: 2 * n].copy_(here, non_blocking=True)
        return there[:n], there[n : 2 * n]


def _pinned_cores() -> set[int]:
    """Return the cores to which threads of this process are pinned. Threads that may run on several cores are
    ignored."""
    pinned: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            cores = os.sched_getaffinity(int(thread.name))
            if len(cores) == 1:
                pinned |= cores
    return pinned


def _numa_node(core: int) -> str:
    """Return the name of the NUMA node of a core, or "" if the kernel does not report it."""
    return next((node.name for node in Path(f"/sys/devices/system/cpu/cpu{core}").glob("node[0-9]*")), "")


def _limit_to_one_thread() -> None:
    # torch.set_num_threads would also change the main thread's number of threads, and vLLM replaces that
    # function. PyTorch sets the number of threads of a new thread at the thread's first use of PyTorch. Use
    # PyTorch once before changing the number.
    torch.get_num_threads()
    with suppress(AttributeError):
        ctypes.CDLL(None).omp_set_num_threads(1)
