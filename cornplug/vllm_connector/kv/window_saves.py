"""Saving of KV pages of sliding-window layers and of recurrent states. vLLM releases the blocks of such pages
while the request still runs, once the request has moved past them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cornplug.store.base import Reservation
from cornplug.vllm_connector.kv.metadata import PageSave, PageWrite
from cornplug.vllm_connector.kv.open_saves import OpenSave
from cornplug.vllm_connector.kv.page_saves import PageSaves, PendingPage, save_name
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

Blocks = Sequence["KVCacheBlock"]


class WindowSaves(PageSaves):
    """Saves the pages of one cache group of sliding-window layers.

    The blocks of a page are pinned from the step that reserves space for the page until every rank has read
    the blocks, or until the request ends. A block that its request has released is still valid while vLLM's
    prefix cache identifies it by the hash of the request's tokens. Pages whose blocks are gone are not
    offered for saving, because most of them are never needed again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pinned_pages = 0
        """Number of pages being saved that still hold a reference to their blocks."""

    @property
    def has_pinned_blocks(self) -> bool:
        """Whether any blocks are kept only until the worker halves have read them."""
        return bool(self._pinned_pages)

    def blocks_of(self, tracked: TrackedRequest, index: int, table: Blocks) -> Blocks | None:
        """Return the blocks that hold page `index` of a request, or None if vLLM has reused any of them.
        `table` has the blocks that the request currently holds."""
        size, found = self._page.page_tokens, []
        for i in range(index * size // self._block_size, -(-(index + 1) * size // self._block_size)):
            block = table[i] if i < len(table) and not table[i].is_null else self._cached_block(tracked, i)
            if block is None:
                return None
            found.append(block)
        return found

    def _cached_block(self, tracked: TrackedRequest, index: int) -> KVCacheBlock | None:
        """Return block `index` of a request if it is still in vLLM's prefix cache, else None."""
        hashes, pool = tracked.request.block_hashes, self._pool
        # A cached block may contain KV that another connector loaded, or another prompt's KV after a hash
        # collision.
        if tracked.own_tokens is not None or pool.hash_block_size != self._block_size or index >= len(hashes):
            return None
        cached = pool.get_cached_block(hashes[index], [self.group])
        return cached[0] if cached else None

    def known_block_ids(self, tracked: TrackedRequest, block_ids: Sequence[int]) -> list[int]:
        """Return the ids of a request's blocks. For unsaved pages, the list includes blocks that the request
        has released and that vLLM still caches."""
        table, found = [self._pool.blocks[block] for block in block_ids], list(block_ids)
        for index in tracked.unsaved_keys:
            first = index * self._page.page_tokens // self._block_size
            for i, block in enumerate(self.blocks_of(tracked, index, table) or (), first):
                if i < len(found):
                    found[i] = block.block_id
        return found

    def _pages_to_reserve(self, tracked: TrackedRequest, end: int) -> list[PendingPage]:
        found, pages = [], super()._pages_to_reserve(tracked, end)
        table = self._block_table(tracked) if pages else ()
        for page in pages:
            blocks = self.blocks_of(tracked, page.index, table)
            if blocks is not None:
                self._pool.touch(blocks)
                page.blocks, page.is_pinned = blocks, True
                self._pinned_pages += 1
                found.append(page)
        return found

    def _block_table(self, tracked: TrackedRequest) -> Blocks:
        assert self.manager is not None
        return self.manager.get_blocks(tracked.request.request_id).blocks[self.group]

    def release_blocks(self, tracked: TrackedRequest) -> None:
        self._pinned_pages -= sum(page.is_pinned for page in tracked.pending_pages)
        self._pinned_pages -= sum(self._open[token].is_pinned for token in tracked.open_saves)
        super().release_blocks(tracked)

    def abandon(self) -> None:
        asked = itertools.chain(self._final_pages, *(pages for pages, _ in self._sent_reservations))
        for reader in itertools.chain[PendingPage | OpenSave](asked, self._open.values()):
            self._unpin(reader)

    def _unwatch(self, page: PendingPage) -> None:
        super()._unwatch(page)
        self._unpin(page)

    def _make_page_saves(self, pages: list[tuple[PendingPage, Reservation]]) -> list[PageSave]:
        if not self._open[pages[0][1].token].is_pinned:
            return super()._make_page_saves(pages)
        # Either a page is a multiple of a block or a block is a multiple of a page.
        per_unit = max(1, self._block_size // self._page.page_tokens)
        writes, blocks = [], []
        name = save_name(pages[0][0].tracked.request.request_id, pages[0][1])
        for place, (page, room) in enumerate(pages):
            writes.append(PageWrite(place * per_unit + page.index % per_unit, room.token, room.location))
            blocks += [block.block_id for block in page.blocks]
            self._open[room.token].name = name
        return [PageSave(name, tuple(writes), tuple(blocks), self.group)]

    def _close(self, token: int, save: OpenSave) -> None:
        super()._close(token, save)
        self._unpin(save)

    def _unpin(self, reader: PendingPage | OpenSave) -> None:
        if reader.is_pinned:
            reader.is_pinned = False
            self._pinned_pages -= 1
            self._pool.free_blocks(reversed(reader.blocks))


class StateSaves(WindowSaves):
    """Saves the pages of one cache group of recurrent states.

    A request's block may hold the state after any token. Only blocks that vLLM's own prefix cache identifies
    by the hash of all tokens up to the block's end are saved. vLLM assigns this hash when it schedules the
    step that computes the state, and no later step writes to the block. Most blocks have no hash, because a
    prefill keeps only the state after the last token of each step.
    """

    def blocks_of(self, tracked: TrackedRequest, index: int, table: Blocks) -> Blocks | None:
        """Return the block that holds the recurrent state at the end of page `index`, or None if vLLM does
        not cache it."""
        block = self._cached_block(tracked, index)
        return None if block is None else [block]
