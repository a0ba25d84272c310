"""Saves of an idle engine: pages of finished requests that were not worth copying while requests ran.

With `engine.save = "second"` the first use of a page saves nothing, so a prompt that one app sent once would
be computed again for another app. An idle engine copies such pages if the store has free capacity, so no page
that was used twice is evicted for them. Their blocks count as free all the time (`FreedBlocks`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cornplug.engine_common.page_publish import PagePublisher, free_pages
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.kv_page import PageGeometry
from cornplug.store.base import Reservation, ReserveRefusal
from cornplug.vllm_connector.engine_alarm import ALARM, EngineAlarm
from cornplug.vllm_connector.kv.deferred_ops import OpenSave
from cornplug.vllm_connector.kv.metadata import PageSave, PageWrite
from cornplug.vllm_connector.kv.page_saves import PageSaves, SavingRequests, save_name
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput

    from cornplug.vllm_connector.kv.page_events import PageEvents, PageSpan

_SETTLE_S: Final = 0.05
"""Time without a scheduled token before the first copy, because a pause between two requests is not
idleness."""
_LIMIT_S: Final = 1.0
"""Time without a scheduled token after which an engine sleeps, and saves the other pages when it is idle
again. This also limits how long a caller that pauses the engine has to wait."""
_BATCH_BYTES: Final = 32 << 20
"""Bytes of pages that are copied at a time, and therefore while a new request starts."""


@dataclass(frozen=True, slots=True)
class _Page:
    """Page to be copied."""

    key: bytes
    index: int
    """Index of the page in `blocks`."""
    blocks: Sequence[KVCacheBlock]
    hashes: Sequence[BlockHashWithGroupId | None]
    announced: PageSpan | None = None
    """Span for KV events, or None without events."""

    def cached(self) -> bool:
        """Return whether its blocks have held it without interruption.

        vLLM removes the hash from a block that it reuses, and creates a new hash object when it caches a
        block, even for the same tokens. Such a block may have been computed again with an adapter that was
        loaded again.
        """
        return None not in self.hashes and all(
            block.block_hash is known for block, known in zip(self.blocks, self.hashes, strict=True)
        )


class IdleSaves:
    """Idle saves of one scheduler half. Used by the engine's thread. True while an idle engine must run steps
    for them."""

    def __init__(
        self,
        runtime: EngineRuntime,
        page: PageGeometry,
        requests: SavingRequests,
        saves: PageSaves,
        publisher: PagePublisher,
        alarm: EngineAlarm = ALARM,
    ) -> None:
        """Create the saves. `publisher` reserves capacity for pages whether or not they were used before."""
        self._alarm = alarm
        self._run, self._page = runtime, page
        self._requests, self._saves, self._publisher = requests, saves, publisher
        self._batch_pages = max(1, _BATCH_BYTES // page.page_bytes)
        self.events: PageEvents | None = None
        self._pool: BlockPool | None = None
        self._unit_tokens = self._unit_blocks = self._most_pages = 0
        self._finished: deque[dict[int, _Page]] = deque()
        """Unsaved pages of finished requests, by their index in the request. Oldest first."""
        self._asking: list[tuple[TrackedRequest, dict[int, _Page]]] = []
        """Finished requests whose reservations the store has not answered completely."""
        self._pages = 0
        """Number of pages in `_finished`."""
        self._growing: list[_Page] = []
        """Pages for which the store is allocating memory."""
        self._open: dict[int, OpenSave] = {}
        self._idle_since: float | None = None
        self._woken = False
        """Whether the timer ends this pause, so the engine does not have to run steps during it."""
        self._unanswered = False
        """Whether the store failed to reply since the engine became idle."""

    def bind(self, pool: BlockPool | None, block_size: int) -> None:
        """Set the engine's block pool, with blocks of `block_size` tokens."""
        # Without prefix caching, no page outlives its request.
        if self._run.config.engine.save != "second" or pool is None or not pool.enable_caching:
            return
        self._pool = pool
        # A page and a block both begin at multiples of this.
        self._unit_tokens = math.lcm(self._page.page_tokens, block_size)
        self._unit_blocks = self._unit_tokens // block_size
        self._most_pages = pool.num_gpu_blocks * block_size // self._page.page_tokens

    def __bool__(self) -> bool:
        if self._unanswered or not (self._finished or self._growing) or self._requests.unfinished():
            return False
        if self._alarm.replicas_wait():
            return False  # In a step that computes nothing, vLLM sleeps for 1 ms.
        if self._idle_since is None:
            return True
        idle_s = time.monotonic() - self._idle_since
        return idle_s <= _LIMIT_S and not (self._woken and idle_s < _SETTLE_S)

    def remember(self, tracked: TrackedRequest, block_ids: Sequence[int]) -> None:
        """Remember the pages of a finished request, which still has these blocks."""
        if self._pool is None or not (tracked.unsaved or tracked.asked):
            return
        keys = tracked.unsaved | {asked.index: asked.key for asked in tracked.asked}
        kept = self.events.kept(tracked, keys) if self.events is not None else {}
        pages = {i: self._page_of(block_ids, i, keys[i], kept.get(i)) for i in sorted(keys)}
        if tracked.asked:
            self._asking.append((tracked, pages))
        else:
            self._add(pages)

    def _add(self, pages: dict[int, _Page]) -> None:
        self._finished.append(pages)
        self._pages += len(pages)
        while self._pages > self._most_pages:
            self._pages -= len(self._finished.popleft())

    def _add_answered(self) -> None:
        """Add the pages of finished requests for which nothing was reserved."""
        asking, self._asking = self._asking, []
        for tracked, pages in asking:
            if tracked.asked:
                self._asking.append((tracked, pages))
            elif tracked.unsaved:
                self._add({index: page for index, page in pages.items() if index in tracked.unsaved})

    def of_step(self, output: SchedulerOutput) -> list[PageSave]:
        """Return pages that the worker halves should copy in this step. Empty while a token is computed."""
        if self._asking:
            self._add_answered()
        nothing = not (self._finished or self._growing)
        if output.num_scheduled_tokens or nothing or self._alarm.replicas_wait():
            self._idle_since, self._unanswered = None, False
            return []
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since, self._woken = now, self._alarm.set(_SETTLE_S)
        settled = _SETTLE_S <= now - self._idle_since <= _LIMIT_S
        if self._unanswered or not settled or self._requests.unfinished():
            return []
        if not self._requests.sharing:
            self.forget()
            return []
        self._open = {token: save for token, save in self._open.items() if self._saves.is_open(token)}
        room = self._batch_pages - len(self._open)
        pages = self._take(min(room, self._free_pages())) if room > 0 else []
        return self._reserve(pages) if pages else []

    def forget(self) -> None:
        """Drop all remembered pages."""
        self._finished.clear()
        self._asking.clear()
        self._growing.clear()
        self._pages = 0

    def _free_pages(self) -> int:
        """Return the number of pages that fit into the store without an eviction. If there are none, idle
        saves end until the next pause.

        A store that does not reply is no reason to keep an engine awake. The next pause tries again.
        """
        free = free_pages(self._run, self._page)
        if free is None:
            self._unanswered = True
            return 0
        if free <= 0:
            self.forget()
        return free

    def _take(self, count: int) -> list[_Page]:
        """Take at most `count` pages that are still cached: those of the newest requests, each from its
        start."""
        pages = [page for page in self._growing[:count] if page.cached()]
        del self._growing[:count]
        while self._finished and len(pages) < count:
            newest = self._finished[-1]
            while newest and len(pages) < count:
                page = newest.pop(next(iter(newest)))
                self._pages -= 1
                if page.cached():
                    pages.append(page)
            if not newest:
                self._finished.pop()
        return pages

    def _page_of(self, ids: Sequence[int], index: int, key: bytes, announced: PageSpan | None) -> _Page:
        """Create a page of a request with these blocks. Only the blocks that hold the page are kept."""
        assert self._pool is not None
        unit, place = divmod(index * self._page.page_tokens, self._unit_tokens)
        span = slice(unit * self._unit_blocks, (unit + 1) * self._unit_blocks)
        blocks = [self._pool.blocks[block] for block in ids[span]]
        hashes = [block.block_hash for block in blocks] if len(blocks) == self._unit_blocks else [None]
        return _Page(key, place // self._page.page_tokens, blocks, hashes, announced)

    def _reserve(self, pages: list[_Page]) -> list[PageSave]:
        answers = self._publisher.reserve([page.key for page in pages])
        self._unanswered = None in answers
        writes = []
        for page, answer in zip(pages, answers, strict=True):
            if answer is None or answer is ReserveRefusal.GROWING:
                self._growing.append(page)
            elif isinstance(answer, Reservation):
                writes.append(self._begin(page, answer))
        return writes

    def _begin(self, page: _Page, reservation: Reservation) -> PageSave:
        assert self._pool is not None
        save = self._saves.begin(reservation, page.index, None)
        save.name, save.announced = save_name("idle", reservation), page.announced
        self._open[reservation.token] = save
        # The blocks stay free, and the engine reuses them last.
        self._pool.touch(page.blocks)
        save.blocks = page.blocks
        self._saves.freed.release(self._pool, save)
        write = PageWrite(page.index, reservation.token, reservation.location)
        return PageSave(save.name, (write,), tuple(block.block_id for block in page.blocks))
