"""Saving of KV pages of sliding-window layers. vLLM releases the blocks of such a page while the request
still runs, once the request's window has moved past the page."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cornplug.errors import CornplugError
from cornplug.store.base import Reservation
from cornplug.vllm_connector.kv.metadata import PageSave, PageWrite
from cornplug.vllm_connector.kv.open_saves import OpenSave
from cornplug.vllm_connector.kv.page_kinds import PageKind
from cornplug.vllm_connector.kv.page_saves import AskedPage, PageSaves, save_name
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest, TrackedRequests

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


Blocks = Sequence["KVCacheBlock"]


class GroupRequests:
    """The tracked requests, with separate save progress for one cache group. Cache groups differ in which
    pages are saved."""

    def __init__(self, requests: TrackedRequests, kind: PageKind) -> None:
        self._requests, self._kind = requests, kind
        self._tracked: dict[str, TrackedRequest] = {}
        self._ends: Sequence[tuple[TrackedRequest, int]] = ()

    @property
    def sharing(self) -> bool:
        """Whether KV computed with this engine's weights may be shared now."""
        return self._requests.sharing

    def unfinished(self) -> bool:
        """Return whether any tracked request is still unfinished."""
        return self._requests.unfinished()

    def get(self, request: Request) -> TrackedRequest | None:
        """Return the record of a request's pages in this cache group, or None if the group does not track the
        request."""
        found = self._tracked.get(request.request_id)
        return found if found is not None and found.request is request else None

    def of(self, tracked: TrackedRequest) -> TrackedRequest:
        """Return the record of a request's pages in this cache group, created on first use."""
        request = tracked.request
        found = self.get(request)
        if found is None:
            found = self._tracked[request.request_id] = TrackedRequest(request, own=tracked.own)
        if found.keys is None and tracked.keys is not None:
            # If the request's adapter has changed since it was tracked, no page of this group is saved.
            with suppress(CornplugError):
                found.keys = tracked.keys.under(self._requests.root_of(request, self._kind.geometry))
        return found

    def completed(self, ends: Sequence[tuple[TrackedRequest, int]]) -> None:
        """Set the requests that `completing` returns for this group in this step. `ends` is the result of
        `TrackedRequests.completing` for the step."""
        self._ends = ends

    def completing(self, scheduled_tokens: Mapping[str, int], total: int) -> list[tuple[TrackedRequest, int]]:
        """Return the requests that may complete a page in this step, each with its number of computed tokens
        after the step. The arguments are ignored."""
        return [(self.of(tracked), end) for tracked, end in self._ends]

    def look_at(self, tracked: TrackedRequest) -> None:
        """Check the request for a completed page in the next step that schedules it."""
        self._requests.look_at(tracked)

    def forget(self, request: Request) -> None:
        """Remove the record of a request's pages in this cache group."""
        if self.get(request) is not None:
            del self._tracked[request.request_id]


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
        cached = pool.get_cached_block(hashes[index], [self._group])
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
        return self.manager.get_blocks(tracked.request.request_id).blocks[self._group]

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
        return [PageSave(name, tuple(writes), tuple(blocks))]

    def _close(self, token: int, save: OpenSave) -> None:
        super()._close(token, save)
        self._unpin(save)

    def _unpin(self, reader: AskedPage | OpenSave) -> None:
        if reader.pinned:
            reader.pinned = False
            self._pins -= 1
            self._pool.free_blocks(reversed(reader.blocks))
