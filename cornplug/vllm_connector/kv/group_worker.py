"""Copies between the blocks of one cache group and pages in the store, on one rank. `KVWorker` (`worker.py`)
has one `GroupWorker` per cache group.

Copies run on a separate thread, except direct copies between a GPU and the store (`ArenaTransfers`). On an
accelerator, copies use two separate streams, with loads before saves, so that the forward pass does not wait.
All pages that a step saves through this thread are one job, regardless of their requests. Full blocks of a
running request never change. Blocks of a preempted request are reused immediately, and blocks of a finished
request may be reused at any time. vLLM's second model runner overwrites reused blocks before the worker is
notified. Saves from these blocks that are not acknowledged by then are given up, because their data may be
wrong.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from cornplug.codec import segment_checksums
from cornplug.engine_common.rank_pages import RankPages
from cornplug.errors import CodecError, CornplugError, LayoutError, StoreUnavailable
from cornplug.store.base import Lease, Leases
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.kv.metadata import (
    CornplugKVWorkerMetadata,
    OngoingSave,
    PageLoad,
    PageSave,
    PageWrite,
    SavedPages,
    TransferReports,
    saved_pages,
    take_pages,
)
from cornplug.vllm_connector.kv_copies.block_copies import BlockCopies, CopyBackend, CpuBackend, Slab
from cornplug.vllm_connector.kv_copies.cache_blocks import BlockSizes, CacheBlocks, kernel_table
from cornplug.vllm_connector.kv_copies.layout import BlockLayout, derive_layouts, single_row_layout
from cornplug.vllm_connector.kv_copies.mover import Job, KVMover

if TYPE_CHECKING:
    from cornplug.vllm_connector.kv.arena_moves import ArenaTransfers


class GroupWorker:
    """Starts copies between one cache group's blocks and the store on one rank, and reports their
    results."""

    def __init__(
        self,
        pages: RankPages,
        block_size: int,
        background_timeout_s: float,
        *,
        other_worker: GroupWorker | None = None,
        slab_share: float = 1.0,
        scales: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Create the worker of one group. `background_timeout_s` is the timeout for calls of the mover
        to the store. `other_worker` is the worker of the previous group, whose mover this worker shares.
        `slab_share` is the fraction of the maximum slab size on an accelerator that this worker uses.
        `scales` maps layer names to the scales of K and V, if pages are quantised."""
        self._scales = scales or {}
        self._page, self._rank_slice = pages.page, pages.rank_slice
        self._pages = pages
        self._background_timeout_s = background_timeout_s
        self._block_size = block_size
        self._out_copies: BlockCopies | None = None
        self._in_copies: BlockCopies | None = None
        self._arena_transfers: ArenaTransfers | None = None
        """Direct copies between the GPU and the store, or None if pages are copied through host memory."""
        self._on_gpu = False
        self._sizes = BlockSizes(block_size, block_size)
        self._slab_share = slab_share
        self._other_worker = other_worker
        self._mover: KVMover = (
            other_worker._mover if other_worker is not None else KVMover(lambda: self._backend.enter_thread())
        )
        self._backend: CopyBackend = CpuBackend()
        self._reports = TransferReports(pages, block_size)

    # -- start ------------------------------------------------------------------------------

    def register(self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> None:
        """Register this rank's KV caches, in layer order, and verify their memory layout.

        If a cache cannot be mapped to pages, the scheduler half is notified and stops sharing.
        """
        mine = self._rank_slice
        try:
            if len(caches) != len(mine.layers):
                raise LayoutError(
                    f"{len(caches)} KV caches for {len(mine.layers)} layers: the model has shared or extra "
                    "layers",
                    reason="layout",
                )
            layouts = self._derive_layouts(caches, layers)
        except LayoutError as e:
            self.report_unusable(e)
            return
        self._out_copies, self._in_copies = (
            BlockCopies(
                list(caches.values()), layouts, self._pages.shape, urgent=urgent, slab_share=self._slab_share
            )
            for urgent in (False, True)
        )
        self._sizes = BlockSizes(self._block_size, layouts[0].block_size)
        self._backend = self._out_copies.backend
        self._on_gpu = self._out_copies.blocks.device.type == "cuda"
        if self._on_gpu and not self._page.state:  # Direct copies gather tokens, which states do not have.
            self._arena_transfers = self._open_arena_transfers(self._out_copies.blocks)
        compat.logger.info(
            "cornplug: KV layout verified: %d layers, heads %d to %d of %d",
            len(layouts),
            mine.heads.start,
            mine.heads.stop - 1,
            self._page.heads,
        )

    def _derive_layouts(
        self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]
    ) -> Sequence[BlockLayout]:
        """Return the memory layout of each KV cache, in the order of `caches`. Raises LayoutError if a cache
        cannot be mapped to pages."""
        heads = len(self._rank_slice.heads)
        return derive_layouts(caches, layers, self._page, heads, self._block_size, self._scales)

    def report_unusable(self, error: LayoutError) -> None:
        """Report to the scheduler half that this rank's KV caches cannot be mapped to pages, so that sharing
        stops."""
        compat.logger.warning("cornplug: KV of this engine is not shared: %s", error)
        self._reports.report_unusable(error.reason)

    def _open_arena_transfers(self, blocks: CacheBlocks) -> ArenaTransfers | None:
        """Create the GPU's direct copies to and from the store, or return None if they are not possible."""
        try:
            from cornplug.vllm_connector.kv.arena_moves import open_arena
        except ImportError as e:  # This vLLM has no Triton.
            compat.logger.warning(
                "cornplug: KV pages are copied through staging memory, which is slower: %s", e
            )
            return None
        return open_arena(
            self._pages,
            self._reports,
            blocks,
            other_group=self._other_worker.find_direct() if self._other_worker is not None else None,
            slab_share=self._slab_share,
            sizes=self._sizes,
            fallback=self,
        )

    # -- the engine's step ------------------------------------------------------------------

    def find_direct(self) -> ArenaTransfers | None:
        """Return the GPU's direct copies of this group or, if it has none, of an earlier group."""
        if self._arena_transfers is not None or self._other_worker is None:
            return self._arena_transfers
        return self._other_worker.find_direct()

    @property
    def copies_directly(self) -> bool:
        """Whether the GPU copies pages to and from the store's memory itself."""
        return self._arena_transfers is not None

    def begin_step(self, *, computes: bool) -> None:
        """Limit the copies of all cache groups during the step that begins now. `computes` is whether the
        step computes tokens."""
        if self._arena_transfers is not None:
            self._arena_transfers.mover.budget.begin_step(computes=computes)
            # Copies that wait for the budget come before the copies that this step submits.
            self._arena_transfers.poll()
        elif not self._on_gpu:
            self._mover.begin_step(computes=computes)

    def start_loads(self, loads: Sequence[PageLoad]) -> None:
        """Start to load pages into the requests' blocks. vLLM runs a request after `take_finished` has
        returned its id."""
        mark = self._backend.mark() if loads else None
        for load in loads:
            if not load.pages:
                # The scheduler half failed after the engine accepted the offer.
                self._reports.end_load(load, 0, "load_error", 0.0)
            elif self._arena_transfers is not None:
                self._arena_transfers.load(load, mark)
            else:
                self.stage_load(load, mark)

    def stage_load(self, load: PageLoad, mark: Any) -> None:
        """Start to load pages through the mover's thread."""
        if self._on_gpu:
            self._reports.count_staged(len(load.pages))
        self._mover.submit(self._load(load, mark, time.monotonic()), urgent=True)

    def start_saves(self, saves: Sequence[PageSave]) -> None:
        """Start to copy to the store the pages that this step's forward pass has computed."""
        self._mover.end_step()
        if not saves:
            return
        mark, staged = self._backend.mark(), list(saves)
        if self._arena_transfers is not None and self._rank_slice.writes:
            reached, staged = self._arena_transfers.split_saves(saves)
            if reached:
                self._arena_transfers.save(self._reports.begin_saves(reached), mark)
        if staged:
            if self._on_gpu and self._rank_slice.writes:
                self._reports.count_staged(sum([len(save.pages) for save in staged]))
            self._mover.submit(self._save(self._reports.begin_saves(staged), mark), urgent=False)

    def record_step_end(self, number: int) -> None:
        """Include the end of timed step `number` in the next acknowledgements."""
        self._reports.record_step_end(number)

    def cancel_saves(self, names: Collection[str]) -> None:
        """Report the pages of these saves as not written, except pages that were already acknowledged. Does
        not wait."""
        self._reports.cancel_saves(names)

    def drain(self) -> None:
        """Wait until no copy reads or writes any KV cache block."""
        if self._arena_transfers is not None:
            self._arena_transfers.drain()
        self._mover.wait()

    def take_finished(self) -> list[str]:
        """Return the request id of each load that has ended since the last call, successfully or not."""
        if self._arena_transfers is not None:
            self._arena_transfers.poll()
        return self._reports.take_finished()

    def take_bad_blocks(self) -> set[int]:
        """Return the ids of the blocks whose load has failed since the last call. A request's failed blocks
        are available no later than `take_finished` returns the request's id."""
        return self._reports.take_bad_blocks()

    def take_acks(self) -> CornplugKVWorkerMetadata | None:
        """Return the acknowledgements for the scheduler half since the last call, or None if there are
        none."""
        return self._reports.take_acks()

    def close(self) -> None:
        """Wait for the slabs that are being copied, and drop all copies that have not started."""
        if self._arena_transfers is not None:
            self._arena_transfers.close()
        self._mover.close()
        for copies in (self._out_copies, self._in_copies):
            if copies is not None:
                copies.wait()

    # -- the mover's thread -----------------------------------------------------------------

    def _load(self, load: PageLoad, mark: Any, submitted_s: float) -> Job:
        # The end of the load must be reported in every case, because its request waits for it.
        done, reason, settled = 0, "load_error", False
        began = time.monotonic()
        try:
            copies = self._require_mapped(self._in_copies)
            try:
                table = kernel_table(load.blocks, self._sizes)
                for i in range(0, len(load.pages), copies.slab_pages):
                    if time.monotonic() > submitted_s + load.deadline_s:
                        raise StoreUnavailable("the load exceeded its deadline", reason="load_timeout")
                    pages = load.pages[i : i + copies.slab_pages]
                    slab = copies.next_slab(len(pages))
                    whole = self._copy_verified(pages, slab.host)
                    copies.begin_copy_in(
                        slab, table, load.first_page + i, whole, (load.start, load.end), mark
                    )
                    done += whole
                    if whole < len(pages):
                        raise CodecError(
                            f"checksum mismatch in page {load.first_page + done}", reason="corrupt"
                        )
                    yield
            finally:
                copies.wait()
                settled = True
            reason = ""
        except CornplugError as e:
            reason = e.reason
            compat.logger.debug("cornplug: loading %s failed: %s", load.request_id, e)
            if isinstance(e, CodecError) and e.is_damage:
                self._discard_pages(load.pages.keys[done:])
        finally:
            done = done if settled else 0
            self._reports.end_load(load, done, reason, time.monotonic() - began)

    def discard(self, keys: Sequence[bytes], then: Callable[[], None]) -> None:
        """Delete pages from the store, and then call `then`. Returns immediately."""

        def job() -> Job:
            try:
                self._discard_pages(keys)
            finally:
                then()
            yield

        self._mover.submit(job(), urgent=True)

    def _discard_pages(self, keys: Sequence[bytes]) -> None:
        self._pages.discard(keys, deadline_s=self._background_timeout_s)

    def _copy_verified(self, pages: Leases, host: torch.Tensor) -> int:
        """Copy this rank's part of leased pages to `host` and verify the checksums. Returns the number of
        intact pages before the first damaged page."""

        def whole(lease: Lease | None, target: torch.Tensor) -> bool:
            try:
                assert lease is not None
                # The scheduler half has already validated the header.
                self._pages.copy(lease.location, segment_checksums(lease.meta), target)
            except CodecError:
                return False
            return True

        return sum(1 for _ in itertools.takewhile(bool, map(whole, pages, host)))

    def _save(self, saves: Sequence[OngoingSave], mark: Any) -> Job:
        copies = self._out_copies if self._rank_slice.writes else None
        pages = deque(saved_pages(one, self._page.rows, self._sizes) for one in saves)
        pending = deque[tuple[list[SavedPages], Slab]]()
        try:
            while copies is not None:
                while len(pending) <= copies.slabs_ahead and (slab := take_pages(pages, copies.slab_pages)):
                    places = [(some.table, i) for some in slab for i in some.indices.tolist()]
                    pending.append((slab, copies.begin_copy_out(places, mark)))
                if not pending:
                    break
                slab, moving = pending.popleft()
                sources = iter(moving.wait_host())
                for some in slab:
                    sums = [self._write(some.ongoing, target, next(sources)) for target in some.targets]
                    self._reports.end_pages(some, sums)
                yield
        finally:
            try:
                if copies is not None:
                    copies.wait()
            finally:
                self._reports.end_saves(saves)

    def _write(self, ongoing: OngoingSave, target: PageWrite, source: torch.Tensor) -> dict[int, int]:
        """Write this rank's part of a page to the store. Return its checksums by segment number, or an empty
        dict if it was not written."""
        try:
            if not ongoing.is_cancelled:
                return self._pages.write(source, target.location)
        except CornplugError as e:
            compat.logger.debug("cornplug: saving %s failed: %s", ongoing.save.name, e)
        return {}

    def _require_mapped(self, copies: BlockCopies | None) -> BlockCopies:
        if copies is None:
            raise LayoutError("the KV cache is not mapped", reason="layout")
        return copies


class StateGroupWorker(GroupWorker):
    """Copies the recurrent states of one cache group on one rank. A block is one row of bytes per layer.
    Positions are counted in blocks instead of tokens."""

    def __init__(
        self,
        pages: RankPages,
        background_timeout_s: float,
        *,
        other_worker: GroupWorker | None,
        slab_share: float,
    ) -> None:
        super().__init__(pages, 1, background_timeout_s, other_worker=other_worker, slab_share=slab_share)

    def start_loads(self, loads: Sequence[PageLoad]) -> None:
        """Start to load pages into the requests' blocks. vLLM runs a request after `take_finished` has
        returned its id."""
        size = self._page.page_tokens
        super().start_loads([replace(load, start=load.start // size, end=load.end // size) for load in loads])

    def _derive_layouts(
        self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]
    ) -> Sequence[BlockLayout]:
        """Return one layout per layer, in which a block is a single row of bytes. Raises LayoutError if a
        layer's states do not fill each block from its start."""
        for name, cache in caches.items():
            if tuple(cache.shape[1:]) != (1, 1, self._page.dim) or cache.dtype != torch.int8:
                raise LayoutError(
                    f"{name} has states of {cache.dtype} {tuple(cache.shape)}, expected blocks of "
                    f"{self._page.dim} bytes",
                    reason="layout",
                )
            _require_packed(name, cache, layers[name].kv_cache)
        return [single_row_layout(self._page.dim)] * len(caches)


def _require_packed(name: str, cache: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
    """Raise LayoutError unless a layer's states are stored one directly after another in each block of its
    cache."""
    at, step = cache.data_ptr(), cache.stride(0)
    for state in states:
        size = state[0].numel() * state.element_size()
        where = state.data_ptr(), state.stride(0) * state.element_size(), len(state)
        if where != (at, step, len(cache)) or not state[0].is_contiguous():
            raise LayoutError(f"{name} keeps a state outside the blocks of its cache", reason="layout")
        at += size
    if at - cache.data_ptr() != cache.shape[-1] or cache.stride(-1) != 1:
        raise LayoutError(f"the states of {name} do not fill its blocks", reason="layout")
