"""The worker half of the KV connector: bytes between vLLM's blocks and pages in the store.

Copies run on a separate thread (and, on an accelerator, on two separate streams, the loads' before the
saves'), so the forward pass does not wait. All pages that a step saves are one job, whichever requests they
belong to. A block is stable while it is read: full blocks of a running request never change, and a finished
request's blocks stay until `finished_sending`. Those of a preempted request are given away at once, and
vLLM's second model runner overwrites them before it reports the preemption: saves of them that are not
acknowledged by then are given up, as their bytes may be wrong.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cornplug.codec import segment_checksums
from cornplug.engine_common.rank_pages import RankPages
from cornplug.errors import CodecError, CornplugError, LayoutError, StoreUnavailable
from cornplug.store.base import Lease
from cornplug.store.leases import Leases
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.kv.metadata import (
    CornplugKVWorkerMetadata,
    PageLoad,
    PageSave,
    PageWrite,
)
from cornplug.vllm_connector.kv_copies.block_copies import BlockCopies, Slab, Table, kernel_table
from cornplug.vllm_connector.kv_copies.copy_sides import CopySide, CpuSide
from cornplug.vllm_connector.kv_copies.layout import (
    BlockLayout,
    derive,
    latent_write_op,
    require_unit_scales,
    write_op,
)
from cornplug.vllm_connector.kv_copies.mover import Job, KVMover


@dataclass(eq=False, slots=True)
class _Saving:
    """A save that is under way."""

    save: PageSave
    left: set[int]
    """Reservation tokens of the pages that are not acknowledged yet."""
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class _SavedPage:
    """A page of a step's saves."""

    saving: _Saving
    target: PageWrite
    place: tuple[Table, int]
    """Some of its request's blocks through `kernel_table`, and the page's place in them."""


class KVWorker:
    """One per rank."""

    def __init__(
        self,
        pages: RankPages,
        block_size: int,
        background_timeout_s: float,
        *,
        beside: KVWorker | None = None,
        share: float = 1.0,
    ) -> None:
        """`background_timeout_s`: of the mover's calls of the store. `beside`: the worker of another cache
        group, whose mover this one uses. `share` of the memory that slabs on an accelerator may take."""
        self._page, self._mine = pages.page, pages.held
        self._pages = pages
        self._background_timeout_s = background_timeout_s
        self._block_size = block_size
        self._out: BlockCopies | None = None
        self._in: BlockCopies | None = None
        self._slots = block_size
        """Tokens of one block of the caches; one of the engine's may be several of the kernels'."""
        self._share = share
        self._mover: KVMover = (
            beside._mover if beside is not None else KVMover(lambda: self._side.enter_thread())
        )
        self._side: CopySide = CpuSide()
        self._lock = threading.Lock()
        self._acks = CornplugKVWorkerMetadata()
        self._unsent: dict[int, str] = {}
        """Reservation token -> request, of the pages in `_acks.written`."""
        self._loaded: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._saving: dict[str, list[_Saving]] = {}
        self._finishing: set[str] = set()

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
            layouts = []
            for name, cache in caches.items():
                if str(cache.dtype).removeprefix("torch.") != page.dtype:
                    raise LayoutError(f"{name} holds {cache.dtype}, pages {page.dtype}", reason="kv_dtype")
                layer = layers[name]
                if page.quantised:
                    require_unit_scales(name, layer)
                kind = (type(layer), type(layer.impl), cache.shape, cache.stride(), cache.dtype)
                if kind not in known:
                    write = (latent_write_op if page.planes == 1 else write_op)(layer)
                    slots = self._slots_of(cache)
                    known[kind] = derive(
                        cache, len(mine.heads), slots, page.dim, write, page.planes, page.quantised
                    )
                layouts.append(known[kind])
            if len({layout.block_size for layout in layouts}) > 1:
                raise LayoutError("layers with blocks of several sizes", reason="layout")
        except LayoutError as e:
            self.refuse(e)
            return
        self._out, self._in = (
            BlockCopies(list(caches.values()), layouts, self._pages.shape, urgent=urgent, share=self._share)
            for urgent in (False, True)
        )
        self._slots, self._side = layouts[0].block_size, self._out.side
        compat.logger.info(
            "cornplug: KV layout verified by writing it: %d layers, heads %d to %d of %d",
            len(layouts),
            mine.heads.start,
            mine.heads.stop - 1,
            page.heads,
        )

    def refuse(self, error: LayoutError) -> None:
        """Report to the scheduler half that this rank's caches cannot be mapped."""
        compat.logger.warning("cornplug: KV of this engine is not shared: %s", error)
        self._acks.unusable = error.reason

    def _slots_of(self, cache: torch.Tensor) -> int:
        """Tokens of one block of a cache: the engine's block size, or a part of it."""
        slots = cache.shape[2] if cache.ndim == 4 else 0
        return slots if slots and self._block_size % slots == 0 else self._block_size

    # -- the engine's step ------------------------------------------------------------------

    def start_loads(self, loads: Sequence[PageLoad]) -> None:
        """Begin loads; their requests run once `finished` names them."""
        mark = self._side.mark() if loads else None
        for load in loads:
            self._mover.submit(self._load(load, mark, time.monotonic()), urgent=True)

    def start_saves(self, saves: Sequence[PageSave]) -> None:
        """Begin to copy out pages that this step's forward has computed."""
        if not saves:
            return
        savings = [_Saving(save, {page.token for page in save.pages}) for save in saves]
        with self._lock:
            for saving in savings:
                self._saving.setdefault(saving.save.request_id, []).append(saving)
        self._mover.submit(self._save(savings, self._side.mark()), urgent=False)

    def stepped(self, number: int) -> None:
        """Acknowledge the end of a timed step, with the next acknowledgements."""
        with self._lock:
            self._acks.steps.append(number)

    def finishing(self, request_ids: Sequence[str]) -> None:
        """These requests' blocks stay until `finished` names them as sent."""
        self._finishing.update(request_ids)

    def give_up_saves(self, request_ids: Collection[str]) -> None:
        """Count pages of these requests that are not acknowledged yet as not written. Does not wait.

        Their blocks belong to other requests now, and may have done so before they were read.
        """
        with self._lock:
            for request_id in request_ids:
                for saving in self._saving.get(request_id, ()):
                    saving.given_up = True
            late = [token for token, request_id in self._unsent.items() if request_id in request_ids]
            for token in late:
                del self._unsent[token], self._acks.written[token]
                self._acks.failed_writes[token] = self._pages.segments

    def drain(self) -> None:
        """Wait until no block is being read or written."""
        self._mover.wait()

    def finished(self) -> tuple[set[str], set[str]]:
        """(sent, received) request ids since the last call."""
        with self._lock:
            sent = {r for r in self._finishing if not self._saving.get(r)}
            self._finishing -= sent
            received, self._loaded = self._loaded, set()
        return sent, received

    def bad_blocks(self) -> set[int]:
        """Blocks whose load failed; a request is never `finished` before its bad blocks are here."""
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def acks(self) -> CornplugKVWorkerMetadata | None:
        """The acknowledgements since the last call; None where there are none."""
        with self._lock:
            if self._acks.is_empty():
                return None
            acks, self._acks = self._acks, CornplugKVWorkerMetadata()
            self._unsent.clear()
        return acks

    def close(self) -> None:
        """Finish the slabs that are being copied; drop all others."""
        self._mover.close()
        for copies in (self._out, self._in):
            if copies is not None:
                copies.settle()

    # -- the mover's thread -----------------------------------------------------------------

    def _load(self, load: PageLoad, mark: Any, asked: float) -> Job:
        # Whatever happens here, the request must be told that its load is over.
        done, reason, settled = 0, "load_error", False
        began = time.monotonic()
        try:
            copies = self._mapped(self._in)
            try:
                table = kernel_table(load.blocks, self._block_size, self._slots)
                for i in range(0, len(load.pages), copies.slab_pages):
                    if time.monotonic() > asked + load.deadline_s:
                        raise StoreUnavailable("a load took too long", reason="load_timeout")
                    pages = load.pages[i : i + copies.slab_pages]
                    slab = copies.slab(len(pages))
                    whole = self._verified(pages, slab.host)
                    copies.begin_in(slab, table, load.first_page + i, whole, (load.start, load.end), mark)
                    done += whole
                    if whole < len(pages):
                        raise CodecError(f"page {load.first_page + done} is corrupt", reason="corrupt")
                    yield
            finally:
                copies.settle()
                settled = True
            reason = ""
        except CornplugError as e:
            reason = e.reason
            compat.logger.debug("cornplug: load of %s failed: %s", load.request_id, e)
            if isinstance(e, CodecError) and e.is_damage:
                self._pages.discard(load.pages.keys[done:], deadline_s=self._background_timeout_s)
        finally:
            done = done if settled else 0
            first_bad = min((load.first_page + done) * self._page.page_tokens, load.end)
            with self._lock:
                if reason:
                    self._bad_blocks |= load.blocks_from(max(first_bad, load.start), self._block_size)
                    self._acks.failed_loads[load.request_id] = reason
                self._acks.loaded_bytes += done * self._pages.size_bytes
                self._acks.loading_s += time.monotonic() - began
                self._loaded.add(load.request_id)

    def _verified(self, pages: Leases, host: torch.Tensor) -> int:
        """Copy this rank's part of pages to `host`. Returns how many were whole, up to the first damaged."""

        def whole(lease: Lease | None, target: torch.Tensor) -> bool:
            try:
                assert lease is not None
                # The scheduler half has read the header.
                self._pages.copy(lease.location, segment_checksums(lease.meta), target)
            except CodecError:
                return False
            return True

        return sum(1 for _ in itertools.takewhile(bool, map(whole, pages, host)))

    def _save(self, savings: Sequence[_Saving], mark: Any) -> Job:
        copies = self._out if self._mine.writes else None
        pages = itertools.chain.from_iterable(map(self._pages_of, savings))
        pending = deque[tuple[list[_SavedPage], Slab]]()
        try:
            while copies is not None:
                while len(pending) <= copies.ahead:
                    wanted = (page for page in pages if not page.saving.given_up)
                    slab = list(itertools.islice(wanted, copies.slab_pages))
                    if not slab:
                        break
                    pending.append((slab, copies.begin_out([page.place for page in slab], mark)))
                if not pending:
                    break
                slab, moving = pending.popleft()
                for page, source in zip(slab, moving.arrived(), strict=True):
                    self._write(page, source)
                yield
        finally:
            try:
                if copies is not None:
                    copies.settle()
            finally:
                with self._lock:
                    for saving in savings:
                        self._failed(saving.left)
                        self._over(saving)

    def _pages_of(self, saving: _Saving) -> Iterator[_SavedPage]:
        """The pages of one request, with only those of its blocks that hold them: it may have thousands."""
        save, size = saving.save, self._page.page_tokens
        # A page and a block both begin at a multiple of it.
        unit = math.lcm(size, self._block_size)
        first = min(page.index for page in save.pages) * size // unit * unit
        last = max(page.index for page in save.pages) * size + size
        blocks = save.blocks[first // self._block_size : -(-last // self._block_size)]
        table = kernel_table(blocks, self._block_size, self._slots)
        for page in save.pages:
            yield _SavedPage(saving, page, (table, page.index - first // size))

    def _write(self, page: _SavedPage, source: torch.Tensor) -> None:
        """Copy this rank's part of a page to the store, and acknowledge it."""
        saving, token = page.saving, page.target.token
        sums: dict[int, int] = {}
        try:
            if not saving.given_up:
                sums = dict(self._pages.write(source, page.target.location))
        except CornplugError as e:
            compat.logger.debug("cornplug: save of %s failed: %s", saving.save.request_id, e)
        with self._lock:
            if sums and not saving.given_up:
                self._acks.written[token] = sums
                self._unsent[token] = saving.save.request_id
            else:
                self._failed([token])
            saving.left.discard(token)
            if not saving.left:
                self._over(saving)

    def _failed(self, tokens: Collection[int]) -> None:
        if self._mine.writes:
            self._acks.failed_writes |= dict.fromkeys(tokens, self._pages.segments)

    def _over(self, saving: _Saving) -> None:
        """Its blocks are not read any more."""
        of_request = self._saving.get(saving.save.request_id, [])
        if saving in of_request:
            of_request.remove(saving)
            if not of_request:
                del self._saving[saving.save.request_id]

    def _mapped(self, copies: BlockCopies | None) -> BlockCopies:
        if copies is None:
            raise LayoutError("this cache is not mapped", reason="layout")
        return copies
