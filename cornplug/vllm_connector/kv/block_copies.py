"""Copies of this rank's KV between vLLM's blocks and host memory, a slab of pages at a time.

On a CPU planes are copied straight. On an accelerator a slab is gathered into one contiguous
buffer there, in the page's own order, and crosses in one contiguous copy to or from pinned
memory: any other copy goes through a pageable temporary of PyTorch's, which it reads while the
transfer may still be filling it. Host memory is touched only after the stream's event.

Needs torch and nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cornplug.vllm_connector.kv.layout import BlockLayout, BlockPlane, TokenPlaces

_DIRECT_TOKENS = 128
"""Tokens moved at once at least: small blocks are coalesced (LMCache measured 20 -> 8 ms)."""
_STAGED_BYTES = 32 << 20
"""A slab on an accelerator: big enough to hide some launches, small beside the memory that vLLM leaves."""


class CopySide(Protocol):
    """Where copies run beside the engine's own work."""

    def enter_thread(self) -> None:
        """Make the device this thread's own; before anything else of that thread."""

    def mark(self) -> Any:
        """The point that the engine's work has reached now."""

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """A context whose copies begin once the engine's work has reached `mark`."""

    def finish(self) -> None:
        """Wait until everything begun within `after` has happened."""

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device's copies reach by themselves."""


class CpuSide:
    """A device without streams: everything happens at once."""

    def enter_thread(self) -> None:
        """There is no device to choose."""

    def mark(self) -> None:
        return None

    @contextmanager
    def after(self, mark: None) -> Iterator[None]:
        yield

    def finish(self) -> None:
        return None

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


class CudaSide:
    """A stream beside the engine's; `mark` is a point of the engine's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()

    def enter_thread(self) -> None:
        # A thread begins on device 0: a rank of another one would make itself a context there.
        torch.cuda.set_device(self._device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def after(self, mark: torch.cuda.Event) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def finish(self) -> None:
        self._done.record(self._stream)
        self._done.synchronize()

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


@dataclass(frozen=True)
class _Part:
    """Planes of some layers, addressed by one strided view of shape (layers, blocks, heads,
    planes, slots, dim). `layers` and `planes` are their places in a page."""

    view: torch.Tensor
    layers: slice
    planes: slice

    def gather(self, blocks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Values of n tokens, shape (n, layers, heads, planes, dim)."""
        return self.view[:, blocks, :, :, slots]

    def scatter(self, blocks: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Write where `gather` would read."""
        self.view[:, blocks, :, :, slots] = values


@dataclass(frozen=True)
class _IndexedPart:
    """One plane of one layer whose places follow no strides."""

    plane: BlockPlane
    cache: torch.Tensor
    layers: slice
    planes: slice

    def gather(self, blocks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return self.plane.gather(self.cache, blocks, slots)[:, None, :, None]

    def scatter(self, blocks: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        self.plane.scatter(self.cache, blocks, slots, values[:, 0, :, 0])


class BlockCopies:
    """One rank's, used by one thread. `shape` is that of this rank's part of a page:
    (heads, layers, planes, page_tokens, dim); `table` in every call is `blocks` of a request
    through `kernel_table`."""

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        layouts: Sequence[BlockLayout],
        shape: tuple[int, int, int, int, int],
        *,
        side: CopySide | None = None,
        direct: bool | None = None,
    ) -> None:
        """`side` and `direct` follow from the caches' device; tests set them."""
        self._caches, self._layouts, self._shape = caches, layouts, shape
        self._device = caches[0].device
        self._dtype = caches[0].dtype
        self._slots = layouts[0].block_size
        affine = all(p.strides is not None for at in layouts for p in (at.keys, at.values))
        self._direct = (self._device.type == "cpu" and affine) if direct is None else direct
        self.side = side or (CpuSide() if self._device.type == "cpu" else CudaSide(self._device))
        self._parts = () if self._direct else tuple(_parts(caches, layouts))
        self._host: torch.Tensor | None = None
        self._slab: torch.Tensor | None = None
        self._index: torch.Tensor | None = None

    @property
    def slab_pages(self) -> int:
        """Pages to move at once."""
        heads, layers, planes, tokens, dim = self._shape
        if self._direct:
            return max(1, _DIRECT_TOKENS // tokens)
        return max(1, _STAGED_BYTES // (heads * layers * planes * tokens * dim * self._dtype.itemsize))

    def host(self, pages: int) -> torch.Tensor:
        """Host memory of a slab, shape (pages, *shape): whole after `copy_out`, read by `copy_in`.

        Kept from slab to slab: new memory would cost a page fault for every 4 KiB copied.
        """
        if self._host is None or len(self._host) < pages:
            self._host = self.side.host((pages, *self._shape), self._dtype)
        return self._host[:pages]

    def copy_out(self, table: NDArray[np.int64], pages: Sequence[int], mark: Any) -> torch.Tensor:
        """`host` with these pages of a request, by their places in it; every byte has arrived."""
        host, size = self.host(len(pages)), self._shape[3]
        with self._settled(mark):
            if self._direct:
                for row, page in enumerate(pages):
                    places = TokenPlaces(table, page * size, (page + 1) * size, self._slots)
                    for plane, cache, part in self._planes(host[row]):
                        plane.copy_out(cache, places, part)
            else:
                slab = self._slab_of(len(pages))
                starts = np.asarray(pages, np.int64)[:, None] * size
                blocks, slots = self._where(table, (starts + np.arange(size)).ravel())
                for one in self._parts:
                    values = one.gather(blocks, slots).unflatten(0, (len(pages), size))
                    slab[:, :, one.layers, one.planes] = values.permute(0, 3, 2, 4, 1, 5)
                host.copy_(slab, non_blocking=True)
        return host

    def copy_in(
        self, table: NDArray[np.int64], first_page: int, pages: int, start: int, end: int, mark: Any
    ) -> None:
        """Tokens [start, end) of a request from `host`, which holds its `pages` from `first_page`
        on. They are in the blocks, and `host` is free again, when this returns."""
        host, size = self.host(pages), self._shape[3]
        first = first_page * size
        start, end = max(start, first), min(end, first + pages * size)
        with self._settled(mark):
            if self._direct:
                for row in range(pages):
                    at = first + row * size
                    low, high = max(start, at), min(end, at + size)
                    if low < high:
                        places = TokenPlaces(table, low, high, self._slots)
                        for plane, cache, part in self._planes(host[row, :, :, :, low - at : high - at]):
                            plane.copy_in(cache, places, part)
            elif start < end:
                slab = self._slab_of(pages)
                slab.copy_(host, non_blocking=True)
                blocks, slots = self._where(table, np.arange(start, end))
                for one in self._parts:
                    values = slab[:, :, one.layers, one.planes].permute(0, 4, 2, 1, 3, 5).flatten(0, 1)
                    one.scatter(blocks, slots, values[start - first : end - first])

    @contextmanager
    def _settled(self, mark: Any) -> Iterator[None]:
        """A context whose copies have all ended when it is left, by an exception too."""
        try:
            with self.side.after(mark):
                yield
        finally:
            self.side.finish()

    def _planes(self, host: torch.Tensor) -> Iterator[tuple[BlockPlane, torch.Tensor, torch.Tensor]]:
        """(plane, its cache, its part of `host`), `host` of shape (heads, layers, 2, n, dim)."""
        for i, (cache, layout) in enumerate(zip(self._caches, self._layouts, strict=True)):
            yield layout.keys, cache, host[:, i, 0]
            yield layout.values, cache, host[:, i, 1]

    def _slab_of(self, pages: int) -> torch.Tensor:
        if self._slab is None or len(self._slab) < pages:
            self._slab = torch.empty((pages, *self._shape), dtype=self._dtype, device=self._device)
        return self._slab[:pages]

    def _where(
        self, table: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(block, slot) of each token on the device, both of shape (n,)."""
        n = len(tokens)
        if self._index is None or len(self._index) < 2 * n:
            self._index = self.side.host((2 * n,), torch.int64)
        index = self._index[: 2 * n]
        at = np.concatenate([table[tokens // self._slots], tokens % self._slots])
        index.copy_(torch.from_numpy(at))
        there = index.to(self._device, non_blocking=True)
        return there[:n], there[n:]


def kernel_table(blocks: Sequence[int], block_size: int, slots: int) -> NDArray[np.int64]:
    """Indices into the caches for a request's blocks, in order.

    The engine counts blocks of `block_size` tokens; a backend whose kernels want smaller ones has
    caches of so many `slots` a block, in which each of the engine's is several neighbours.
    """
    parts = block_size // slots
    ids = np.asarray(blocks, np.int64)
    return ids if parts == 1 else (ids[:, None] * parts + np.arange(parts)).ravel()


def _parts(caches: Sequence[torch.Tensor], layouts: Sequence[BlockLayout]) -> list[_Part | _IndexedPart]:
    """As few gathers as can be: K and V together where they lie alike, and all layers together
    where they lie evenly in one allocation, as vLLM's do."""
    found: list[_Part | _IndexedPart] = []
    for i, (cache, layout) in enumerate(zip(caches, layouts, strict=True)):
        layer, keys, values = slice(i, i + 1), layout.keys, layout.values
        if keys.strides is not None and keys.strides == values.strides and values.base > keys.base:
            found.append(_Part(_strided(cache, keys, values.base - keys.base), layer, slice(0, 2)))
            continue
        for j, plane in enumerate((keys, values)):
            places = slice(j, j + 1)
            if plane.strides is None:
                found.append(_IndexedPart(plane, cache, layer, places))
            else:
                found.append(_Part(_strided(cache, plane, 0), layer, places))
    one = _merged(found)
    return [one] if one is not None else found


def _strided(cache: torch.Tensor, plane: BlockPlane, plane_step: int) -> torch.Tensor:
    """A view of shape (1, blocks, heads, planes, slots, dim); one plane where `plane_step` is 0."""
    assert plane.strides is not None
    heads, tokens, dim = plane.offsets.shape
    head, token, channel = plane.strides
    return cache.as_strided(
        (1, cache.shape[0], heads, 2 if plane_step else 1, tokens, dim),
        (0, cache.stride(0), head, plane_step, token, channel),
        cache.storage_offset() + plane.base,
    )


def _merged(parts: Sequence[_Part | _IndexedPart]) -> _Part | None:
    """All layers as one part; None where they are not evenly spaced in one allocation."""
    views = [part.view for part in parts if isinstance(part, _Part) and part.planes == slice(0, 2)]
    if len(views) < len(parts) or len({(v.shape, v.stride()) for v in views}) > 1:
        return None
    # `data_ptr` would not tell the storages of fake tensors apart.
    if len({v.untyped_storage()._cdata for v in views}) > 1:
        return None
    first = views[0].storage_offset()
    step = views[1].storage_offset() - first if len(views) > 1 else 0
    if step < 0 or any(v.storage_offset() != first + i * step for i, v in enumerate(views)):
        return None
    view = views[0].as_strided((len(views), *views[0].shape[1:]), (step, *views[0].stride()[1:]), first)
    return _Part(view, slice(0, len(views)), slice(0, 2))
