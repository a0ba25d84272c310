"""Loading of KV pages of a model with several cache groups. A prefix is loaded only if the store has its
pages for every cache group."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from cornplug.engine_common.rank_pages import check_page_headers
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.kv_page import pages_between
from cornplug.metrics import Tally
from cornplug.store.base import Leases
from cornplug.store.payload import LEASE_S
from cornplug.vllm_connector.kv.costs import LoadCosts
from cornplug.vllm_connector.kv.group_requests import GroupRequests
from cornplug.vllm_connector.kv.load_offers import LeasedPages, LoadOffers
from cornplug.vllm_connector.kv.metadata import PageLoad
from cornplug.vllm_connector.kv.open_saves import DeferredStoreOps
from cornplug.vllm_connector.kv.page_keys import PageKeys
from cornplug.vllm_connector.kv.page_kinds import PageKind
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest

_MAX_SLACK_PAGES: Final = 64
"""A query for the tails of a hit also covers hits that are up to this many pages shorter, so that these hits
need no further query."""


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
        if self._query_far(
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

        The store is not queried twice for a page. Each query covers the tails of twice as many shorter hits
        as the previous query, because states are stored where an engine's steps ended, which may be many
        pages apart.
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
