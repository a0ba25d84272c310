"""The worker half of the KV connector: bytes between vLLM's blocks and pages in the store.

Copies run on a separate thread (and, on an accelerator, a separate stream), so the forward pass does not
wait. A block is stable while it is read: full blocks of a running request never change, and a finished
request's blocks stay until `finished_sending`. Those of a preempted request are given away at once, and
vLLM's second model runner overwrites them before it reports the preemption: saves of them that are not
acknowledged by then are given up, as their bytes may be wrong.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cornplug.engine_common.rank_pages import RankPages
from cornplug.errors import CodecError, CornplugError, LayoutError, StoreUnavailable
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.kv.block_copies import BlockCopies, CpuSide, kernel_table
from cornplug.vllm_connector.kv.layout import BlockLayout, derive, write_op
from cornplug.vllm_connector.kv.metadata import (
    CornplugKVWorkerMetadata,
    PageLoad,
    PageRead,
    PageSave,
    PageWrite,
)
from cornplug.vllm_connector.kv.mover import Job, KVMover

Table = NDArray[np.int64]


@dataclass(eq=False, slots=True)
class _Saving:
    """A save that is under way."""

    save: PageSave
    given_up: bool = False


class KVWorker:
    """One per rank."""

    def __init__(self, pages: RankPages, block_size: int, background_timeout_s: float) -> None:
        """`background_timeout_s`: of the mover's calls of the store."""
        self._page, self._mine = pages.page, pages.held
        self._pages = pages
        self._background_timeout_s = background_timeout_s
        self._block_size = block_size
        self._copies: BlockCopies | None = None
        self._slots = block_size
        """Tokens of one block of the caches; one of the engine's may be several of the kernels'."""
        self._mover = KVMover(lambda: self._side.enter_thread())
        self._side: Any = CpuSide()
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
                kind = (type(layers[name].impl), cache.shape, cache.stride(), cache.dtype)
                if kind not in known:
                    write = write_op(layers[name])
                    known[kind] = derive(cache, len(mine.heads), self._slots_of(cache), page.dim, write)
                layouts.append(known[kind])
            if len({layout.block_size for layout in layouts}) > 1:
                raise LayoutError("layers with blocks of several sizes", reason="layout")
        except LayoutError as e:
            compat.logger.warning("cornplug: KV of this engine is not shared: %s", e)
            self._acks.unusable = e.reason
            return
        self._copies = BlockCopies(list(caches.values()), layouts, self._pages.shape)
        self._slots, self._side = layouts[0].block_size, self._copies.side
        compat.logger.info(
            "cornplug: KV layout verified by writing it: %d layers, heads %d to %d of %d",
            len(layouts),
            mine.heads.start,
            mine.heads.stop - 1,
            page.heads,
        )

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
        mark = self._side.mark() if saves else None
        for save in saves:
            saving = _Saving(save)
            with self._lock:
                self._saving.setdefault(save.request_id, []).append(saving)
            self._mover.submit(self._save(saving, mark), urgent=False)

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
        """Finish the slab that is being copied; drop all others."""
        self._mover.close()

    # -- the mover's thread -----------------------------------------------------------------

    def _load(self, load: PageLoad, mark: Any, asked: float) -> Job:
        # Whatever happens here, the request must be told that its load is over.
        done, reason = 0, "load_error"
        began = time.monotonic()
        try:
            table = self._table(load.blocks)
            for slab in self._slabs(load.pages):
                if time.monotonic() > asked + load.deadline_s:
                    raise StoreUnavailable("a load took too long", reason="load_timeout")
                whole = self._read_slab(load, slab, table, mark)
                done += whole
                if whole < len(slab):
                    raise CodecError(f"page {slab[whole].index} is corrupt", reason="corrupt")
                yield
            reason = ""
        except CornplugError as e:
            reason = e.reason
            compat.logger.debug("cornplug: load of %s failed: %s", load.request_id, e)
            if isinstance(e, CodecError) and e.is_damage:
                damaged = [page.key for page in load.pages[done:]]
                self._pages.discard(damaged, deadline_s=self._background_timeout_s)
        finally:
            first_bad = (
                load.pages[done].index * self._page.page_tokens if done < len(load.pages) else load.end
            )
            with self._lock:
                if reason:
                    self._bad_blocks |= load.blocks_from(max(first_bad, load.start), self._block_size)
                    self._acks.failed_loads[load.request_id] = reason
                self._acks.loaded_bytes += done * self._pages.size_bytes
                self._acks.loading_s += time.monotonic() - began
                self._loaded.add(load.request_id)

    def _save(self, saving: _Saving, mark: Any) -> Job:
        save, written = saving.save, set[int]()
        try:
            table = self._table(save.blocks)
            for slab in self._slabs(save.pages) if self._mine.writes else ():
                if saving.given_up:
                    break
                try:
                    sums = self._write_slab(slab, table, mark)
                    self._acknowledge(saving, sums)
                    written |= sums.keys()
                except CornplugError as e:
                    compat.logger.debug("cornplug: save of %s failed: %s", save.request_id, e)
                yield
        finally:
            missing = [page.token for page in save.pages if page.token not in written]
            with self._lock:
                if self._mine.writes:
                    self._acks.failed_writes |= dict.fromkeys(missing, self._pages.segments)
                self._saving[save.request_id].remove(saving)
                if not self._saving[save.request_id]:
                    del self._saving[save.request_id]

    def _acknowledge(self, saving: _Saving, sums: Mapping[int, dict[int, int]]) -> None:
        with self._lock:
            if saving.given_up:
                self._acks.failed_writes |= dict.fromkeys(sums, self._pages.segments)
            else:
                self._acks.written |= sums
                self._unsent |= dict.fromkeys(sums, saving.save.request_id)

    def _mapped(self) -> BlockCopies:
        if self._copies is None:
            raise LayoutError("this cache is not mapped", reason="layout")
        return self._copies

    def _table(self, blocks: Sequence[int]) -> Table:
        return kernel_table(blocks, self._block_size, self._slots)

    def _slabs(self, pages: Sequence[Any]) -> Iterator[Sequence[Any]]:
        step = self._copies.slab_pages if self._copies is not None else 1
        for i in range(0, len(pages), step):
            yield pages[i : i + step]

    def _write_slab(self, pages: Sequence[PageWrite], table: Table, mark: Any) -> dict[int, dict[int, int]]:
        """Copy neighbouring pages out; reservation token -> segment -> checksum of the source."""
        host = self._mapped().copy_out(table, [page.index for page in pages], mark)
        return {
            target.token: dict(self._pages.write(source, target.location))
            for target, source in zip(pages, host, strict=True)
        }

    def _read_slab(self, load: PageLoad, pages: Sequence[PageRead], table: Table, mark: Any) -> int:
        """Copy neighbouring pages in, each segment verified in host memory first. Returns how many were
        whole, up to the first damaged one."""
        copies = self._mapped()
        host = copies.host(len(pages))
        each = range(len(pages))
        whole = len(list(itertools.takewhile(lambda row: self._copied(pages[row], host[row]), each)))
        if whole:
            copies.copy_in(table, pages[0].index, whole, load.start, load.end, mark)
        return whole

    def _copied(self, source: PageRead, target: torch.Tensor) -> bool:
        """Copy this rank's part of a page to host memory. Returns whether its checksums hold."""
        try:
            self._pages.copy(source.location, source.checksums, target)
        except CodecError:
            return False
        return True
