"""Scheduler half of the KV connector for a model with several cache groups.

A prefix is loaded only if the store has its pages for every cache group. Recurrent states are saved only at
the ends of blocks.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import msgspec

from cornplug.engine_common.rank_pages import whole_pages
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.kv_page import pages_between
from cornplug.metrics import Tally
from cornplug.store.base import Leases
from cornplug.store.payload import LEASE_S
from cornplug.vllm_connector.kv.costs import LoadCosts
from cornplug.vllm_connector.kv.idle_saves import IdleSaves
from cornplug.vllm_connector.kv.load_offers import LeasedPages, LoadOffers
from cornplug.vllm_connector.kv.metadata import CornplugKVMetadata, PageLoad, PageSave
from cornplug.vllm_connector.kv.open_saves import DeferredStoreOps
from cornplug.vllm_connector.kv.page_keys import PageKeys
from cornplug.vllm_connector.kv.page_kinds import PageKind, whole_page
from cornplug.vllm_connector.kv.page_saves import PageSaves
from cornplug.vllm_connector.kv.scheduler import SchedulerHalf
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest
from cornplug.vllm_connector.kv.window_saves import GroupRequests, WindowSaves

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request


_MOST_BEHIND: Final = 64
"""A query for the tails of a hit also covers hits that are up to this many pages shorter, so that these hits
need no further query."""


class StateSaves(WindowSaves):
    """Saves the pages of one cache group of recurrent states.

    A request's block may hold the state after any token. Only blocks that vLLM's own prefix cache identifies
    by the hash of all tokens up to the block's end are saved. vLLM assigns this hash when it schedules the
    step that computes the state, and no later step writes to the block. Most blocks have no hash, because a
    prefill keeps only the state after the last token of each step.
    """

    def blocks_of(
        self, tracked: TrackedRequest, index: int, table: Sequence[KVCacheBlock]
    ) -> Sequence[KVCacheBlock] | None:
        """Return the block that holds the recurrent state at the end of page `index`, or None if vLLM does
        not cache it."""
        block = self._cached(tracked, index)
        return None if block is None else [block]


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
        self._first = next(i for i, kind in enumerate(kinds) if kind.whole)
        super().__init__(runtime, kinds[self._first].geometry, tally, costs, store_ops)
        self._kinds, self._groups = kinds, groups
        self._null_block = 0

    def bind(self, null_block: int) -> None:
        """Set the id of vLLM's null block, which stands for blocks that vLLM does not keep."""
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
        """Return the indices of pages of this kind that must be loaded for a hit of `end` pages if the engine
        already has the first `computed` tokens."""
        size = self._page.page_tokens
        return range(max(computed, kind.needed_from(end * size)) // size, end)

    def _recall_groups(
        self, tracked: TrackedRequest, computed: int, end: int, keys: Sequence[PageKeys]
    ) -> bool:
        """Read from disk the pages that a hit of `end` pages needs in all cache groups, if necessary. Returns
        True if the caller must end the lookup (see `_recall`)."""
        tokens = end * self._page.page_tokens - computed
        if tokens <= 0 or not self._may_recall(tracked):
            return False
        ranges = [self._pages(kind, computed, end) for kind in self._kinds]
        wanted = self._keys_of(tracked, ranges, keys)
        return self._recall(tracked, wanted, tokens=tokens, pages=self._as_pages(ranges))

    def _keys_of(
        self, tracked: TrackedRequest, ranges: Sequence[range], keys: Sequence[PageKeys]
    ) -> list[bytes]:
        """Return the keys of these pages. `ranges` and `keys` have one item per cache group."""
        token_ids = tracked.request.all_token_ids
        return [key for own, pages in zip(keys, ranges, strict=True) for key in own.of(token_ids, pages)]

    def _end_with_tails(
        self, tracked: TrackedRequest, computed: int, end: int, keys: Sequence[PageKeys]
    ) -> int:
        """Return the length in pages of the longest hit, at most `end`, for which the store also has each
        group's window or state. Returns 0 if there is no such hit.

        The store is not queried twice for a page. Each query covers the tails of twice as many shorter hits
        as the previous query, because states are stored where an engine's steps ended, which may be many
        pages apart.
        """
        end_s = time.monotonic() + self._run.config.store.deadline_s
        present_of = self._presence(tracked)
        present: dict[tuple[int, int], int] = {}
        behind = 0
        while end * self._page.page_tokens > computed:
            needed = self._tails(computed, end)
            if any(place not in present for place in needed):
                asked = [place for place in self._tails(computed, end, behind) if place not in present]
                wanted = [keys[group].of(tracked.request.all_token_ids, [page])[0] for group, page in asked]
                there = present_of(wanted, deadline_s=max(0.0, end_s - time.monotonic()))
                present |= zip(asked, there, strict=True)
                behind = min(2 * behind + 1, _MOST_BEHIND)
            # Every hit that ends after the first absent page and up to `end` would also need that page.
            absent = [page for group, page in needed if not present[group, page]]
            if not absent:
                return end
            end = min(absent)
        return 0

    def _tails(self, computed: int, end: int, behind: int = 0) -> list[tuple[int, int]]:
        """Return (group, page) for each page that windowed and state groups need for a hit of `end` pages,
        and for hits that are up to `behind` pages shorter."""
        return [
            (group, page)
            for group, kind in enumerate(self._kinds)
            if not kind.whole
            for page in range(self._pages(kind, computed, max(0, end - behind)).start, end)
        ]

    def _lease(self, tracked: TrackedRequest, offer: LeasedPages, end: int, keys: Sequence[PageKeys]) -> None:
        """Lease all pages of a hit of `end` pages and add them to the offer, or add none if any page is
        absent or damaged."""
        config = self._run.config.store
        ranges = [self._pages(kind, offer.computed, end) for kind in self._kinds]
        if not self._costs.pays(
            tokens=end * self._page.page_tokens - offer.computed, pages=self._as_pages(ranges)
        ):
            self._count_misses("cheaper", len(ranges[self._first]))
            tracked.saved_until(end)
            return
        wanted = self._keys_of(tracked, ranges, keys)
        leases = self._run.store.lease(wanted, ttl_s=LEASE_S, deadline_s=config.deadline_s)
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
        """Return whether the leased pages of all cache groups have valid headers."""
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
        """Convert these pages of the cache groups to a number of pages of the complete model with the same
        total size, rounded up."""
        sizes = [kind.geometry.page_bytes for kind in self._kinds]
        loaded = sum(size * len(pages) for size, pages in zip(sizes, ranges, strict=True))
        return -(-loaded // sum(sizes))

    def take_groups(self, tracked: TrackedRequest, blocks: Sequence[Sequence[int]], external: int) -> None:
        """Handle the engine's decision about an offer. The engine loads `external` tokens into `blocks`, one
        list per cache group, or has declined the offer if `external` is 0."""
        offer = tracked.offer
        if offer is None:
            return
        if not external:
            self.withdraw(tracked)
            return
        tracked.offer, tracked.loading = None, offer
        offer.end = offer.computed + external
        # If the engine loads only a part of the offer, it needs window and state pages that were not offered.
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
        # A load with an expired deadline fails, and the engine computes the tokens instead.
        deadline_s = self._costs.deadline_s(external) if whole else -1.0
        self._costs.load_began(request_id, self._as_pages([range(len(pages)) for _, pages in offer.groups]))
        self._taken += [replace(load, deadline_s=deadline_s) for load in loads]
        for group in self._groups:
            group.of(tracked).saved_until(offer.end // self._page.page_tokens)


@dataclass(frozen=True, slots=True)
class _Group:
    """The page kind of one cache group, and the objects that save its pages."""

    kind: PageKind
    requests: GroupRequests
    saves: PageSaves
    idle: IdleSaves


def _saves_of(kind: PageKind) -> type[PageSaves]:
    if kind.whole:
        return PageSaves
    return StateSaves if kind.geometry.state else WindowSaves


class GroupsScheduler(SchedulerHalf):
    """Scheduler half of the KV connector for a model with several cache groups. It loads the pages of all
    groups together and saves the pages of each group separately. There is one instance per engine core."""

    def __init__(
        self, config: VllmConfig, runtime: EngineRuntime, kinds: Sequence[PageKind], tally: Tally
    ) -> None:
        first = next(kind for kind in kinds if kind.whole)
        super().__init__(config, runtime, first.geometry, tally, whole=whole_page(kinds))
        size = sum(kind.geometry.page_bytes for kind in kinds)
        self._groups = [self._group(runtime, kind, kind.geometry.page_bytes / size) for kind in kinds]
        self._all_saves = [group.saves for group in self._groups]
        views = [group.requests for group in self._groups]
        self._group_offers = GroupOffers(runtime, kinds, views, tally, self._costs, self._store_ops)
        self._offers = self._group_offers

    def _group(self, runtime: EngineRuntime, kind: PageKind, share: float) -> _Group:
        requests = GroupRequests(self._requests, kind)
        seen = runtime.config.engine.save == "second"
        publisher = self._publisher(runtime, kind.geometry, share, only_seen=seen)
        saves = _saves_of(kind)(
            runtime, kind.geometry, requests, publisher, DeferredStoreOps(runtime, publisher), share
        )
        unseen = self._publisher(runtime, kind.geometry, share)
        return _Group(kind, requests, saves, IdleSaves(runtime, kind.geometry, requests, saves, unseen))

    def bind(self, manager: KVCacheManager, specs: Sequence[KVCacheSpec]) -> None:
        """Set the engine's KV cache manager, which is used to look up a request's blocks. `specs` has one
        `KVCacheSpec` per cache group."""
        self._group_offers.bind(manager.block_pool.null_block.block_id)
        # KV events cover only full attention, as in vLLM's own offloading.
        first = next(i for i, group in enumerate(self._groups) if group.kind.whole)
        whole = self._groups[first]
        self._announce(manager.block_pool, specs[first], first, whole.saves, whole.idle)
        for i, group in enumerate(self._groups):
            group.saves.bind(manager, group.kind.block_size, i)
            group.idle.bind(manager.block_pool, group.kind.block_size)

    def matched_tokens(self, request: Request, computed: int) -> int | None:
        """Return the number of tokens after the first `computed` tokens that can be loaded from the store.
        Returns None if vLLM should call this method again later: while pages are read from disk, and once
        after a failed load. vLLM calls this often. Most calls need no message to the store."""
        tracked = self._admitted(request, computed)
        if self._gives_way(tracked):
            return None
        if tracked.keys is None:
            return 0
        end = computed // self._page_tokens * self._page_tokens
        for group in self._groups:
            # For tokens that are already in the engine's own cache, later requests need only the window or
            # the state before the end. Earlier pages are not worth saving.
            if not group.kind.whole:
                group.requests.of(tracked).saved_until(group.kind.needed_from(end) // self._page_tokens)
        if request.skip_reading_prefix_cache or not self._requests.sharing or not self._may_load(tracked):
            return 0
        return self._offers.tokens(tracked, computed)

    def _drop_saves(self, before: Sequence[TrackedRequest]) -> None:
        for group in self._groups:
            found = [group.requests.get(tracked.request) for tracked in before]
            group.saves.drop([pages for pages in found if pages is not None])
            group.idle.forget()

    def allocated(self, request: Request, blocks: Sequence[Sequence[int]], external: int) -> None:
        """Handle vLLM's block allocation for a request. vLLM loads `external` tokens into `blocks`, one list
        per cache group, or has declined the offer if `external` is 0."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            self._group_offers.take_groups(tracked, blocks, external)

    def moves(self, output: SchedulerOutput) -> CornplugKVMetadata:
        """Return the message for the worker halves, with the loads and saves of the step that was just
        scheduled."""
        self._drop_replaced()
        moves = CornplugKVMetadata(loads=self._offers.new_loads())
        preempted = [self._requests.get(request_id) for request_id in output.preempted_req_ids or ()]
        for group in self._groups:
            moves.given_up += group.saves.lost()
            for tracked in preempted:
                pages = group.requests.get(tracked.request) if tracked is not None else None
                if pages is not None:
                    moves.given_up += group.saves.give_up(pages)
            group.saves.take_answers()
        self._run_store_ops()
        moves.computes = output.total_num_scheduled_tokens > 0
        moves.timed = self._costs.time_step(output) if not self._requests.off else 0
        moves.saves = self._new_saves(output)
        return moves

    def _run_store_ops(self) -> None:
        for ops in (self._store_ops, *(group.saves.store_ops for group in self._groups)):
            if ops:
                ops.run()

    def _new_saves(self, output: SchedulerOutput) -> list[PageSave]:
        ends = self._requests.completing(output.num_scheduled_tokens, output.total_num_scheduled_tokens)
        found = []
        for i, group in enumerate(self._groups):
            group.requests.completed(ends)
            saves = group.saves.of_step(output) + group.idle.of_step(output)
            found += [msgspec.structs.replace(save, group=i) for save in saves]
        return found

    def _pages_of(self, request: Request) -> list[tuple[_Group, TrackedRequest]]:
        """Return (group, record of the request's pages in the group) for each cache group that tracks the
        request."""
        found = [(group, group.requests.get(request)) for group in self._groups]
        return [(group, tracked) for group, tracked in found if tracked is not None]

    def _computes_again(self, tracked: TrackedRequest) -> None:
        super()._computes_again(tracked)
        if tracked.loading is not None:
            for _, pages in self._pages_of(tracked.request):
                pages.save_again_from(tracked.loading.computed // self._page_tokens)

    def finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> None:
        """Handle the end of a request. `blocks` has one list per cache group. vLLM frees these blocks after
        this call, or after the request's load has ended."""
        self._drop_replaced()
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        self._offers.withdraw(tracked)
        if tracked.loading is not None:
            return
        end = self._requests.last_end(tracked)
        for group in self._groups if end else ():
            group.saves.offer_last(group.requests.of(tracked), end)
        for group, pages in self._pages_of(request):
            group.idle.remember(pages, self._kept(group, pages, blocks))
            group.saves.let_go(pages)
        self._forget(tracked)

    def _kept(self, group: _Group, pages: TrackedRequest, blocks: Sequence[Sequence[int]]) -> Sequence[int]:
        """Return the ids of a request's blocks in one cache group, including blocks that the request has
        released and that vLLM still caches."""
        held = blocks[self._groups.index(group)]
        return group.saves.kept(pages, held) if isinstance(group.saves, WindowSaves) else held

    def _forget(self, tracked: TrackedRequest) -> None:
        for group in self._groups:
            group.requests.forget(tracked.request)
        super()._forget(tracked)

    def saves_open(self) -> bool:
        """Return whether the engine must continue to run steps, to receive acknowledgements or to save pages
        while it is idle."""
        return bool(
            self._requests.gathering
            or self._store_ops
            or any(group.saves or group.saves.store_ops or group.idle for group in self._groups)
            or (self.events is not None and self.events.waits)
        )

    def frees_pending(self) -> bool:
        """Return whether blocks are kept for saves in progress and will be freed when the worker halves
        acknowledge these saves."""
        return any(group.saves.pinned for group in self._groups if isinstance(group.saves, WindowSaves))
