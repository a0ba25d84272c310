"""Loads and saves on a rank whose GPU copies KV pages directly to and from the store's memory (its arena).

The engine's own thread starts the copies and polls them between steps. No other thread or host buffer is
used, and no CPU touches the pages' bytes. `GroupWorker` copies pages outside the memory that the device can
access.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from vllm._custom_ops import swap_blocks_batch
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

from cornplug.codec import segment_checksums
from cornplug.engine_common.rank_pages import RankPages
from cornplug.errors import CodecError, CornplugError, LayoutError, StoreUnavailable
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.kv.metadata import (
    OngoingSave,
    PageLoad,
    PageSave,
    SavedPage,
    TransferReports,
    iter_saved_pages,
    take_pages,
)
from cornplug.vllm_connector.kv_copies.arena_copies import (
    BLOCK_BYTES,
    ArenaCopies,
    ArenaSlab,
    ByteRange,
    DeviceChecksums,
)
from cornplug.vllm_connector.kv_copies.block_copies import CudaBackend
from cornplug.vllm_connector.kv_copies.cache_blocks import BlockSizes, CacheBlocks, kernel_table
from cornplug.vllm_connector.kv_copies.mover import PolledJob, PolledMover
from cornplug.vllm_connector.kv_copies.registered_memory import RegisteredMemory

_LOADS_AHEAD: Final = 8
"""Maximum number of slabs (groups of pages) in flight per load, enough to use the bus until the next step."""
_SAVES_AHEAD: Final = 4
"""Maximum number of slabs in flight per step's saves. No request waits for saves, and the engine's thread
needs several kernel launches per slab."""


class ArenaTransfers:
    """Copies pages directly between one rank's GPU blocks and the store's memory, for one cache group. Used
    by the engine's thread."""

    def __init__(
        self,
        pages: RankPages,
        reports: TransferReports,
        memory: RegisteredMemory,
        out_copies: ArenaCopies,
        in_copies: ArenaCopies,
        *,
        sizes: BlockSizes,
        discard: Callable[[Sequence[bytes]], None],
    ) -> None:
        """Prepare direct copies. `discard` deletes pages from the store by key, and returns immediately."""
        self._pages, self._reports = pages, reports
        self.memory = memory
        self._out_copies, self._in_copies = out_copies, in_copies
        self._sizes = sizes
        self._discard = discard
        self._mover = PolledMover()
        memory.add_user(self._mover.is_idle)
        self._rank_ranges = pages.byte_ranges()
        self._segment_indices = pages.segment_indices(pages.page.layer_runs)
        self._counted_s = 0.0
        """Time up to which load durations have been counted, so that overlapping loads are not counted
        twice."""

    # -- the engine's step ------------------------------------------------------------------------

    def can_load(self, load: PageLoad) -> bool:
        """Return whether the device can directly access all pages of a load and compute the checksums of all
        segments."""
        pages = load.pages
        if not self._mover.is_healthy:
            return False
        places = np.frombuffer(pages.locations, np.uint64).reshape(-1, 3)
        if not pages or not self.memory.can_access(pages.arena_id, int((places[:, 0] + places[:, 1]).max())):
            return False
        sizes = {0 if meta is None else len(meta) for meta in pages.metas}
        return len(sizes) == 1 and self._pages.has_complete_runs(self._runs_per_head(load))

    def split_saves(self, saves: Iterable[PageSave]) -> tuple[list[PageSave], list[PageSave]]:
        """Split saves into (saves of pages that the device can directly access, saves of all other pages)."""
        reached: list[PageSave] = []
        others: list[PageSave] = []
        if not self._mover.is_healthy:
            return reached, [*saves]
        for save in saves:
            places = [page.location for page in save.pages]
            end, arenas = max([at.offset + at.size for at in places]), {at.arena_id for at in places}
            if len(arenas) == 1 and self.memory.can_access(min(arenas), end):
                reached.append(save)
                continue
            found = [self.memory.can_access(at.arena_id, at.offset + at.size) for at in places]
            for some, kept in ((reached, True), (others, False)):
                pages = tuple(page for page, one in zip(save.pages, found, strict=True) if one is kept)
                if pages:
                    some.append(msgspec.structs.replace(save, pages=pages))
        return reached, others

    def load(self, load: PageLoad, mark: Any) -> None:
        """Start a load for which `can_load` returned True. Copies begin when the device has finished the
        engine's work up to `mark`."""
        self._mover.submit(self._load(load, mark, time.monotonic()))

    def save(self, saves: Sequence[OngoingSave], mark: Any) -> None:
        """Start to copy pages to the store. Copies begin when the device has finished the engine's work up to
        `mark`. The device must have access to the pages' locations."""
        self._mover.submit(self._save(saves, mark))

    def poll(self) -> None:
        """Handle copies that have finished, and start the next copies."""
        self._mover.poll()
        self.memory.unregister_previous()

    def drain(self) -> None:
        """Wait until no copy reads or writes any KV cache block."""
        self._mover.wait()

    def close(self) -> None:
        """Wait for copies in flight, and drop copies that have not started."""
        self._mover.close()
        self.memory.remove_user(self._mover.is_idle)

    # -- jobs in progress ------------------------------------------------------------------------

    def _load(self, load: PageLoad, mark: Any, submitted_s: float) -> PolledJob:
        # Always report the end of the load, because its request waits for the report.
        done, begun, reason = 0, 0, "load_error"
        pending = deque[tuple[ArenaSlab, list[bytes]]]()
        try:
            table = kernel_table(load.blocks, self._sizes)
            runs = self._runs_per_head(load)
            numbers, segment_bytes = self._pages.segment_indices(runs), self._pages.page.page_bytes // runs
            segment_bytes //= self._pages.page.heads
            while done < len(load.pages):
                while begun < len(load.pages) and len(pending) < _LOADS_AHEAD:
                    if time.monotonic() > submitted_s + load.deadline_s:
                        raise StoreUnavailable("the load exceeded its deadline", reason="load_timeout")
                    pages = load.pages[begun : begun + self._in_copies.slab_pages]
                    places = range(load.first_page + begun, load.first_page + begun + len(pages))
                    offsets = np.frombuffer(pages.locations, np.uint64)[::3].tolist()
                    bytes_of = self._byte_ranges([(pages.arena_id, offset) for offset in offsets])
                    slab = self._in_copies.begin_copy_in(
                        table, places, bytes_of, segment_bytes, (load.start, load.end), mark
                    )
                    pending.append((slab, [meta for meta in pages.metas if meta is not None]))
                    begun += len(pages)
                yield pending[0][0]
                slab, metas = pending.popleft()
                found = slab.checksums()
                self._in_copies.release_slab(slab)
                for i, meta in enumerate(metas):
                    # The scheduler half has already checked the header.
                    expected = segment_checksums(meta)
                    if [expected[n] for n in numbers] != found[i * len(numbers) : (i + 1) * len(numbers)]:
                        raise CodecError(
                            f"checksum mismatch in page {load.first_page + done}", reason="corrupt"
                        )
                    done += 1
            reason = ""
        except CornplugError as e:
            reason = e.reason
            compat.logger.debug("cornplug: loading %s failed: %s", load.request_id, e)
            if isinstance(e, CodecError) and e.is_damage:
                self._discard(load.pages.keys[done:])
        finally:
            settled = False
            try:
                for slab, _ in pending:
                    self._in_copies.release_slab(slab)
                settled = True
            finally:
                # Concurrent loads share the bus. Count their common time only once.
                now = time.monotonic()
                seconds, self._counted_s = now - max(submitted_s, self._counted_s), now
                self._reports.end_load(load, done if settled else 0, reason, seconds)

    def _save(self, saves: Sequence[OngoingSave], mark: Any) -> PolledJob:
        page = self._pages.page
        pages = self._filter_writable(iter_saved_pages(saves, page.rows, self._sizes))
        pending = deque[tuple[ArenaSlab, list[SavedPage]]]()
        try:
            while True:
                while len(pending) < _SAVES_AHEAD and (
                    some := take_pages(pages, self._out_copies.slab_pages)
                ):
                    at = [one.target.location for one in some]
                    runs = self._byte_ranges([(one.arena_id, one.offset) for one in at])
                    places = [one.table_position for one in some]
                    pending.append(
                        (self._out_copies.begin_copy_out(places, runs, page.segment_bytes, mark), some)
                    )
                if not pending:
                    break
                yield pending[0][0]
                slab, some = pending.popleft()
                found = slab.checksums()
                self._out_copies.release_slab(slab)
                for i, one in enumerate(some):
                    of_page = found[i * len(self._segment_indices) : (i + 1) * len(self._segment_indices)]
                    self._reports.end_page(one, dict(zip(self._segment_indices, of_page, strict=True)))
        except CornplugError as e:
            compat.logger.debug("cornplug: saving a step's pages failed: %s", e)
        finally:
            try:
                for slab, _ in pending:
                    self._out_copies.release_slab(slab)
            finally:
                self._reports.end_saves(saves)

    def _filter_writable(self, pages: Iterator[SavedPage]) -> Iterator[SavedPage]:
        """Yield the pages whose store reservations still exist, and report all other pages as failed."""
        for page in pages:
            try:
                self._pages.store.view(page.target.location, writable=True)
            except CornplugError as e:
                compat.logger.debug("cornplug: saving %s failed: %s", page.ongoing.save.name, e)
                self._reports.end_page(page, {})
            else:
                yield page

    def _byte_ranges(self, locations: Sequence[tuple[bytes, int]]) -> list[ByteRange]:
        """Return the byte ranges to copy for this rank's part of the pages at these locations (arena id,
        offset).

        Raises StoreUnavailable if the device can no longer access these locations.
        """
        found: list[ByteRange] = []
        for i, (arena_id, offset) in enumerate(locations):
            for in_page, in_part, size in self._rank_ranges:
                place = i * self._out_copies.page_bytes + in_part
                for address, part in self.memory.byte_ranges(arena_id, offset + in_page, size):
                    found.append((place, address, part))
                    place += part
        return found

    def _runs_per_head(self, load: PageLoad) -> int:
        """Return the number of segments per head in each page of a load."""
        meta = load.pages.metas[0]
        assert meta is not None
        return len(segment_checksums(meta)) // self._pages.page.heads


def open_arena(
    pages: RankPages,
    reports: TransferReports,
    blocks: CacheBlocks,
    *,
    other_group: ArenaTransfers | None,
    slab_share: float,
    sizes: BlockSizes,
    discard: Callable[[Sequence[bytes]], None],
) -> ArenaTransfers | None:
    """Create the direct copies for a rank whose KV caches are on a GPU. If the GPU cannot copy pages
    directly, log a warning with the reason and return None.

    `other_group` is the `ArenaTransfers` of another cache group, or None. Both share registered memory.
    `slab_share` is the fraction of the maximum slab size that these copies use. The other arguments are the
    same as for `ArenaTransfers`.
    """
    device, page = blocks.device, pages.page
    try:
        if page.layer_bytes % BLOCK_BYTES:
            raise LayoutError(
                f"{page.layer_bytes} bytes per layer are not a multiple of 1 KiB", reason="layout"
            )
        sides = CudaBackend(device), CudaBackend(device, urgent=True)
        checksums = DeviceChecksums(device)
        out, into = (
            ArenaCopies(blocks, side, checksums, swap_blocks_batch, slab_share=slab_share) for side in sides
        )
        if not (out.self_test(page.segment_bytes) and into.self_test(page.segment_bytes)):
            raise LayoutError("a test page was corrupt after a copy", reason="layout")
    except Exception as e:  # noqa: BLE001 - an error of a driver or compiler must not stop the engine
        compat.logger.warning("cornplug: KV pages are copied through staging memory, which is slower: %s", e)
        return None
    memory = (
        other_group.memory
        if other_group is not None
        else RegisteredMemory(pages.store, host_register, host_unregister, sides[0].enter_thread)
    )
    return ArenaTransfers(pages, reports, memory, out, into, sizes=sizes, discard=discard)
