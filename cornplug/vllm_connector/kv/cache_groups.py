"""Loading and saving of KV pages of a model with several cache groups, in the connector's scheduler half.

A prefix is loaded only if the store has its pages for every cache group. Pages of sliding-window layers and
of recurrent states are saved while the request still runs, because vLLM releases their blocks once the
request has moved past them.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from cornplug.engine_common.rank_pages import check_page_headers
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import CornplugError
from cornplug.kv_page import pages_between
from cornplug.metrics import Tally
from cornplug.store.base import Leases, Reservation
from cornplug.store.payload import LEASE_S
from cornplug.vllm_connector.kv.costs import LoadCosts
from cornplug.vllm_connector.kv.load_offers import LeasedPages, LoadOffers
from cornplug.vllm_connector.kv.metadata import PageLoad, PageSave, PageWrite
from cornplug.vllm_connector.kv.open_saves import DeferredStoreOps, OpenSave
from cornplug.vllm_connector.kv.page_keys import PageKeys
from cornplug.vllm_connector.kv.page_kinds import PageKind
from cornplug.vllm_connector.kv.page_saves import PageSaves, PendingPage, save_name
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest, TrackedRequests

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
_MAX_SLACK_PAGES: Final = 64
"""A query for the tails of a hit also covers hits that are up to this many pages shorter, so that these hits
need no further query."""
Blocks = Sequence["KVCacheBlock"]


class GroupOffers(LoadOffers):
    """Offers stored pages of all cache groups to vLLM for loading.

    A hit that ends at token n consists of all full-attention pages before n, the pages of the window before n
    for each windowed group, and the page that ends at n for each group of states.
    """

    def __init__(
        self,
        runtime: EngineRuntime,
        kinds: Sequence[PageKind],
        groups: Sequence[GroupRequests],
        tally: Tally,
        costs: LoadCosts,
        store_ops: DeferredStoreOps,
    ) -> None:
        self._first_full_group = next(i for i, kind in enumerate(kinds) if kind.needs_all_pages)
        super().__init__(runtime, kinds[self._first_full_group].geometry, tally, costs, store_ops)
        self._kinds, self._groups = kinds, groups
        self._null_block = 0

    def bind(self, null_block: int) -> None:
        """Set the id of vLLM's null block, which stands for blocks that vLLM does not keep."""
        self._null_block = null_block

    def _look_up(self, tracked: TrackedRequest, offer: LeasedPages) -> None:
        request, size = tracked.request, self._page.page_tokens
        assert tracked.keys is not None
        keys = [group.state_of(tracked).keys for group in self._groups]
        if None in keys:
            return
        named = [one for one in keys if one is not None]
        # The last token is always computed, because the next token is sampled from its output.
        wanted = pages_between(offer.computed, request.num_tokens - 1, size)
        end = tracked.keys.count_pages(request.num_tokens - 1)
        for kind, own in zip(self._kinds, named, strict=True):
            if kind.needs_all_pages:
                pages = range(wanted.start, max(wanted.start, end))
                end = wanted.start + len(self._find_stored(tracked, own, pages))
        absent_pages = range(max(end, wanted.start), tracked.keys.count_pages(request.num_tokens - 1))
        if self._start_far_lookup(
            tracked, absent_pages, lambda pages: self._keys_of(tracked, [pages] * len(named), named)
        ):
            return
        end = self._longest_hit(tracked, offer.computed, end, named)
        if self._recall_groups(tracked, offer.computed, end, named):
            return
        if (absent := wanted.stop - max(end, wanted.start)) > 0:
            self._count_misses("absent", absent)
        if end > wanted.start:
            self._lease_hit(tracked, offer, end, named)

    def _needed_pages(self, kind: PageKind, computed: int, end: int) -> range:
        """Return the indices of pages of this kind that must be loaded for a hit of `end` pages if the engine
        already has the first `computed` tokens."""
        size = self._page.page_tokens
        return range(max(computed, kind.first_needed_token(end * size)) // size, end)

    def _recall_groups(
        self, tracked: TrackedRequest, computed: int, end: int, keys: Sequence[PageKeys]
    ) -> bool:
        """Read from disk the pages that a hit of `end` pages needs in all cache groups, if necessary. Returns
        True if the caller must end the lookup (see `_begin_recall`)."""
        tokens = end * self._page.page_tokens - computed
        if tokens <= 0 or not self._can_recall(tracked):
            return False
        ranges = [self._needed_pages(kind, computed, end) for kind in self._kinds]
        wanted = self._keys_of(tracked, ranges, keys)
        return self._begin_recall(tracked, wanted, tokens=tokens, pages=self._to_complete_pages(ranges))

    def _keys_of(
        self, tracked: TrackedRequest, ranges: Sequence[range], keys: Sequence[PageKeys]
    ) -> list[bytes]:
        """Return the keys of these pages. `ranges` and `keys` have one item per cache group."""
        token_ids = tracked.request.all_token_ids
        return [
            key for own, pages in zip(keys, ranges, strict=True) for key in own.keys_for(token_ids, pages)
        ]

    def _longest_hit(self, tracked: TrackedRequest, computed: int, end: int, keys: Sequence[PageKeys]) -> int:
        """Return the length in pages of the longest hit, at most `end`, for which the store also has each
        group's window or state. Returns 0 if there is no such hit.

        Lengths are tried from the longest to the shortest. Each query to the store checks the windows or
        states of twice as many lengths as the previous query. States are stored only at the ends of an
        engine's steps, so the next possible length may be many pages shorter. No page is queried twice.
        """
        end_s = time.monotonic() + self._runtime.config.store.deadline_s
        present_of = self._presence_query(tracked)
        present: dict[tuple[int, int], int] = {}
        behind = 0
        while end * self._page.page_tokens > computed:
            needed = self._tail_pages(computed, end)
            if any(place not in present for place in needed):
                asked = [place for place in self._tail_pages(computed, end, behind) if place not in present]
                wanted = [
                    keys[group].keys_for(tracked.request.all_token_ids, [page])[0] for group, page in asked
                ]
                there = present_of(wanted, deadline_s=max(0.0, end_s - time.monotonic()))
                present |= zip(asked, there, strict=True)
                behind = min(2 * behind + 1, _MAX_SLACK_PAGES)
            # Every hit that ends after the first absent page and up to `end` would also need that page.
            absent = [page for group, page in needed if not present[group, page]]
            if not absent:
                return end
            end = min(absent)
        return 0

    def _tail_pages(self, computed: int, end: int, slack_pages: int = 0) -> list[tuple[int, int]]:
        """Return (group, page) for each page that windowed and state groups need for a hit of `end` pages,
        and for hits that are up to `slack_pages` pages shorter."""
        return [
            (group, page)
            for group, kind in enumerate(self._kinds)
            if not kind.needs_all_pages
            for page in range(self._needed_pages(kind, computed, max(0, end - slack_pages)).start, end)
        ]

    def _lease_hit(
        self, tracked: TrackedRequest, offer: LeasedPages, end: int, keys: Sequence[PageKeys]
    ) -> None:
        """Lease all pages of a hit of `end` pages and add them to the offer, or add none if any page is
        absent or damaged."""
        config = self._runtime.config.store
        ranges = [self._needed_pages(kind, offer.computed, end) for kind in self._kinds]
        if not self._costs.should_load(
            tokens=end * self._page.page_tokens - offer.computed, pages=self._to_complete_pages(ranges)
        ):
            self._count_misses("cheaper", len(ranges[self._first_full_group]))
            for kind, group, pages in zip(self._kinds, self._groups, ranges, strict=True):
                own = group.state_of(tracked)
                # Pages before a window or a state were not looked up, and the store may not have them.
                if kind.needs_all_pages or pages.start <= own.done_pages:
                    offer.stored.append((own, end))
            return
        wanted = self._keys_of(tracked, ranges, keys)
        leases = self._runtime.store.lease(wanted, ttl_s=LEASE_S, deadline_s=config.deadline_s)
        if None in leases.metas or self._reset_filter.count_since_reset(leases) < len(leases):
            self._count_misses("absent", len(ranges[self._first_full_group]))
        elif self._are_headers_valid(ranges, leases):
            ends = list(accumulate(map(len, ranges)))
            offer.groups = [
                (pages.start, leases[end - len(pages) : end]) for pages, end in zip(ranges, ends, strict=True)
            ]
            offer.first_page, offer.pages = offer.groups[self._first_full_group]
            offer.lease_tokens = leases.unique_tokens
            return
        self._store_ops.release(leases.unique_tokens)

    def _are_headers_valid(self, ranges: Sequence[range], leases: Leases) -> bool:
        """Return whether the leased pages of all cache groups have valid headers."""
        at = 0
        for kind, pages in zip(self._kinds, ranges, strict=True):
            mine = leases[at : at + len(pages)]
            whole, error = check_page_headers(mine, kind.geometry)
            if error is not None:
                self._count_misses(error.reason)
                if error.is_damage:
                    self._store_ops.delete(mine.keys[whole])
                return False
            at += len(pages)
        return True

    def _to_complete_pages(self, ranges: Sequence[range]) -> int:
        """Convert these pages of the cache groups to a number of pages of the complete model with the same
        total size, rounded up."""
        sizes = [kind.geometry.page_bytes for kind in self._kinds]
        loaded = sum(size * len(pages) for size, pages in zip(sizes, ranges, strict=True))
        return -(-loaded // sum(sizes))

    def _begin_load(
        self, tracked: TrackedRequest, offer: LeasedPages, blocks: Sequence[Sequence[int]]
    ) -> None:
        # If the engine loads only a part of the offer, it needs window and state pages that were not offered.
        whole = offer.end == (offer.first_page + len(offer.pages)) * self._page.page_tokens
        request_id = tracked.request.request_id
        loads = []
        for i, (kind, (first, pages)) in enumerate(zip(self._kinds, offer.groups, strict=True)):
            start = max(offer.computed, kind.first_needed_token(offer.end))
            held = blocks[i][start // kind.block_size : -(-offer.end // kind.block_size)]
            whole = (
                whole and len(held) * kind.block_size >= offer.end - start and self._null_block not in held
            )
            loads.append(PageLoad(request_id, start, offer.end, first, pages, array("q", blocks[i]), group=i))
        # A load with an expired deadline fails, and the engine computes the tokens instead.
        deadline_s = self._costs.deadline_s(offer.end - offer.computed) if whole else -1.0
        self._costs.begin_load(
            request_id, self._to_complete_pages([range(len(pages)) for _, pages in offer.groups])
        )
        self._accepted_loads += [replace(load, deadline_s=deadline_s) for load in loads]
        for group in self._groups:
            group.state_of(tracked).mark_saved_until(offer.end // self._page.page_tokens)


class GroupRequests:
    """The tracked requests, with separate save progress for one cache group. Cache groups differ in which
    pages are saved."""

    def __init__(self, requests: TrackedRequests, kind: PageKind) -> None:
        self._requests, self._kind = requests, kind
        self._tracked: dict[str, TrackedRequest] = {}
        self._completing: Sequence[tuple[TrackedRequest, int]] = ()

    @property
    def is_sharing(self) -> bool:
        """Whether KV computed with this engine's weights may be shared now."""
        return self._requests.is_sharing

    def has_unfinished(self) -> bool:
        """Return whether any tracked request is still unfinished."""
        return self._requests.has_unfinished()

    def find_state(self, tracked: TrackedRequest) -> TrackedRequest | None:
        """Return the record of a request's pages in this cache group, or None if the group does not track the
        request."""
        found = self._tracked.get(tracked.request.request_id)
        return found if found is not None and found.request is tracked.request else None

    def state_of(self, tracked: TrackedRequest) -> TrackedRequest:
        """Return the record of a request's pages in this cache group, created on first use."""
        request = tracked.request
        found = self.find_state(tracked)
        if found is None:
            found = self._tracked[request.request_id] = TrackedRequest(request, own_tokens=tracked.own_tokens)
        if found.keys is None and tracked.keys is not None:
            # If the request's adapter has changed since it was tracked, no page of this group is saved.
            with suppress(CornplugError):
                found.keys = tracked.keys.with_root(self._requests.root_of(request, self._kind.geometry))
        return found

    def set_completing(self, ends: Sequence[tuple[TrackedRequest, int]]) -> None:
        """Set the requests that `find_completing` returns for this group in this step. `ends` is the result
        of `TrackedRequests.find_completing` for the step."""
        self._completing = ends

    def find_completing(
        self, scheduled_tokens: Mapping[str, int], total: int
    ) -> list[tuple[TrackedRequest, int]]:
        """Return the requests that may complete a page in this step, each with its number of computed tokens
        after the step. The arguments are ignored."""
        return [(self.state_of(tracked), end) for tracked, end in self._completing]

    def schedule_check(self, tracked: TrackedRequest) -> None:
        """Check the request for a completed page in the next step that schedules it."""
        self._requests.schedule_check(tracked)

    def forget(self, tracked: TrackedRequest) -> None:
        """Remove the record of a request's pages in this cache group."""
        if self.find_state(tracked) is not None:
            del self._tracked[tracked.request.request_id]


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

    def _create_page_saves(self, pages: list[tuple[PendingPage, Reservation]]) -> list[PageSave]:
        if not self._open[pages[0][1].token].is_pinned:
            return super()._create_page_saves(pages)
        # Either a page is a multiple of a block or a block is a multiple of a page.
        per_unit = max(1, self._block_size // self._page.page_tokens)
        writes, blocks = [], []
        name = save_name(pages[0][0].tracked.request.request_id, pages[0][1])
        for place, (page, reservation) in enumerate(pages):
            writes.append(
                PageWrite(place * per_unit + page.index % per_unit, reservation.token, reservation.location)
            )
            blocks += [block.block_id for block in page.blocks]
            self._open[reservation.token].name = name
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
