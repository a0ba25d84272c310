"""Saving of KV pages of sliding-window layers and of recurrent states. vLLM releases the blocks of such pages
while the request still runs, once the request has moved past them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cornplug.store.base import Reservation
from cornplug.vllm_connector.kv.metadata import PageSave, PageWrite
from cornplug.vllm_connector.kv.open_saves import OpenSave
from cornplug.vllm_connector.kv.page_saves import AskedPage, PageSaves, save_name
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
        self._pins = 0
        """Number of pages being saved that still hold a reference to their blocks."""

    @property
    def pinned(self) -> bool:
        """Whether any blocks are kept only until the worker halves have read them."""
        return bool(self._pins)

    def blocks_of(self, tracked: TrackedRequest, index: int, table: Blocks) -> Blocks | None:
        """Return the blocks that hold page `index` of a request, or None if vLLM has reused any of them.
        `table` has the blocks that the request currently holds."""
        size, found = self._page.page_tokens, []
        for i in range(index * size // self._block_size, -(-(index + 1) * size // self._block_size)):
            block = table[i] if i < len(table) and not table[i].is_null else self._cached(tracked, i)
            if block is None:
                return None
            found.append(block)
        return found

    def _cached(self, tracked: TrackedRequest, index: int) -> KVCacheBlock | None:
        """Return block `index` of a request if it is still in vLLM's prefix cache, else None."""
        hashes, pool = tracked.request.block_hashes, self._pool
        # A cached block may contain KV that another connector loaded, or another prompt's KV after a hash
        # collision.
        if tracked.own is not None or pool.hash_block_size != self._block_size or index >= len(hashes):
            return None
        cached = pool.get_cached_block(hashes[index], [self.group])
        return cached[0] if cached else None

    def kept(self, tracked: TrackedRequest, block_ids: Sequence[int]) -> list[int]:
        """Return the ids of a request's blocks. For unsaved pages, the list includes blocks that the request
        has released and that vLLM still caches."""
        table, found = [self._pool.blocks[block] for block in block_ids], list(block_ids)
        for index in tracked.unsaved:
            first = index * self._page.page_tokens // self._block_size
            for i, block in enumerate(self.blocks_of(tracked, index, table) or (), first):
                if i < len(found):
                    found[i] = block.block_id
        return found

    def _offered(self, tracked: TrackedRequest, end: int) -> list[AskedPage]:
        found, pages = [], super()._offered(tracked, end)
        table = self._table(tracked) if pages else ()
        for page in pages:
            blocks = self.blocks_of(tracked, page.index, table)
            if blocks is not None:
                self._pool.touch(blocks)
                page.blocks, page.pinned = blocks, True
                self._pins += 1
                found.append(page)
        return found

    def _table(self, tracked: TrackedRequest) -> Blocks:
        assert self.manager is not None
        return self.manager.get_blocks(tracked.request.request_id).blocks[self.group]

    def let_go(self, tracked: TrackedRequest) -> None:
        self._pins -= sum(page.pinned for page in tracked.asked)
        self._pins -= sum(self._open[token].pinned for token in tracked.open_saves)
        super().let_go(tracked)

    def abandon(self) -> None:
        asked = itertools.chain(self._last, *(pages for pages, _ in self._posted))
        for reader in itertools.chain[AskedPage | OpenSave](asked, self._open.values()):
            self._unpin(reader)

    def _drop(self, page: AskedPage) -> None:
        super()._drop(page)
        self._unpin(page)

    def _saves_of_blocks(self, pages: list[tuple[AskedPage, Reservation]]) -> list[PageSave]:
        if not self._open[pages[0][1].token].pinned:
            return super()._saves_of_blocks(pages)
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

    def _unpin(self, reader: AskedPage | OpenSave) -> None:
        if reader.pinned:
            reader.pinned = False
            self._pins -= 1
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
        block = self._cached(tracked, index)
        return None if block is None else [block]
