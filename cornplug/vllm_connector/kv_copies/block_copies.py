"""Copies of this rank's KV between vLLM's blocks and host memory, a slab of pages at a time.

On a CPU planes are copied straight. On an accelerator a slab, pages of one request or of many, is
gathered into one contiguous buffer there, in the page's own order, and crosses in one contiguous copy
to or from pinned memory: any other copy goes through a pageable temporary of PyTorch's, which it reads
while the transfer may still be filling it. Two buffers take turns, so that one slab crosses while the
host reads or fills the other. Host memory is touched only after the slab's event.

Needs torch and nothing of vLLM.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cornplug.vllm_connector.kv_copies.copy_sides import CopySide, CpuSide, CudaSide
from cornplug.vllm_connector.kv_copies.layout import BlockLayout, BlockPlane, TokenPlaces

Table = NDArray[np.int64]
_DIRECT_TOKENS = 128
"""Tokens moved at once at least: small blocks are coalesced (LMCache measured 20 -> 8 ms)."""
_STAGED_BYTES = 16 << 20
"""A slab on an accelerator: big enough to hide some launches; four of them (two each way) are small beside
the memory that vLLM leaves."""


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


class _Staging:
    """Memory of a slab on its way: on the host, on the device, and where its tokens lie. Made at its first
    use and kept: new memory would cost a page fault for every 4 KiB copied."""

    def __init__(self, side: CopySide, shape: Sequence[int], dtype: torch.dtype) -> None:
        """`shape` of the whole slab: (pages, heads, layers, planes, tokens, dim)."""
        self._side, self._shape, self._dtype = side, shape, dtype
        self.end: Any = None
        """Of the last copies that use it; None where they have happened."""
        self._there: tuple[torch.Tensor, torch.Tensor] | None = None

    @cached_property
    def host(self) -> torch.Tensor:
        return self._side.host(self._shape, self._dtype)

    @cached_property
    def _index(self) -> torch.Tensor:
        return self._side.host((2 * self._shape[0] * self._shape[4],), torch.int64)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(slab, index) on the device; made within `after`, so that the allocator knows their stream."""
        if self._there is None:
            slab = torch.empty(tuple(self._shape), dtype=self._dtype, device=device)
            self._there = slab, torch.empty_like(self._index, device=device)
        return self._there

    def send_index(self, blocks: NDArray[np.int64], slots: NDArray[np.int64], to: torch.device) -> Any:
        """(block, slot) of each token on the device, both of shape (n,)."""
        n, there = len(blocks), self.on(to)[1]
        here = self._index[: 2 * n]
        here.copy_(torch.from_numpy(np.concatenate([blocks, slots])))
        there[: 2 * n].copy_(here, non_blocking=True)
        return there[:n], there[n : 2 * n]

    def settle(self) -> None:
        """Wait until its copies have happened."""
        if self.end is not None:
            end, self.end = self.end, None
            self._side.wait(end)


class Slab:
    """Pages on their way; from `BlockCopies.begin_out` or `BlockCopies.slab`."""

    def __init__(self, staging: _Staging, pages: int) -> None:
        self._staging, self._pages = staging, pages

    @property
    def host(self) -> torch.Tensor:
        """Host memory of the pages, shape (pages, heads, layers, planes, tokens, dim)."""
        return self._staging.host[: self._pages]

    def arrived(self) -> torch.Tensor:
        """`host`, once every byte has arrived there."""
        self._staging.settle()
        return self.host


class BlockCopies:
    """One rank's, one way, used by one thread. `shape` is that of this rank's part of a page:
    (heads, layers, planes, page_tokens, dim); a table is `blocks` of a request through `kernel_table`."""

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        layouts: Sequence[BlockLayout],
        shape: tuple[int, int, int, int, int],
        *,
        side: CopySide | None = None,
        direct: bool | None = None,
        urgent: bool = False,
        share: float = 1.0,
    ) -> None:
        """`side` and `direct` follow from the caches' device; tests set them. `share` of a slab's memory."""
        self._share = share
        self._caches, self._layouts, self._shape = caches, layouts, shape
        self._device = caches[0].device
        self._dtype = caches[0].dtype
        self._slots = layouts[0].block_size
        affine = all(plane.strides is not None for at in layouts for plane in at.planes)
        self._direct = (self._device.type == "cpu" and affine) if direct is None else direct
        if side is None:
            side = CpuSide() if self._device.type == "cpu" else CudaSide(self._device, urgent=urgent)
        self.side = side
        self._parts = () if self._direct else tuple(_parts(caches, layouts))
        stagings = 1 if self._direct else 2
        self._stagings = deque(
            _Staging(side, (self.slab_pages, *shape), self._dtype) for _ in range(stagings)
        )

    @property
    def slab_pages(self) -> int:
        """Pages to move at once."""
        heads, layers, planes, tokens, dim = self._shape
        if self._direct:
            return max(1, _DIRECT_TOKENS // tokens)
        page_bytes = heads * layers * planes * tokens * dim * self._dtype.itemsize
        return max(1, int(_STAGED_BYTES * self._share) // page_bytes)

    @property
    def ahead(self) -> int:
        """Slabs that may be on their way while the host works on another."""
        return len(self._stagings) - 1

    def slab(self, pages: int) -> Slab:
        """Host memory of a slab of at most `slab_pages` pages. It is free: earlier copies have ended."""
        self._stagings.rotate(-1)
        staging = self._stagings[-1]
        staging.settle()
        return Slab(staging, pages)

    def begin_out(self, pages: Sequence[tuple[Table, int]], mark: Any) -> Slab:
        """Begin to copy pages out, each named by its request's table and its place in it.

        The slab's memory is used again after `ahead` further slabs.
        """
        slab, size = self.slab(len(pages)), self._shape[3]
        with self._begun(slab, mark):
            if self._direct:
                for host, (table, page) in zip(slab.host, pages, strict=True):
                    places = TokenPlaces(table, page * size, (page + 1) * size, self._slots)
                    for plane, cache, part in self._planes(host):
                        plane.copy_out(cache, places, part)
            else:
                staging = slab._staging
                there = staging.on(self._device)[0][: len(pages)]
                blocks, slots = staging.send_index(*self._where_pages(pages), self._device)
                for one in self._parts:
                    values = one.gather(blocks, slots).unflatten(0, (len(pages), size))
                    there[:, :, one.layers, one.planes] = values.permute(0, 3, 2, 4, 1, 5)
                slab.host.copy_(there, non_blocking=True)
        return slab

    def begin_in(
        self, slab: Slab, table: Table, first_page: int, pages: int, tokens: tuple[int, int], mark: Any
    ) -> None:
        """Begin to copy the `tokens` (from, to) of a request from `slab`, whose host memory begins with so
        many of its pages from `first_page` on. They are in the blocks once `settle` has returned."""
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
                        places = TokenPlaces(table, low, high, self._slots)
                        for plane, cache, part in self._planes(part_of[:, :, :, low - at : high - at]):
                            plane.copy_in(cache, places, part)
            else:
                staging = slab._staging
                there = staging.on(self._device)[0][:pages]
                there.copy_(host, non_blocking=True)
                blocks, slots = staging.send_index(*self._where(table, np.arange(start, end)), self._device)
                for one in self._parts:
                    values = there[:, :, one.layers, one.planes].permute(0, 4, 2, 1, 3, 5).flatten(0, 1)
                    one.scatter(blocks, slots, values[start - first : end - first])

    def settle(self) -> None:
        """Wait until every copy begun has happened."""
        for staging in self._stagings:
            staging.settle()

    @contextmanager
    def _begun(self, slab: Slab, mark: Any) -> Iterator[None]:
        """A context whose copies are the slab's, those too that an exception cuts short."""
        try:
            with self.side.after(mark):
                yield
        finally:
            slab._staging.end = self.side.begun()

    def _planes(self, host: torch.Tensor) -> Iterator[tuple[BlockPlane, torch.Tensor, torch.Tensor]]:
        """(plane, its cache, its part of `host`), `host` of shape (heads, layers, planes, n, dim)."""
        for i, (cache, layout) in enumerate(zip(self._caches, self._layouts, strict=True)):
            for j, plane in enumerate(layout.planes):
                yield plane, cache, host[:, i, j]

    def _where_pages(self, pages: Sequence[tuple[Table, int]]) -> tuple[Table, Table]:
        """(block, slot) of each token of these pages; neighbours of one request are looked up at once."""
        size, found = self._shape[3], []
        for _, group in itertools.groupby(pages, lambda page: id(page[0])):
            of_request = list(group)
            starts = np.asarray([page for _, page in of_request], np.int64)[:, None] * size
            found.append(self._where(of_request[0][0], (starts + np.arange(size)).ravel()))
        blocks, slots = zip(*found, strict=True)
        return np.concatenate(blocks), np.concatenate(slots)

    def _where(self, table: Table, tokens: NDArray[np.int64]) -> tuple[Table, Table]:
        """(block, slot) of each token of a request, both of shape (n,)."""
        return table[tokens // self._slots], tokens % self._slots


def kernel_table(blocks: Sequence[int], block_size: int, slots: int) -> NDArray[np.int64]:
    """Indices into the caches for a request's blocks, in order.

    The engine counts blocks of `block_size` tokens; a backend whose kernels want smaller ones has
    caches of so many `slots` a block, in which each of the engine's is several neighbours.
    """
    parts = block_size // slots
    ids = np.asarray(blocks, np.int64)
    return ids if parts == 1 else (ids[:, None] * parts + np.arange(parts)).ravel()


def _parts(caches: Sequence[torch.Tensor], layouts: Sequence[BlockLayout]) -> list[_Part | _IndexedPart]:
    """As few gathers as can be: all planes together where they lie alike, and all layers together
    where they lie evenly in one allocation, as vLLM's do."""
    found: list[_Part | _IndexedPart] = []
    every = slice(0, len(layouts[0].planes))
    for i, (cache, layout) in enumerate(zip(caches, layouts, strict=True)):
        layer, step = slice(i, i + 1), _plane_step(layout.planes)
        if step is not None:
            view = _strided(cache, layout.planes[0], len(layout.planes), step)
            found.append(_Part(view, layer, every))
            continue
        for j, plane in enumerate(layout.planes):
            places = slice(j, j + 1)
            if plane.strides is None:
                found.append(_IndexedPart(plane, cache, layer, places))
            else:
                found.append(_Part(_strided(cache, plane, 1, 0), layer, places))
    one = _merged(found, every)
    return [one] if one is not None else found


def _plane_step(planes: Sequence[BlockPlane]) -> int | None:
    """Elements from one plane to the next, 0 for a single one; None where they do not lie alike."""
    first, last = planes[0], planes[-1]
    if first.strides is None or first.strides != last.strides:
        return None
    step = last.base - first.base
    return step if step > 0 or len(planes) == 1 else None


def _strided(cache: torch.Tensor, first: BlockPlane, planes: int, plane_step: int) -> torch.Tensor:
    """A view of so many planes, shape (1, blocks, heads, planes, slots, dim)."""
    assert first.strides is not None
    heads, tokens, dim = first.offsets.shape
    head, token, channel = first.strides
    return cache.as_strided(
        (1, cache.shape[0], heads, planes, tokens, dim),
        (0, cache.stride(0), head, plane_step, token, channel),
        cache.storage_offset() + first.base,
    )


def _merged(parts: Sequence[_Part | _IndexedPart], planes: slice) -> _Part | None:
    """All layers as one part of all `planes`; None where they are not evenly spaced in one allocation."""
    views = [part.view for part in parts if isinstance(part, _Part) and part.planes == planes]
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
    return _Part(view, slice(0, len(views)), planes)
