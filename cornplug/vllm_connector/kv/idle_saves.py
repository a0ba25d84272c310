"""Saves of an idle engine: pages of finished requests that were not worth a copy while requests ran.

With `engine.save = "second"` a page's first sighting copies nothing, so a prompt that one app had once would
be computed again by the next app. An engine without work copies such pages, if the store has free room for
them: they evict no page that was used twice. Their blocks count as free all the while, so no request and no
`reset_prefix_cache` waits for a copy. vLLM's pool names a block that it gives away before the copy has ended
(`BlockPool.unpin_blocks`); the page is given up then, as those of a preempted request.
"""

from __future__ import annotations

import math
import secrets
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
from cornplug.vllm_connector.kv.page_saves import PageSaves, SavingRequests
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput

    from cornplug.vllm_connector.kv_events.page_events import KeptRequest, PageEvents

_SETTLE_S: Final = 0.05
"""Time without a scheduled token before the first copy: a pause between two requests is not idleness."""
_LIMIT_S: Final = 1.0
"""Time without a scheduled token after which an engine sleeps, and saves the other pages when it is idle
again. It is awake for the difference, and a caller that pauses it waits no longer than that."""
_BATCH_BYTES: Final = 32 << 20
"""Pages that are copied at a time; a request that arrives has so many bytes beside it."""


@dataclass(frozen=True, slots=True)
class _Finished:
    """A finished request with pages that were not saved."""

    pages: dict[int, bytes]
    """Page index -> key."""
    blocks: list[KVCacheBlock]
    hashes: list[BlockHashWithGroupId | None]
    """Of `blocks`, at the request's end."""
    announced: KeptRequest | None = None
    """For KV events; None without."""


@dataclass(frozen=True, slots=True)
class _Page:
    """A page that is to be copied."""

    key: bytes
    index: int
    """Of the page in `blocks`."""
    blocks: Sequence[KVCacheBlock]
    hashes: Sequence[BlockHashWithGroupId | None]
    announced: tuple[KeptRequest, int] | None = None
    """Its request, and its place there, for KV events; None without."""

    def cached(self) -> bool:
        """Whether its blocks have held it ever since.

        vLLM takes the hash from a block that it gives away, and makes another object when it caches one, even
        for the same tokens: these may have been computed anew, by an adapter that was loaded anew.
        """
        return None not in self.hashes and all(
            block.block_hash is known for block, known in zip(self.blocks, self.hashes, strict=True)
        )


class IdleSaves:
    """One per scheduler half; used by the engine's thread. True while an idle engine must step for it."""

    def __init__(
        self,
        runtime: EngineRuntime,
        page: PageGeometry,
        requests: SavingRequests,
        saves: PageSaves,
        publisher: PagePublisher,
        alarm: EngineAlarm = ALARM,
    ) -> None:
        """`publisher`: one that asks for room whether a page was seen or not."""
        self._alarm = alarm
        self._run, self._page = runtime, page
        self._requests, self._saves, self._publisher = requests, saves, publisher
        self._batch_pages = max(1, _BATCH_BYTES // page.page_bytes)
        self._name = f"idle-{secrets.token_hex(8)}"
        """Of these saves, in place of a request's: no client can guess it."""
        self.events: PageEvents | None = None
        self._pool: BlockPool | None = None
        self._unit_tokens = self._unit_blocks = self._most_pages = 0
        self._finished: deque[_Finished] = deque()
        """Oldest first."""
        self._pages = 0
        """In `_finished`."""
        self._growing: list[_Page] = []
        """Pages for which the store is making room."""
        self._open: dict[int, OpenSave] = {}
        self._reading: dict[int, list[OpenSave]] = {}
        """Block -> saves that read it, or have read it."""
        self._reused: list[str] = []
        self._idle_since: float | None = None
        self._woken = False
        """The alarm ends this pause, so the engine need not step through it."""
        self._unanswered = False
        """The store was asked since the engine was idle, and did not answer."""

    def bind(self, pool: BlockPool | None, block_size: int) -> None:
        """Take the engine's blocks, of `block_size` tokens each."""
        # Without prefix caching no page outlives its request.
        if self._run.config.engine.save != "second" or pool is None or not pool.enable_caching:
            return
        self._pool = pool
        # A page and a block both begin at a multiple of it.
        self._unit_tokens = math.lcm(self._page.page_tokens, block_size)
        self._unit_blocks = self._unit_tokens // block_size
        self._most_pages = pool.num_gpu_blocks * block_size // self._page.page_tokens

    def __bool__(self) -> bool:
        if self._unanswered or not (self._finished or self._growing) or self._requests.unfinished():
            return False
        if self._idle_since is None:
            return True
        idle_s = time.monotonic() - self._idle_since
        return idle_s <= _LIMIT_S and not (self._woken and idle_s < _SETTLE_S)

    def remember(self, tracked: TrackedRequest, block_ids: Sequence[int]) -> None:
        """Take the pages of a request that is over, and has these blocks still."""
        # While it loads, its blocks hold nothing yet.
        if self._pool is None or not tracked.unsaved or tracked.loading is not None:
            return
        blocks = [self._pool.blocks[block] for block in block_ids]
        pages, hashes = dict(sorted(tracked.unsaved.items())), [block.block_hash for block in blocks]
        announced = self.events.kept(tracked) if self.events is not None else None
        finished = _Finished(pages, blocks, hashes, announced)
        self._finished.append(finished)
        self._pages += len(finished.pages)
        while self._pages > self._most_pages:
            self._pages -= len(self._finished.popleft().pages)

    def of_step(self, output: SchedulerOutput) -> list[PageSave]:
        """Pages that the worker halves are to copy in this step; none while a token is computed."""
        if output.num_scheduled_tokens or not (self._finished or self._growing):
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
        if not self._open:
            self._reading.clear()
        room = self._batch_pages - len(self._open)
        pages = self._take(min(room, self._free_pages())) if room > 0 else []
        return self._reserve(pages) if pages else []

    def reused(self) -> list[str]:
        """Names of saves whose blocks were given away since the last call."""
        reused, self._reused = self._reused, []
        return reused

    def forget(self) -> None:
        """Save none of the pages that are known now."""
        self._finished.clear()
        self._growing.clear()
        self._pages = 0

    def _free_pages(self) -> int:
        """Pages that the store takes without an eviction; without room for one, none is tried again.

        A store that does not answer is no work to keep an engine awake for: the next pause asks it again.
        """
        free = free_pages(self._run, self._page)
        if free is None:
            self._unanswered = True
            return 0
        if free <= 0:
            self.forget()
        return free

    def _take(self, count: int) -> list[_Page]:
        """At most `count` pages that are cached still: those of the newest requests, each from its start."""
        pages = [page for page in self._growing[:count] if page.cached()]
        del self._growing[:count]
        while self._finished and len(pages) < count:
            newest = self._finished[-1]
            while newest.pages and len(pages) < count:
                index = next(iter(newest.pages))
                page = self._page_of(newest, index, newest.pages.pop(index))
                self._pages -= 1
                if page.cached():
                    pages.append(page)
            if not newest.pages:
                self._finished.pop()
        return pages

    def _page_of(self, finished: _Finished, index: int, key: bytes) -> _Page:
        unit, place = divmod(index * self._page.page_tokens, self._unit_tokens)
        span = slice(unit * self._unit_blocks, (unit + 1) * self._unit_blocks)
        hashes = finished.hashes[span] if len(finished.blocks) >= span.stop else [None]
        announced = (finished.announced, index) if finished.announced is not None else None
        return _Page(key, place // self._page.page_tokens, finished.blocks[span], hashes, announced)

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
        name = f"{self._name}-{reservation.token}"
        save = self._saves.begin(reservation, name, page.index)
        save.announced = page.announced
        self._open[reservation.token] = save
        for block in page.blocks:
            self._reading.setdefault(block.block_id, []).append(save)
        # The blocks stay free, as the last ones that the engine gives away.
        self._pool.touch(page.blocks)
        self._pool.unpin_blocks(reversed(page.blocks), self._given_away)
        write = PageWrite(page.index, reservation.token, reservation.location)
        return PageSave(name, (write,), tuple(block.block_id for block in page.blocks))

    def _given_away(self, block: KVCacheBlock) -> None:
        """vLLM gives a block to a request, or forgets what it holds."""
        for save in self._reading.pop(block.block_id, ()):
            if self._saves.is_open(save.reservation.token) and not save.given_up:
                save.given_up = True
                self._reused.append(save.request_id)
