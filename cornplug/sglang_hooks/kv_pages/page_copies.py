"""Copies one rank's KV between SGLang's host pool and pages of the store, tile by tile.

    save    host pool ──gather──> tile, in the page's order ──sum──> ──copy──> the store's memory
    load    the store's memory ──copy──> tile ──sum──> ──scatter──> host pool

A tile has as many complete heads as fit into a core's cache. Each page is therefore read from memory once and
written once. Each step is one call of numpy or xxhash, which release the interpreter's lock. SGLang's
scheduler runs in parallel, and other threads can copy other pages of the batch.

Checksums are computed from the tile, never from the store's memory. If a late writer of another page corrupts
a page, readers of the page therefore detect the corruption.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cornplug.engine_common.rank_pages import RankPages, read_page_header
from cornplug.errors import CodecError, CornplugError
from cornplug.sglang_hooks.kv_pages.layout import HostPages
from cornplug.store.base import Lease, PayloadLocation

Rows = NDArray[np.void]
"""Array of shape (heads, layers, planes, tokens). Each item is a row: a token's values in one plane of one
head and layer."""

_TILE_BYTES: Final = 1 << 20
"""Number of bytes to copy at a time, about the cache size of a server's core. A tile is larger if a single
head's part of a page, over all layers of this rank, is larger."""
_MAX_THREADS: Final = 4
_CORES_PER_THREAD: Final = 4
"""A rank has one copying thread per this number of cores. SGLang's own processes need the other cores."""


def copy_thread_count(device: torch.device | str, ranks: int) -> int:
    """Return the number of threads that copy one rank's pages in one direction.

    The result is 1 if the model runs on the CPU. Otherwise it is at most `_MAX_THREADS`, depending on the
    number of cores that the host's `ranks` ranks share.
    """
    if torch.device(device).type == "cpu":
        return 1
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // (_CORES_PER_THREAD * ranks)))


class PageSlice(NamedTuple):
    """Tokens of a store page, and their memory in the host pool."""

    store_slice: slice
    """Range of tokens in the store page."""
    host_rows: Rows
    """Memory of these tokens in the host pool, with the heads and layers of this rank."""


class _Tile:
    """Buffer for some heads and layers of a page, in the page's order."""

    def __init__(
        self, memory: NDArray[np.uint8], rows: tuple[int, int, int, int], row: np.dtype[np.void]
    ) -> None:
        heads, layers = rows[:2]
        here = memory[: math.prod(rows) * row.itemsize]
        self.layers = here.reshape(heads, layers, -1)
        """Buffer, with shape (heads, layers, bytes)."""
        self.segments = [segment.data for segment in here.reshape(heads, -1)]
        """Slice of the buffer for each head."""
        self.rows: Rows = here.view(row).reshape(rows)


class _Block(NamedTuple):
    """Segments of a page that are copied together through one tile."""

    heads: slice
    """Heads of the segments, as indices in this rank's part of a page."""
    layers: slice
    """Layers of the segments, as indices in this rank's part of a page."""
    numbers: list[int]
    """Indices of these segments among all segments of the page."""
    tile: _Tile


class _Scratch:
    """Memory for the tiles of one thread."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = np.empty(size_bytes, np.uint8)
        self.blocks: dict[int, list[_Block]] = {}
        """Blocks of this rank's part of a page, by number of segments per head. Tiles use this memory."""


class PageCopies:
    """Copies a rank's pages in one direction. Used by one thread at a time.

    Args:
        threads: number of threads that copy the pages of one call in parallel, including the caller's thread.
    """

    def __init__(self, rank_pages: RankPages, host: HostPages, *, threads: int = 1) -> None:
        self._rank_pages = rank_pages
        self._page, self._held = rank_pages.page, rank_pages.rank_slice
        self._layer_bytes = rank_pages.page.layer_bytes
        _, layers, *self._planes, _ = rank_pages.shape
        self._row = np.dtype((np.void, self._layer_bytes // math.prod(self._planes)))
        self._host_size = host.page_size
        self._host, self._pages = host, self._all_pages(host)
        most = min(rank_pages.size_bytes, max(_TILE_BYTES, layers * self._layer_bytes))
        self._scratch = [_Scratch(most) for _ in range(threads)]
        self._helpers = ThreadPoolExecutor(max(1, threads - 1), "cornplug-kv")

    def close(self) -> None:
        """Stop the copying threads. Later calls of `read` and `write` copy on the caller's thread only."""
        del self._scratch[1:]
        self._helpers.shutdown(wait=False)

    # -- pages in the host pool ---------------------------------------------------------------

    def host_page(self, slot: int) -> Rows:
        """Return the host page that begins at a slot."""
        page, rest = divmod(slot, self._host_size)
        # SGLang usually allocates complete pages. These pages are items of one view of the pool.
        return self.as_rows(self._host.page(slot)) if rest else self._pages[page]

    def as_rows(self, part: torch.Tensor) -> Rows:
        """Return a view of host memory of shape (heads, layers, planes, tokens, dim)."""
        found: Rows = part.view(torch.uint8).numpy().view(self._row)[..., 0]
        return found

    def _all_pages(self, host: HostPages) -> Rows:
        """Return all pages of a host pool, shape (pages, heads, layers, planes, tokens)."""
        size, first = host.page_size, host.page(0)
        count = int(host.pool.size) // size
        step = host.page(size).data_ptr() - first.data_ptr() if count > 1 else 0
        one = self.as_rows(first)
        return as_strided(one, (count, *one.shape), (step, *one.strides))

    # -- copies -------------------------------------------------------------------------------

    def write(
        self, pages: Sequence[tuple[Sequence[PageSlice], PayloadLocation]], should_stop: Callable[[], bool]
    ) -> list[dict[int, int] | None]:
        """Copy pages into reserved memory of the store, in order.

        Returns, for each page, the checksums of this rank's segments by index. A page's item is {} if the
        page could not be written, and None if `should_stop` returned True before it was copied.
        """
        found: list[dict[int, int] | None] = [None] * len(pages)

        def one(number: int, scratch: _Scratch) -> None:
            try:
                found[number] = self._write(*pages[number], scratch)
            except CornplugError:
                found[number] = {}

        self._run_parallel(len(pages), one, should_stop)
        return found

    def read(
        self, pages: Sequence[tuple[Lease, Sequence[PageSlice]]], should_stop: Callable[[], bool]
    ) -> tuple[int, CornplugError | None]:
        """Copy leased pages into the host pool, in order, until `should_stop` returns True.

        Returns (number of leading pages that are complete and verified, error of the next page or None). Each
        head is verified before it is copied. The memory of the next page and of later pages may contain some
        heads.
        """
        found: list[bool | CornplugError] = [False] * len(pages)
        failed = False

        def one(number: int, scratch: _Scratch) -> None:
            nonlocal failed
            try:
                self._read(*pages[number], scratch)
                found[number] = True
            except CornplugError as e:
                found[number], failed = e, True

        self._run_parallel(len(pages), one, lambda: failed or should_stop())
        whole = next((i for i, result in enumerate(found) if result is not True), len(found))
        error = found[whole] if whole < len(found) else None
        return whole, error if isinstance(error, CornplugError) else None

    def _run_parallel(
        self, count: int, work: Callable[[int, _Scratch], None], should_stop: Callable[[], bool]
    ) -> None:
        """Call `work` with each number below `count`, in order, on all threads in parallel, until
        `should_stop()`."""
        numbers = iter(range(count))

        def some(scratch: _Scratch) -> None:
            # A thread always finishes the number that it took. Therefore all pages before a failed page are
            # complete.
            while not should_stop() and (number := next(numbers, None)) is not None:
                work(number, scratch)

        helpers = [self._helpers.submit(some, scratch) for scratch in self._scratch[1:count]]
        try:
            some(self._scratch[0])
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()

    def _write(
        self, parts: Sequence[PageSlice], location: PayloadLocation, scratch: _Scratch
    ) -> dict[int, int]:
        """Copy one page, and return its checksums by segment. Raises StoreUnavailable."""
        target = self._rank_slice(self._rank_pages.store.view(location, writable=True))
        digest = xxhash.xxh3_64_intdigest
        sums: dict[int, int] = {}
        for heads, layers, numbers, tile in self._blocks(scratch, self._page.layer_runs):
            for inside, there in parts:
                tile.rows[:, :, :, inside] = there[heads, layers]
            for number, segment in zip(numbers, tile.segments, strict=True):
                sums[number] = digest(segment)
            target[heads, layers] = tile.layers
        return sums

    def _read(self, lease: Lease, parts: Sequence[PageSlice], scratch: _Scratch) -> None:
        """Copy and verify one page. Raises CodecError, StoreUnavailable."""
        checksums = read_page_header(lease, self._page).checksums
        runs = len(checksums) // self._page.heads
        if not self._rank_pages.has_complete_runs(runs):
            self._read_staged(lease.location, checksums, parts)
            return
        payload = self._rank_slice(self._rank_pages.store.view(lease.location))
        digest = xxhash.xxh3_64_intdigest
        for heads, layers, numbers, tile in self._blocks(scratch, runs):
            tile.layers[:] = payload[heads, layers]
            for number, segment in zip(numbers, tile.segments, strict=True):
                if digest(segment) != checksums[number]:
                    raise CodecError("checksum mismatch in a page", reason="corrupt")
            for inside, there in parts:
                there[heads, layers] = tile.rows[:, :, :, inside]

    def _read_staged(
        self, location: PayloadLocation, checksums: Sequence[int], parts: Sequence[PageSlice]
    ) -> None:
        """Copy and verify one page whose segments have more layers than this rank has."""
        memory = self._rank_pages.allocate_shard()
        self._rank_pages.copy(location, checksums, memory)
        rows = self.as_rows(memory)
        for inside, there in parts:
            there[:] = rows[:, :, :, inside]

    def _rank_slice(self, payload: memoryview) -> NDArray[np.uint8]:
        """Return this rank's part of a page in the store, shape (heads, layers, bytes)."""
        heads, layers = self._held.heads, self._held.layers
        shape = (self._page.heads, self._page.layers, self._layer_bytes)
        whole = np.frombuffer(payload, np.uint8).reshape(shape)
        return whole[heads.start : heads.stop, layers.start : layers.stop]

    def _blocks(self, scratch: _Scratch, runs: int) -> list[_Block]:
        """Divide this rank's part of a page into blocks that are copied together. `runs` is the number of
        segments per head in the page."""
        found = scratch.blocks.get(runs)
        if found is None:
            found = scratch.blocks[runs] = self._plan_blocks(scratch.memory, runs)
        return found

    def _plan_blocks(self, memory: NDArray[np.uint8], runs: int) -> list[_Block]:
        held, size, blocks = self._held, self._page.layers // runs, []
        step = max(1, _TILE_BYTES // (size * self._layer_bytes))
        planes, tokens = self._planes
        for run in held.run_range(self._page, runs):
            first = run * size - held.layers.start
            for at in range(0, len(held.heads), step):
                heads = slice(at, min(at + step, len(held.heads)))
                numbers = [head * runs + run for head in held.heads[heads]]
                tile = _Tile(memory, (len(numbers), size, planes, tokens), self._row)
                blocks.append(_Block(heads, slice(first, first + size), numbers, tile))
        return blocks
