"""Loads and saves on a rank whose GPU copies KV pages directly to and from the store's memory (its arena).

The engine's own thread starts the copies and polls them between steps. No other thread or host buffer is
used, and no CPU touches the pages' bytes. `GroupWorker` copies pages outside the memory that the device can
access.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from vllm._custom_ops import swap_blocks_batch
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

from cornplug.codec import segment_checksums
from cornplug.engine_common.rank_pages import RankPages, checksum_table
from cornplug.errors import CodecError, CornplugError, LayoutError, StoreUnavailable
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.kv.metadata import (
    OngoingSave,
    PageLoad,
    PageSave,
    SavedPages,
    TransferReports,
    saved_pages,
    take_pages,
)
from cornplug.vllm_connector.kv_copies.arena_copies import (
    BLOCK_BYTES,
    ArenaCopies,
    ArenaSlab,
    ByteRanges,
    DeviceChecksums,
)
from cornplug.vllm_connector.kv_copies.block_copies import CudaBackend
from cornplug.vllm_connector.kv_copies.cache_blocks import BlockSizes, CacheBlocks, kernel_table
from cornplug.vllm_connector.kv_copies.mover import ByteBudget, Direction, PolledJob, PolledMover
from cornplug.vllm_connector.kv_copies.registered_memory import RegisteredMemory

_MAX_PARTS: Final = 8
"""Maximum number of parts of a load. A load whose pages alternate between memory that the device can access
and other memory is staged as a whole, because each part takes several calls on the engine's thread."""


class Fallback(Protocol):
    """Worker half that does on another thread what the device cannot do."""

    def stage_load(self, load: PageLoad, mark: Any) -> None:
        """Load pages through staging memory, after the engine's work up to `mark`. Returns immediately."""

    def discard(self, keys: Sequence[bytes], then: Callable[[], None]) -> None:
        """Delete pages from the store, and then call `then`. Returns immediately."""


@dataclass(frozen=True, slots=True)
class SharedDevice:
    """What all cache groups of a rank share."""

    memory: RegisteredMemory
    mover: PolledMover


class ArenaTransfers:
    """Copies pages directly between one rank's GPU blocks and the store's memory, for one cache group. Used
    by the engine's thread."""

    def __init__(
        self,
        pages: RankPages,
        reports: TransferReports,
        device: SharedDevice,
        copies: tuple[ArenaCopies, ArenaCopies],
        *,
        sizes: BlockSizes,
        fallback: Fallback,
    ) -> None:
        """Prepare direct copies. `copies` are (copies to the store, copies from the store)."""
        self._pages, self._reports = pages, reports
        self.device, self._fallback = device, fallback
        self.memory, self.mover = device.memory, device.mover
        self._budget = device.mover.budget
        self._out_copies, self._in_copies = copies
        self._sizes = sizes
        self.memory.add_user(self.mover.is_idle)
        self._rank_ranges = np.array(
            [(there, here, size) for here, there, size in pages.byte_ranges()], np.int64
        )
        """Contiguous ranges of this rank's part: (offset in the part, offset in the page, size in bytes)."""
        self._is_whole = pages.size_bytes == pages.page.page_bytes
        """Whether this rank has all heads and layers."""
        self._segment_indices = pages.segment_indices(pages.page.layer_runs)
        self._counted_s = 0.0
        """Time up to which load durations have been counted, so that overlapping loads are not counted
        twice."""

    # -- the engine's step ------------------------------------------------------------------------

    def load(self, load: PageLoad, mark: Any) -> None:
        """Start a load. Copies begin when the device has finished the engine's work up to `mark`. Pages that
        the device cannot copy and verify directly are copied through staging memory."""
        parts = self._split_load(load)
        if len(parts) > 1:
            self._reports.split_load(load, len(parts))
        for part, is_direct in parts:
            if is_direct:
                self.mover.submit(self._load(part, mark, time.monotonic()), "load")
            else:
                self._fallback.stage_load(part, mark)

    def _split_load(self, load: PageLoad) -> list[tuple[PageLoad, bool]]:
        """Split a load into parts, each with whether the device can directly access all its pages and compute
        the checksums of all their segments."""
        pages = load.pages
        if (
            not self.mover.is_healthy
            or len(set(map(len, filter(None, pages.metas)))) != 1
            or None in pages.metas
        ):
            return [(load, False)]
        if not self._pages.has_complete_runs(self._runs_per_head(load)):
            return [(load, False)]
        places = np.frombuffer(pages.locations, np.uint64).reshape(-1, 3)
        ends = (places[:, 0] + places[:, 1]).astype(np.int64)
        if self.memory.can_access(pages.arena_id, int(ends.max())):
            return [(load, True)]
        direct = ends <= self.memory.registered_end(pages.arena_id)
        cuts = [0, *(np.flatnonzero(np.diff(direct)) + 1).tolist(), len(pages)]
        if len(cuts) > _MAX_PARTS + 1:
            return [(load, False)]
        rows = self._pages.page.rows
        return [
            (load.part(start, stop, rows), bool(direct[start])) for start, stop in itertools.pairwise(cuts)
        ]

    def split_saves(self, saves: Iterable[PageSave]) -> tuple[list[PageSave], list[PageSave]]:
        """Split saves into (saves of pages that the device can directly access, saves of all other pages)."""
        direct: list[PageSave] = []
        others: list[PageSave] = []
        if not self.mover.is_healthy:
            return direct, [*saves]
        for save in saves:
            places = [page.location for page in save.pages]
            end, arenas = max([at.offset + at.size for at in places]), {at.arena_id for at in places}
            if len(arenas) == 1 and self.memory.can_access(min(arenas), end):
                direct.append(save)
                continue
            found = [self.memory.can_access(at.arena_id, at.offset + at.size) for at in places]
            for some, kept in ((direct, True), (others, False)):
                pages = tuple(page for page, one in zip(save.pages, found, strict=True) if one is kept)
                if pages:
                    some.append(msgspec.structs.replace(save, pages=pages))
        return direct, others

    def save(self, saves: Sequence[OngoingSave], mark: Any) -> None:
        """Start to copy pages to the store. Copies begin when the device has finished the engine's work up to
        `mark`. The device must have access to the pages' locations."""
        self.mover.submit(self._save(saves, mark), "save")

    def poll(self) -> None:
        """Handle copies that have finished, and start the next copies."""
        self.mover.poll()
        self.memory.unregister_previous()

    def drain(self) -> None:
        """Wait until no copy reads or writes any KV cache block."""
        self.mover.wait()

    def close(self) -> None:
        """Wait for copies in flight, and drop copies that have not started."""
        self.mover.close()
        self.memory.remove_user(self.mover.is_idle)

    # -- jobs in progress ------------------------------------------------------------------------

    def _load(self, load: PageLoad, mark: Any, submitted_s: float) -> PolledJob:
        # Always report the end of the load, because its request waits for the report.
        done, begun, count, reason, copies = 0, 0, len(load.pages), "load_error", self._in_copies
        rest: PageLoad | None = None
        damaged: Sequence[bytes] = ()
        pending = deque[tuple[ArenaSlab, int]]()
        try:
            table = kernel_table(load.blocks, self._sizes)
            expected = checksum_table(load.pages.metas)
            segment_bytes = self._pages.page.page_bytes // expected.shape[1]
            if not self._is_whole:
                runs = expected.shape[1] // self._pages.page.heads
                expected = expected[:, self._pages.segment_indices(runs)]
            offsets = np.frombuffer(load.pages.locations, np.uint64)[::3].astype(np.int64)
            while done < count:
                while begun < count:
                    if time.monotonic() > submitted_s + load.deadline_s:
                        raise StoreUnavailable("the load exceeded its deadline", reason="load_timeout")
                    if not self._budget.has_room("load"):
                        break
                    end = min(begun + copies.slab_pages, count)
                    places = range(load.first_page + begun, load.first_page + end)
                    ranges = self._byte_ranges(load.pages.arena_id, offsets[begun:end])
                    slab = copies.begin_copy_in(
                        table, places, ranges, segment_bytes, (load.start, load.end), mark
                    )
                    pending.append((slab, end - begun))
                    self._budget.start((end - begun) * copies.page_bytes, "load")
                    begun = end
                yield pending[0][0] if pending else None
                if not pending:
                    continue
                slab, pages = pending.popleft()
                self._release(copies, slab, pages, "load")
                found = slab.checksums().reshape(pages, -1) == expected[done : done + pages]
                if not found.all():
                    done += int(found.all(axis=1).argmin())
                    raise CodecError(f"checksum mismatch in page {load.first_page + done}", reason="corrupt")
                done += pages
            reason = ""
        except torch.OutOfMemoryError as e:
            self.mover.stop(e)
            left_s = max(0.0, submitted_s + load.deadline_s - time.monotonic())
            reason, rest = "", replace(load.part(done, count, self._pages.page.rows), deadline_s=left_s)
        except CornplugError as e:
            reason = e.reason
            compat.logger.debug("cornplug: loading %s failed: %s", load.request_id, e)
            if isinstance(e, CodecError) and e.is_damage:
                damaged = load.pages.keys[done:]
        finally:
            settled = False
            try:
                if pending:
                    self._release_all(copies, pending, "load")
                settled = True
            finally:
                # Concurrent loads share the bus. Count their common time only once.
                now = time.monotonic()
                seconds, self._counted_s = now - max(submitted_s, self._counted_s), now
                if rest is not None and settled:
                    self._reports.split_load(load, 2)
                    self._fallback.stage_load(rest, mark)
                elif rest is not None:
                    reason = "load_error"
                end = partial(self._reports.end_load, load, done if settled else 0, reason, seconds)
                if damaged:
                    # The engine computes the pages again, and can save them only after they are deleted.
                    self._fallback.discard(damaged, end)
                else:
                    end()

    def _save(self, saves: Sequence[OngoingSave], mark: Any) -> PolledJob:
        page, copies = self._pages.page, self._out_copies
        pages = deque(saved_pages(one, page.rows, self._sizes) for one in saves)
        pending = deque[tuple[ArenaSlab, list[SavedPages], int]]()
        try:
            while pages or pending:
                while pages and self._budget.has_room("save"):
                    slab_pages = self._remove_unwritable(take_pages(pages, copies.slab_pages))
                    if not slab_pages:
                        continue
                    at = [target.location for some in slab_pages for target in some.targets]
                    offsets = np.array([location.offset for location in at], np.int64)
                    slab = copies.begin_copy_out(
                        [(some.table, some.indices) for some in slab_pages],
                        self._byte_ranges(at[0].arena_id, offsets),
                        page.segment_bytes,
                        mark,
                    )
                    pending.append((slab, slab_pages, len(at)))
                    self._budget.start(len(at) * copies.page_bytes, "save")
                if not (pages or pending):
                    break
                yield pending[0][0] if pending else None
                if not pending:
                    continue
                slab, slab_pages, count = pending.popleft()
                self._release(copies, slab, count, "save")
                rows = iter(slab.checksums().reshape(count, -1).tolist())
                for some in slab_pages:
                    sums = [
                        dict(zip(self._segment_indices, row, strict=True))
                        for row in itertools.islice(rows, len(some.targets))
                    ]
                    self._reports.end_pages(some, sums)
        except torch.OutOfMemoryError as e:
            self.mover.stop(e)
        except CornplugError as e:
            compat.logger.debug("cornplug: saving a step's pages failed: %s", e)
        finally:
            try:
                if pending:
                    self._release_all(copies, [(slab, count) for slab, _, count in pending], "save")
            finally:
                self._reports.end_saves(saves)

    def _release(self, copies: ArenaCopies, slab: ArenaSlab, pages: int, direction: Direction) -> None:
        """Wait for a slab's copies to complete. Later slabs can then use its memory and its bytes of the
        budget."""
        self._budget.end(pages * copies.page_bytes, direction)
        copies.release_slab(slab)

    def _release_all(
        self, copies: ArenaCopies, slabs: Iterable[tuple[ArenaSlab, int]], direction: Direction
    ) -> None:
        """Release slabs, given with their numbers of pages. If a device error prevents this, none of their
        bytes stays in the budget, which the other jobs need to end."""
        errors = []
        for slab, pages in slabs:
            try:
                self._release(copies, slab, pages, direction)
            except Exception as e:  # noqa: BLE001 - any error of the device
                errors.append(e)
        if errors:
            raise errors[0]

    def _remove_unwritable(self, slab: Iterable[SavedPages]) -> list[SavedPages]:
        """Return the pages whose store reservations still exist, and report all other pages as failed."""
        kept = []
        for some in slab:
            mask = self._pages.store.are_writable([target.location for target in some.targets])
            if not all(mask):
                lost = some.select(mask, value=False)
                compat.logger.debug(
                    "cornplug: %d pages of %s lost their reservation",
                    len(lost.targets),
                    some.ongoing.save.name,
                )
                self._reports.end_pages(lost, [{}] * len(lost.targets))
                some = some.select(mask, value=True)
            if some.targets:
                kept.append(some)
        return kept

    def _byte_ranges(self, arena_id: bytes, offsets: NDArray[np.int64]) -> ByteRanges:
        """Return the byte ranges to copy for this rank's part of the pages at these offsets of an arena.

        Raises StoreUnavailable if the device can no longer access these locations.
        """
        ranges = np.empty((len(offsets), *self._rank_ranges.shape), np.int64)
        ranges[:] = self._rank_ranges
        ranges[:, :, 0] += np.arange(len(offsets))[:, None] * self._out_copies.page_bytes
        ranges[:, :, 1] += offsets[:, None]
        return self.memory.split_ranges(arena_id, ranges.reshape(-1, 3))

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
    fallback: Fallback,
) -> ArenaTransfers | None:
    """Create the direct copies for a rank whose KV caches are on a GPU. If the GPU cannot copy pages
    directly, log a warning with the reason and return None.

    `other_group` is the `ArenaTransfers` of another cache group, or None. Both share registered memory and
    the mover.
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
        bytes_per_s = min(one.warm_up(page.segment_bytes) for one in (out, into))
    except Exception as e:  # noqa: BLE001 - an error of a driver or compiler must not stop the engine
        compat.logger.warning("cornplug: KV pages are copied through staging memory, which is slower: %s", e)
        return None
    if other_group is not None:
        shared = other_group.device
    else:
        memory = RegisteredMemory(pages.store, host_register, host_unregister, sides[0].enter_thread)
        shared = SharedDevice(memory, PolledMover(ByteBudget(bytes_per_s)))
        compat.logger.info("cornplug: this GPU copies KV pages at %.1f GB/s", bytes_per_s / 1e9)
    return ArenaTransfers(pages, reports, shared, (out, into), sizes=sizes, fallback=fallback)
