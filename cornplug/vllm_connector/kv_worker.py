"""The worker half of the KV connector: bytes between vLLM's blocks and pages in the store.

Copies run on one thread of their own (and, on an accelerator, one stream of their own), so
the forward pass does not wait. A block is stable while it is read: full blocks of a running
request never change, a finished request's blocks stay until `finished_sending`, and
`drain` finishes all reading before the engine gives blocks of a preempted request away.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cornplug.codec import checksum
from cornplug.engine_side.tensors import rows
from cornplug.errors import CodecError, CornplugError, LayoutError
from cornplug.kv_page import PageGeometry, RankSlice
from cornplug.store.base import Store
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.kv_layout import BlockLayout, Places, Plane, derive, write_op
from cornplug.vllm_connector.kv_moves import KVAcks, Load, PageRead, PageWrite, Save

Bytes = NDArray[np.uint8]

_SLAB_TOKENS = 128
"""Tokens moved at once at least: small blocks are coalesced (LMCache measured 20 -> 8 ms)."""


class _Cpu:
    """The side stream of a device without streams."""

    def mark(self) -> None:
        return None

    @contextmanager
    def after(self, mark: None) -> Iterator[None]:
        yield

    def finish(self) -> None:
        return None


class _Cuda:
    """A stream beside the engine's; `mark` is a point of the engine's stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    @contextmanager
    def after(self, mark: torch.cuda.Event) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def finish(self) -> None:
        self._stream.synchronize()


class KVWorker:
    """One per rank."""

    def __init__(self, geometry: PageGeometry, mine: RankSlice, block_size: int, store: Store) -> None:
        self._page = geometry
        self._mine = mine
        self._block_size = block_size
        self._store = store
        self._caches: list[torch.Tensor] = []
        self._layouts: list[BlockLayout] = []
        self._side: Any = _Cpu()
        self._device = torch.device("cpu")
        self._stage: torch.Tensor | None = None
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="cornplug-kv")
        self._lock = threading.Lock()
        self._acks = KVAcks()
        self._loaded: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._open_saves: dict[str, int] = {}
        self._finishing: set[str] = set()
        self._pending: set[Future[None]] = set()

    # -- start ------------------------------------------------------------------------------

    def register(self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> None:
        """Learn the caches of this rank, in layer order, and verify how they are written.

        A cache that cannot be mapped is reported to the scheduler half, which stops sharing.
        """
        page, mine = self._page, self._mine
        try:
            if len(caches) != len(mine.layers):
                raise LayoutError(
                    f"{len(caches)} KV caches for {len(mine.layers)} layers: shared or extra layers",
                    reason="layout",
                )
            known: dict[tuple[Any, ...], BlockLayout] = {}
            for name, cache in caches.items():
                if str(cache.dtype).removeprefix("torch.") != page.dtype:
                    raise LayoutError(f"{name} holds {cache.dtype}, pages {page.dtype}", reason="kv_dtype")
                kind = (type(layers[name].impl), cache.shape, cache.stride(), cache.dtype)
                if kind not in known:
                    known[kind] = derive(
                        cache, len(mine.heads), self._block_size, page.dim, write_op(layers[name])
                    )
                self._caches.append(cache)
                self._layouts.append(known[kind])
        except LayoutError as e:
            compat.logger.warning("cornplug: KV of this engine is not shared: %s", e)
            self._acks.unusable = e.reason
            return
        self._device = self._caches[0].device
        if self._device.type == "cuda":
            self._side = _Cuda(self._device)
        compat.logger.info(
            "cornplug: KV layout verified by writing it: %d layers, heads %d to %d of %d",
            len(self._caches),
            mine.heads.start,
            mine.heads.stop - 1,
            page.heads,
        )

    # -- the engine's step ------------------------------------------------------------------

    def start_loads(self, loads: Sequence[Load]) -> None:
        """Begin loads; their requests run once `finished` names them."""
        for load in loads:
            self._submit(self._load, load)

    def start_saves(self, saves: Sequence[Save]) -> None:
        """Begin copying out what this step's forward has computed."""
        for save in saves:
            with self._lock:
                self._open_saves[save.request_id] = self._open_saves.get(save.request_id, 0) + 1
            self._submit(self._save, save)

    def finishing(self, request_ids: Sequence[str]) -> None:
        """These requests' blocks stay until `finished` names them as sent."""
        self._finishing.update(request_ids)

    def drain(self) -> None:
        """Wait until no block is being read or written."""
        wait(self._pending)
        self._pending.clear()

    def finished(self) -> tuple[set[str], set[str]]:
        """(sent, received) request ids since the last call."""
        with self._lock:
            sent = {r for r in self._finishing if not self._open_saves.get(r)}
            self._finishing -= sent
            received, self._loaded = self._loaded, set()
        return sent, received

    def bad_blocks(self) -> set[int]:
        """Blocks whose load failed; a request is never `finished` before its bad blocks are here."""
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def acks(self) -> KVAcks | None:
        """What the scheduler half has to know, None when nothing is new."""
        with self._lock:
            if self._acks.is_empty():
                return None
            acks, self._acks = self._acks, KVAcks()
        return acks

    def close(self) -> None:
        """Finish what is moving."""
        self._mover.shutdown(wait=True, cancel_futures=True)

    # -- the mover's thread -----------------------------------------------------------------

    def _submit(self, work: Any, item: Load | Save) -> None:
        mark = self._side.mark()
        future = self._mover.submit(work, item, mark)
        future.add_done_callback(_log_failure)
        self._pending.add(future)
        self._pending -= {f for f in self._pending if f.done()}

    def _load(self, load: Load, mark: Any) -> None:
        # Whatever happens here, the request must be told that its load is over.
        done, reason = 0, "load_error"
        try:
            with self._side.after(mark):
                for slab in self._slabs(load.pages):
                    whole = self._read_slab(load, slab)
                    self._side.finish()
                    done += whole
                    if whole < len(slab):
                        raise CodecError(f"page {slab[whole].index} is corrupt", reason="corrupt")
            reason = ""
        except CornplugError as e:
            reason = e.reason
            compat.logger.debug("cornplug: load of %s failed: %s", load.request_id, e)
            if isinstance(e, CodecError):
                self._discard(load.pages[done:])
        finally:
            first_bad = (
                load.pages[done].index * self._page.page_tokens if done < len(load.pages) else load.end
            )
            with self._lock:
                if reason:
                    self._bad_blocks |= load.blocks_from(max(first_bad, load.start), self._block_size)
                    self._acks.failed_loads[load.request_id] = reason
                self._acks.loaded_bytes += done * self._slice_bytes
                self._loaded.add(load.request_id)

    def _save(self, save: Save, mark: Any) -> None:
        written: dict[int, dict[int, int]] = {}
        try:
            for slab in self._slabs(save.pages) if self._mine.writes else ():
                try:
                    with self._side.after(mark):
                        written |= self._write_slab(save, slab)
                except CornplugError as e:
                    compat.logger.debug("cornplug: save of %s failed: %s", save.request_id, e)
        finally:
            missing = [page.token for page in save.pages if page.token not in written]
            with self._lock:
                self._acks.written |= written
                if self._mine.writes:
                    share = len(self._mine.heads) * len(self._mine.layers)
                    self._acks.failed_writes |= dict.fromkeys(missing, share)
                self._open_saves[save.request_id] -= 1
                if not self._open_saves[save.request_id]:
                    del self._open_saves[save.request_id]

    def _slabs(self, pages: Sequence[Any]) -> Iterator[Sequence[Any]]:
        step = max(1, _SLAB_TOKENS // self._page.page_tokens)
        for i in range(0, len(pages), step):
            yield pages[i : i + step]

    @property
    def _slice_bytes(self) -> int:
        return len(self._mine.heads) * len(self._mine.layers) * self._page.segment_bytes

    def _staging(self, pages: int) -> torch.Tensor:
        """Host memory for some pages of this rank: (pages, heads, layers, 2, page_tokens, dim).

        Kept from slab to slab: new memory would cost a page fault for every 4 KiB copied.
        """
        if self._stage is None or len(self._stage) < pages:
            self._stage = torch.empty(
                (pages, len(self._mine.heads), len(self._mine.layers), *self._page.shape[2:]),
                dtype=getattr(torch, self._page.dtype),
                pin_memory=self._device.type == "cuda",
            )
        return self._stage[:pages]

    def _places(self, blocks: Sequence[int], start: int, end: int) -> Places:
        return Places(blocks, start, end, self._block_size, self._device)

    def _planes(self, host: torch.Tensor) -> Iterator[tuple[Plane, torch.Tensor, torch.Tensor]]:
        """(plane, its cache, its part of `host`), `host` of shape (heads, layers, 2, n, dim)."""
        for i, (cache, layout) in enumerate(zip(self._caches, self._layouts, strict=True)):
            yield layout.keys, cache, host[:, i, 0]
            yield layout.values, cache, host[:, i, 1]

    def _write_slab(self, save: Save, pages: Sequence[PageWrite]) -> dict[int, dict[int, int]]:
        """Copy neighbouring pages out; reservation token -> segment -> checksum of the source."""
        if not self._layouts:
            raise LayoutError("this cache is not mapped", reason="layout")
        size = self._page.page_tokens
        staging = self._staging(len(pages))
        for row, target in enumerate(pages):
            places = self._places(save.blocks, target.index * size, (target.index + 1) * size)
            for plane, cache, host in self._planes(staging[row]):
                plane.copy_out(cache, places, host)
        self._side.finish()
        sums: dict[int, dict[int, int]] = {}
        for row, target in enumerate(pages):
            found = sums[target.token] = dict[int, int]()
            source = rows(staging[row])
            arena = self._arena_rows(self._store.view(target.location, writable=True))
            for head, here, there in zip(self._mine.heads, source, arena, strict=True):
                self._sum(here, head, found)
                np.copyto(there, here)
        return sums

    def _read_slab(self, load: Load, pages: Sequence[PageRead]) -> int:
        """Copy neighbouring pages in, each segment verified in our own memory first; how many
        there were before a damaged one."""
        if not self._layouts:
            raise LayoutError("this cache is not mapped", reason="layout")
        size = self._page.page_tokens
        staging = self._staging(len(pages))
        each = range(len(pages))
        whole = list(itertools.takewhile(lambda row: self._copied(pages[row], staging[row]), each))
        for row in whole:
            source = pages[row]
            first = source.index * size
            start, end = max(first, load.start), min(first + size, load.end)
            places = self._places(load.blocks, start, end)
            for plane, cache, host in self._planes(staging[row, :, :, :, start - first : end - first]):
                plane.copy_in(cache, places, host)
        return len(whole)

    def _copied(self, source: PageRead, target: torch.Tensor) -> bool:
        """Copy this rank's part of a page to host memory; whether the copy is what was stored."""
        arena = self._arena_rows(self._store.view(source.location))
        for head, here, there in zip(self._mine.heads, rows(target), arena, strict=True):
            np.copyto(here, there)
            found: dict[int, int] = {}
            self._sum(here, head, found)
            if any(value != source.checksums[segment] for segment, value in found.items()):
                return False
        return True

    def _discard(self, pages: Sequence[PageRead]) -> None:
        """Drop a damaged page and what follows it: where one is damaged others are, the request
        computes them all again anyway, and whole prefixes heal at once instead of page by page."""
        try:
            self._store.delete([page.key for page in pages], deadline_s=1.0)
        except CornplugError as e:
            compat.logger.debug("cornplug: damaged pages not dropped: %s", e)

    def _arena_rows(self, arena: memoryview) -> Bytes:
        """This rank's part of a page in the store, shape (heads, bytes of its layers)."""
        page, mine, step = self._page, self._mine, self._page.segment_bytes
        whole = np.frombuffer(arena, np.uint8).reshape(page.heads, page.layers * step)
        part = slice(mine.layers.start * step, mine.layers.stop * step)
        return whole[mine.heads.start : mine.heads.stop, part]

    def _sum(self, row: Bytes, head: int, found: dict[int, int]) -> None:
        """Add segment -> checksum for one head's bytes of this rank's layers."""
        step, data = self._page.segment_bytes, row.data
        for i, layer in enumerate(self._mine.layers):
            found[head * self._page.layers + layer] = checksum(data[i * step : (i + 1) * step])


def _log_failure(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        compat.logger.error("cornplug: moving KV failed", exc_info=error)
