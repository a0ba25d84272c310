"""Saves pages of finished requests while the engine is idle. These pages were not worth a copy while requests
ran.

With `engine.save = "second"`, the first request that uses a page does not save it. A prompt that one app sent
once would then be computed again for another app. An idle engine therefore saves such pages if the store has
free capacity. No page that was used twice is evicted for such a page. vLLM may reuse the blocks of these
pages at any time (`FreedBlocks`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cornplug.engine_common.page_publish import PagePublisher, count_free_pages
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.kv_page import PageGeometry
from cornplug.store.base import Reservation, ReserveRefusal
from cornplug.vllm_connector.cpu_use import WAKE_TIMER, WakeTimer
from cornplug.vllm_connector.kv.metadata import PageSave, PageWrite
from cornplug.vllm_connector.kv.open_saves import OpenSave
from cornplug.vllm_connector.kv.page_saves import PageSaves, SavingRequests, save_name
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput

    from cornplug.vllm_connector.kv.page_events import PageEvents, PageSpan

_IDLE_DELAY_S: Final = 0.05
"""Seconds without a scheduled token after which the engine counts as idle and the first copy begins."""
_MAX_IDLE_S: Final = 1.0
"""Seconds without a scheduled token after which an engine stops saving until the next idle period. This also
limits how long a caller that pauses the engine has to wait."""
_BATCH_BYTES: Final = 32 << 20
"""Maximum total size in bytes of pages that are copied at the same time. Up to this many bytes may still be
in flight when a new request starts."""


@dataclass(frozen=True, slots=True)
class _UnsavedPage:
    """Unsaved page of a finished request, and the vLLM blocks that contain it."""

    key: bytes
    index: int
    """Index of the page within `blocks`, in pages."""
    blocks: Sequence[KVCacheBlock]
    hashes: Sequence[BlockHashWithGroupId | None]
    event_span: PageSpan | None = None
    """Span to announce in KV events when the page is stored, or None if KV events are disabled."""

    def is_cached(self) -> bool:
        """Return whether the blocks have contained this page since the request finished.

        vLLM removes the hash from a block that it reuses. When vLLM caches a block, it creates a new hash
        object, even for the same tokens. Such a block may have been computed with an adapter that was loaded
        again.
        """
        return None not in self.hashes and all(
            block.block_hash is known for block, known in zip(self.blocks, self.hashes, strict=True)
        )


class IdleSaves:
    """Saves pages of finished requests for one scheduler half while the engine is idle. Used by the engine's
    thread. Truthy while an idle engine still has to run steps to finish these saves."""

    def __init__(
        self,
        runtime: EngineRuntime,
        page: PageGeometry,
        requests: SavingRequests,
        saves: PageSaves,
        publisher: PagePublisher,
        wake_timer: WakeTimer = WAKE_TIMER,
    ) -> None:
        """Prepare idle saves. `publisher` must reserve pages regardless of whether a request has used them
        before."""
        self._wake_timer = wake_timer
        self._runtime, self._page = runtime, page
        self._requests, self._saves, self._publisher = requests, saves, publisher
        self._batch_pages = max(1, _BATCH_BYTES // page.page_bytes)
        self.events: PageEvents | None = None
        self._pool: BlockPool | None = None
        self._unit_tokens = self._unit_blocks = self._max_pages = 0
        self._finished: deque[dict[int, _UnsavedPage]] = deque()
        """Unsaved pages of finished requests: one dict per request, by page index. The oldest request is
        first."""
        self._reserving: list[tuple[TrackedRequest, dict[int, _UnsavedPage]]] = []
        """Finished requests with pending reservations, each with its unsaved pages by page index."""
        self._page_count = 0
        """Number of pages in `_finished`."""
        self._retry_pages: list[_UnsavedPage] = []
        """Pages that the store refused while it was still allocating memory. They are tried again."""
        self._open_saves: dict[int, OpenSave] = {}
        self._idle_since: float | None = None
        self._has_timer = False
        """Whether a timer will wake the engine in this pause. If so, the engine need not run steps until
        then."""
        self._store_failed = False
        """Whether the store has failed to reply during this idle period."""

    def bind(self, pool: BlockPool | None, block_size: int) -> None:
        """Set the engine's block pool, whose blocks have `block_size` tokens."""
        # Without prefix caching, vLLM does not keep the blocks of a finished request.
        if self._runtime.config.engine.save != "second" or pool is None or not pool.enable_caching:
            return
        self._pool = pool
        # A page and a block begin together at each multiple of this number of tokens.
        self._unit_tokens = math.lcm(self._page.page_tokens, block_size)
        self._unit_blocks = self._unit_tokens // block_size
        self._max_pages = pool.num_gpu_blocks * block_size // self._page.page_tokens

    def __bool__(self) -> bool:
        if self._store_failed or not (self._finished or self._retry_pages) or self._requests.has_unfinished():
            return False
        if self._wake_timer.has_waiting_replicas():
            return False  # vLLM sleeps for 1 ms in an empty step, and the replicas would wait.
        if self._idle_since is None:
            return True
        idle_s = time.monotonic() - self._idle_since
        return idle_s <= _MAX_IDLE_S and not (self._has_timer and idle_s < _IDLE_DELAY_S)

    def remember(self, tracked: TrackedRequest, block_ids: Sequence[int]) -> None:
        """Remember the unsaved pages of a request that has just finished and still has these blocks."""
        if self._pool is None or not (tracked.unsaved_keys or tracked.pending_pages):
            return
        keys = tracked.unsaved_keys | {asked.index: asked.key for asked in tracked.pending_pages}
        kept = self.events.spans_by_page(tracked, keys) if self.events is not None else {}
        pages = {i: self._create_page(block_ids, i, keys[i], kept.get(i)) for i in sorted(keys)}
        if tracked.pending_pages:
            self._reserving.append((tracked, pages))
        else:
            self._add_pages(pages)

    def _add_pages(self, pages: dict[int, _UnsavedPage]) -> None:
        self._finished.append(pages)
        self._page_count += len(pages)
        while self._page_count > self._max_pages:
            self._page_count -= len(self._finished.popleft())

    def _add_replied(self) -> None:
        """Queue the pages of finished requests after the store has replied to all their reservations. Pages
        for which the store reserved space are left out."""
        asking, self._reserving = self._reserving, []
        for tracked, pages in asking:
            if tracked.pending_pages:
                self._reserving.append((tracked, pages))
            elif tracked.unsaved_keys:
                self._add_pages(
                    {index: page for index, page in pages.items() if index in tracked.unsaved_keys}
                )

    def saves_for_step(self, output: SchedulerOutput) -> list[PageSave]:
        """Return the saves that the worker halves must carry out in this step. Empty if the step computes
        tokens."""
        if self._reserving:
            self._add_replied()
        nothing = not (self._finished or self._retry_pages)
        if output.num_scheduled_tokens or nothing or self._wake_timer.has_waiting_replicas():
            self._idle_since, self._store_failed = None, False
            return []
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since, self._has_timer = now, self._wake_timer.schedule(_IDLE_DELAY_S)
        settled = _IDLE_DELAY_S <= now - self._idle_since <= _MAX_IDLE_S
        if self._store_failed or not settled or self._requests.has_unfinished():
            return []
        if not self._requests.is_sharing:
            self.clear()
            return []
        self._open_saves = {
            token: save for token, save in self._open_saves.items() if self._saves.is_open(token)
        }
        free_slots = self._batch_pages - len(self._open_saves)
        pages = self._take_unsaved(min(free_slots, self._count_free_pages())) if free_slots > 0 else []
        return self._reserve(pages) if pages else []

    def clear(self) -> None:
        """Drop all unsaved pages of finished requests."""
        self._finished.clear()
        self._reserving.clear()
        self._retry_pages.clear()
        self._page_count = 0

    def _count_free_pages(self) -> int:
        """Return the number of pages that fit into the store without an eviction. If no page fits, stop idle
        saves until the next pause.

        If the store does not reply, idle saves stop too, so that the engine can sleep. They are tried again
        in the next pause.
        """
        free = count_free_pages(self._runtime, self._page)
        if free is None:
            self._store_failed = True
            return 0
        if free <= 0:
            self.clear()
        return free

    def _take_unsaved(self, count: int) -> list[_UnsavedPage]:
        """Remove and return at most `count` unsaved pages that vLLM still caches. Newer requests come first.
        Pages of one request are in order."""
        pages = [page for page in self._retry_pages[:count] if page.is_cached()]
        del self._retry_pages[:count]
        while self._finished and len(pages) < count:
            newest = self._finished[-1]
            while newest and len(pages) < count:
                page = newest.pop(next(iter(newest)))
                self._page_count -= 1
                if page.is_cached():
                    pages.append(page)
            if not newest:
                self._finished.pop()
        return pages

    def _create_page(
        self, ids: Sequence[int], index: int, key: bytes, event_span: PageSpan | None
    ) -> _UnsavedPage:
        """Create the record of page `index` of a request with the block ids `ids`. The record keeps only the
        blocks that contain the page."""
        assert self._pool is not None
        unit, place = divmod(index * self._page.page_tokens, self._unit_tokens)
        span = slice(unit * self._unit_blocks, (unit + 1) * self._unit_blocks)
        blocks = [self._pool.blocks[block] for block in ids[span]]
        hashes = [block.block_hash for block in blocks] if len(blocks) == self._unit_blocks else [None]
        return _UnsavedPage(key, place // self._page.page_tokens, blocks, hashes, event_span)

    def _reserve(self, pages: list[_UnsavedPage]) -> list[PageSave]:
        replies = self._publisher.reserve([page.key for page in pages])
        self._store_failed = None in replies
        writes = []
        for page, reply in zip(pages, replies, strict=True):
            if reply is None or reply is ReserveRefusal.GROWING:
                self._retry_pages.append(page)
            elif isinstance(reply, Reservation):
                writes.append(self._begin_save(page, reply))
        return writes

    def _begin_save(self, page: _UnsavedPage, reservation: Reservation) -> PageSave:
        assert self._pool is not None
        save = self._saves.begin_save(reservation, page.index, None)
        save.name, save.event_span = save_name("idle", reservation), page.event_span
        self._open_saves[reservation.token] = save
        # The blocks still count as free, but the engine reuses them last.
        self._pool.touch(page.blocks)
        save.blocks = page.blocks
        self._saves.freed.release(self._pool, save)
        write = PageWrite(page.index, reservation.token, reservation.location)
        blocks = tuple(block.block_id for block in page.blocks)
        return PageSave(save.name, (write,), blocks, self._saves.group)
