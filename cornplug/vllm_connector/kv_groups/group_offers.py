"""Loads of KV pages of several cache groups. A prefix counts only if the store has it for every group."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from cornplug.engine_common.page_envelope import whole_pages
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.kv_page import pages_between
from cornplug.metrics import Tally
from cornplug.store.leases import Leases
from cornplug.vllm_connector.kv.costs import LoadCosts
from cornplug.vllm_connector.kv.deferred_ops import DeferredStoreOps
from cornplug.vllm_connector.kv.load_offers import LeasedPages, LoadOffers
from cornplug.vllm_connector.kv.metadata import PageLoad
from cornplug.vllm_connector.kv.page_keys import PageKeys
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest
from cornplug.vllm_connector.kv_groups.group_requests import GroupRequests
from cornplug.vllm_connector.kv_groups.page_kinds import PageKind

_MOST_BEHIND: Final = 64
"""Maximum number of shorter hits whose windows one query covers."""


class GroupOffers(LoadOffers):
    """Load offers of one scheduler half. A hit that ends at token n consists of all pages of full attention
    before n, for each windowed group the pages of the window before n, and for each group of states the page
    at n."""

    def __init__(
        self,
        runtime: EngineRuntime,
        kinds: Sequence[PageKind],
        groups: Sequence[GroupRequests],
        tally: Tally,
        costs: LoadCosts,
        store_ops: DeferredStoreOps,
    ) -> None:
        self._first = next(i for i, kind in enumerate(kinds) if kind.whole)
        super().__init__(runtime, kinds[self._first].geometry, tally, costs, store_ops)
        self._kinds, self._groups = kinds, groups
        self._null_block = 0

    def bind(self, null_block: int) -> None:
        """Set the number of the null block, which replaces blocks that vLLM does not keep."""
        self._null_block = null_block

    def _look_up(self, tracked: TrackedRequest, offer: LeasedPages) -> None:
        request, size = tracked.request, self._page.page_tokens
        assert tracked.keys is not None
        keys = [group.of(tracked).keys for group in self._groups]
        if None in keys:
            return
        named = [one for one in keys if one is not None]
        # The last token is always computed, because the next token is sampled from its output.
        wanted = pages_between(offer.computed, request.num_tokens - 1, size)
        end = tracked.keys.pages(request.num_tokens - 1)
        for kind, own in zip(self._kinds, named, strict=True):
            if kind.whole:
                pages = range(wanted.start, max(wanted.start, end))
                end = wanted.start + len(self._stored(tracked, own, pages))
        absent_pages = range(max(end, wanted.start), tracked.keys.pages(request.num_tokens - 1))
        if self._seek(
            tracked, absent_pages, lambda pages: self._keys_of(tracked, [pages] * len(named), named)
        ):
            return
        end = self._end_with_tails(tracked, offer.computed, end, named)
        if self._recall_groups(tracked, offer.computed, end, named):
            return
        if (absent := wanted.stop - max(end, wanted.start)) > 0:
            self._count_misses("absent", absent)
        if end > wanted.start:
            self._lease(tracked, offer, end, named)

    def _pages(self, kind: PageKind, computed: int, end: int) -> range:
        """Pages of a kind that a hit of `end` pages loads after `computed` tokens."""
        size = self._page.page_tokens
        return range(max(computed, kind.needed_from(end * size)) // size, end)

    def _recall_groups(
        self, tracked: TrackedRequest, computed: int, end: int, keys: Sequence[PageKeys]
    ) -> bool:
        """Call `_recall` for the pages of all groups of a hit of `end` pages."""
        tokens = end * self._page.page_tokens - computed
        if tokens <= 0 or not self._may_recall(tracked):
            return False
        ranges = [self._pages(kind, computed, end) for kind in self._kinds]
        wanted = self._keys_of(tracked, ranges, keys)
        return self._recall(tracked, wanted, tokens=tokens, pages=self._as_pages(ranges))

    def _keys_of(
        self, tracked: TrackedRequest, ranges: Sequence[range], keys: Sequence[PageKeys]
    ) -> list[bytes]:
        """Keys of these pages of all groups."""
        token_ids = tracked.request.all_token_ids
        return [key for own, pages in zip(keys, ranges, strict=True) for key in own.of(token_ids, pages)]

    def _end_with_tails(
        self, tracked: TrackedRequest, computed: int, end: int, keys: Sequence[PageKeys]
    ) -> int:
        """Largest number of pages, at most `end`, before which the store has each group's window or state, or
        0.

        No page is queried twice. Each query covers the tails of twice as many shorter hits as the previous
        one, because states are stored where an engine's steps ended, which may be many pages apart.
        """
        end_s = time.monotonic() + self._run.config.store.deadline_s
        present: dict[tuple[int, int], int] = {}
        behind = 0
        while end * self._page.page_tokens > computed:
            needed = self._tails(computed, end)
            if any(place not in present for place in needed):
                asked = [place for place in self._tails(computed, end, behind) if place not in present]
                wanted = [keys[group].of(tracked.request.all_token_ids, [page])[0] for group, page in asked]
                there = self._there(tracked, wanted, max(0.0, end_s - time.monotonic()))
                present |= zip(asked, there, strict=True)
                behind = min(2 * behind + 1, _MOST_BEHIND)
            # A later end whose tail begins after the first absent page would also be after this page.
            absent = [page for group, page in needed if not present[group, page]]
            if not absent:
                return end
            end = min(absent)
        return 0

    def _tails(self, computed: int, end: int, behind: int = 0) -> list[tuple[int, int]]:
        """(group, page) pairs that a hit of `end` pages, or of up to `behind` fewer pages, needs from groups
        that need only a tail."""
        return [
            (group, page)
            for group, kind in enumerate(self._kinds)
            if not kind.whole
            for page in range(self._pages(kind, computed, max(0, end - behind)).start, end)
        ]

    def _lease(self, tracked: TrackedRequest, offer: LeasedPages, end: int, keys: Sequence[PageKeys]) -> None:
        """Lease and offer all pages of a hit of `end` pages, or none."""
        config = self._run.config.store
        ranges = [self._pages(kind, offer.computed, end) for kind in self._kinds]
        if not self._costs.pays(
            tokens=end * self._page.page_tokens - offer.computed, pages=self._as_pages(ranges)
        ):
            self._count_misses("cheaper", len(ranges[self._first]))
            tracked.saved_until(end)
            return
        wanted = self._keys_of(tracked, ranges, keys)
        leases = self._run.store.lease(wanted, ttl_s=config.lease_s, deadline_s=config.deadline_s)
        if None in leases.metas or self._before.leading_since(leases) < len(leases):
            self._count_misses("absent", len(ranges[self._first]))
        elif self._whole(ranges, leases):
            ends = list(accumulate(map(len, ranges)))
            offer.groups = [
                (pages.start, leases[end - len(pages) : end]) for pages, end in zip(ranges, ends, strict=True)
            ]
            offer.first_page, offer.pages = offer.groups[self._first]
            offer.tokens = leases.held
            return
        self._store_ops.release(leases.held)

    def _whole(self, ranges: Sequence[range], leases: Leases) -> bool:
        """Return whether the leased pages of all groups have valid headers."""
        at = 0
        for kind, pages in zip(self._kinds, ranges, strict=True):
            mine = leases[at : at + len(pages)]
            whole, error = whole_pages(mine, kind.geometry)
            if error is not None:
                self._count_misses(error.reason)
                if error.is_damage:
                    self._store_ops.delete(mine.keys[whole])
                return False
            at += len(pages)
        return True

    def _as_pages(self, ranges: Sequence[range]) -> int:
        """Number of pages of the whole model with the same size as these pages of its groups."""
        sizes = [kind.geometry.page_bytes for kind in self._kinds]
        loaded = sum(size * len(pages) for size, pages in zip(sizes, ranges, strict=True))
        return -(-loaded // sum(sizes))

    def take_groups(self, tracked: TrackedRequest, blocks: Sequence[Sequence[int]], external: int) -> None:
        """Record that the engine accepted the offer and loads `external` tokens into these blocks of each
        group. 0 means that it declined."""
        offer = tracked.offer
        if offer is None:
            return
        if not external:
            self.withdraw(tracked)
            return
        tracked.offer, tracked.loading = None, offer
        offer.end = offer.computed + external
        # Another end needs other pages of windows and states.
        whole = offer.end == (offer.first_page + len(offer.pages)) * self._page.page_tokens
        request_id = tracked.request.request_id
        loads = []
        for i, (kind, (first, pages)) in enumerate(zip(self._kinds, offer.groups, strict=True)):
            start = max(offer.computed, kind.needed_from(offer.end))
            held = blocks[i][start // kind.block_size : -(-offer.end // kind.block_size)]
            whole = (
                whole and len(held) * kind.block_size >= offer.end - start and self._null_block not in held
            )
            loads.append(PageLoad(request_id, start, offer.end, first, pages, array("q", blocks[i]), group=i))
        # A load with an expired deadline fails, and the request is computed.
        deadline_s = self._costs.deadline_s(external) if whole else -1.0
        self._costs.load_began(request_id, self._as_pages([range(len(pages)) for _, pages in offer.groups]))
        self._taken += [replace(load, deadline_s=deadline_s) for load in loads]
        for group in self._groups:
            group.of(tracked).saved_until(offer.end // self._page.page_tokens)
