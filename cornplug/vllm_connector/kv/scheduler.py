"""Scheduler half of the KV connector, which decides what to load and save. Its methods are in the order in
which vLLM calls them for a request.

Most models have one cache group. A model with several cache groups loads a prefix only if the store has its
pages for every group, and saves the pages of each group separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cornplug.engine_common import engine_state, lora_digests
from cornplug.engine_common.page_publish import EntryCost, PagePublisher
from cornplug.engine_common.runtime import KV_PAGE, EngineRuntime
from cornplug.kv_page import PageGeometry
from cornplug.metrics import Tally
from cornplug.vllm_connector.kv.cache_groups import GroupOffers, GroupRequests, StateSaves, WindowSaves
from cornplug.vllm_connector.kv.costs import LoadCosts
from cornplug.vllm_connector.kv.idle_saves import IdleSaves
from cornplug.vllm_connector.kv.load_offers import LoadOffers
from cornplug.vllm_connector.kv.metadata import CornplugKVMetadata, CornplugKVWorkerMetadata, PageLoad
from cornplug.vllm_connector.kv.open_saves import DeferredStoreOps
from cornplug.vllm_connector.kv.page_events import create_page_events
from cornplug.vllm_connector.kv.page_kinds import PageKind, combined_page_size
from cornplug.vllm_connector.kv.page_saves import PageSaves, SavingRequests
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest, TrackedRequests

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class _Group:
    """The page kind of one cache group, and the objects that save its pages."""

    kind: PageKind
    requests: SavingRequests
    saves: PageSaves
    idle: IdleSaves


class KVScheduler:
    """Scheduler half of the KV connector. There is one instance per engine core. Every call to the store has
    a deadline."""

    def __init__(
        self, config: VllmConfig, runtime: EngineRuntime, kinds: Sequence[PageKind], tally: Tally
    ) -> None:
        """Create the scheduler half. `kinds` has one page kind per cache group."""
        self._first_full_group = next(i for i, kind in enumerate(kinds) if kind.needs_all_pages)
        """Index of the first cache group of full attention."""
        page, whole = kinds[self._first_full_group].geometry, combined_page_size(kinds)
        self._app, self._page_tokens = runtime.app, page.page_tokens
        self._tally = tally
        self._costs = LoadCosts(runtime.config.store, whole)
        self._store_ops = DeferredStoreOps(runtime, self._create_publisher(runtime, page))
        self._requests = TrackedRequests(config, runtime, page, tally)
        self._group_requests = (
            [GroupRequests(self._requests, kind) for kind in kinds] if len(kinds) > 1 else []
        )
        """The requests as each cache group tracks them. Empty if there is one group, which uses `_requests`
        itself."""
        views: Sequence[SavingRequests] = self._group_requests if self._group_requests else [self._requests]
        self._groups = [
            self._create_group(runtime, kind, view, kind.geometry.page_bytes / whole.page_bytes)
            for kind, view in zip(kinds, views, strict=True)
        ]
        self._tail_groups = [group for group in self._groups if not group.kind.needs_all_pages]
        """Groups of which a request needs only the last pages of a prefix."""
        group_ops = [group.saves.store_ops for group in self._groups]
        self._all_store_ops = [self._store_ops, *group_ops] if self._group_requests else group_ops
        self._offers = (
            GroupOffers(runtime, kinds, self._group_requests, tally, self._costs, self._store_ops)
            if self._group_requests
            else LoadOffers(runtime, page, tally, self._costs, self._store_ops)
        )
        self._epoch_word = engine_state.current().epoch_word
        self.events = create_page_events(config, runtime, self._requests)
        """KV events for the store's pages, or None if the engine does not publish KV events."""
        self._detached_requests: dict[str, TrackedRequest] = {}
        """Finished requests whose pages are still being loaded, by request id. Another request may already
        use the same id."""

    def _create_group(
        self, runtime: EngineRuntime, kind: PageKind, requests: SavingRequests, share: float
    ) -> _Group:
        page, seen = kind.geometry, runtime.config.engine.save == "second"
        publisher = self._create_publisher(runtime, page, share, only_seen=seen)
        # With one group, the operations of saves and load offers are sent together.
        ops = DeferredStoreOps(runtime, publisher) if self._group_requests else self._store_ops
        saves_class: type[PageSaves] = PageSaves
        if not kind.needs_all_pages:
            saves_class = StateSaves if page.state else WindowSaves
        saves = saves_class(runtime, page, requests, publisher, ops, share)
        unseen = self._create_publisher(runtime, page, share)
        return _Group(kind, requests, saves, IdleSaves(runtime, page, requests, saves, unseen))

    def _create_publisher(
        self, runtime: EngineRuntime, page: PageGeometry, share: float = 1.0, *, only_seen: bool = False
    ) -> PagePublisher:
        """Create a publisher for pages of this geometry. `share` is the fraction of the cost of computing the
        pages' tokens that is attributed to these pages."""
        return PagePublisher(
            runtime,
            page,
            self._tally,
            deadline_s=runtime.deadline_s,
            only_seen=only_seen,
            cost=EntryCost(self._costs.page_cost, share),
        )

    def bind(self, manager: KVCacheManager, specs: Sequence[KVCacheSpec]) -> None:
        """Set the engine's KV cache manager, which is used to look up a request's blocks. `specs` has one
        `KVCacheSpec` per cache group."""
        if isinstance(self._offers, GroupOffers):
            self._offers.bind(manager.block_pool.null_block.block_id)
        for i, (group, spec) in enumerate(zip(self._groups, specs, strict=True)):
            group.saves.bind(manager, spec.block_size, i)
            group.idle.bind(manager.block_pool, spec.block_size)
        if self.events is not None:
            # KV events cover only full attention, as in vLLM's own offloading.
            first = self._groups[self._first_full_group]
            self.events.bind(
                manager.block_pool, specs[self._first_full_group], self._first_full_group, self._page_tokens
            )
            self._offers.events = first.saves.events = first.idle.events = self.events

    def on_other_connector_load(self) -> None:
        """Record that another connector loads KV, so the engine's own prefix cache will contain KV of unknown
        origin."""
        self._requests.other_loads.record_load()

    def forget_stored(self) -> None:
        """Ignore pages that were stored before this call."""
        self._offers.forget_stored(self._requests.list_all())
        if self.events is not None:
            self.events.forget_stored()

    def _drop_replaced(self) -> None:
        """Drop offers and pending saves of KV that was computed with weights or adapters that have been
        replaced since the last call."""
        if self._epoch_word[0] != self._requests.epoch:
            self._begin_epoch()
        if lora_digests.reread_count() != self._requests.reread_count:
            self._drop_requests(self._requests.handle_reread())

    def _begin_epoch(self) -> None:
        """Drop offers and pending saves of KV that was computed with the weights before an update."""
        self._drop_requests(self._requests.handle_update())
        if self.events is not None:
            self.events.on_weights_replaced()

    def _drop_requests(self, requests: Sequence[TrackedRequest]) -> None:
        """Drop the offers and pending saves of these requests, and the pending saves of all finished
        requests."""
        for tracked in requests:
            self._offers.withdraw(tracked)
        for group in self._groups:
            found = [group.requests.find_state(tracked) for tracked in requests]
            group.saves.drop_pending([pages for pages in found if pages is not None])
            group.idle.clear()

    def matched_tokens(self, request: Request, computed: int) -> int | None:
        """Return the number of tokens after the first `computed` tokens that can be loaded from the store.
        Returns None if vLLM should call this method again later: while pages are read from disk, and once
        after a failed load. vLLM calls this often. Most calls need no message to the store."""
        self._drop_replaced()
        tracked = self._requests.track(request)
        if tracked.own_tokens is not None:
            tracked.own_tokens.record_admission(computed if self._requests.can_trust_cache(request) else 0)
        if tracked.skip_once:
            tracked.skip_once = False
            return None
        if tracked.keys is None:
            return 0
        for group in self._tail_groups:
            # For tokens that are already in the engine's own cache, later requests need only the window or
            # the state before the end. Earlier pages are not worth saving.
            end = computed // self._page_tokens * self._page_tokens
            group.requests.state_of(tracked).mark_saved_until(
                group.kind.first_needed_token(end) // self._page_tokens
            )
        if request.skip_reading_prefix_cache or not self._requests.is_sharing or not self._can_load(tracked):
            return 0
        return self._offers.offered_tokens(tracked, computed)

    def _can_load(self, tracked: TrackedRequest) -> bool:
        """Return whether pages may be loaded for the request. No pages may be loaded while a finished request
        with the same id is still loading, because vLLM could not distinguish the ends of the two loads."""
        if tracked.request.request_id not in self._detached_requests:
            return True
        if not tracked.load_failed:
            tracked.load_failed = True
            self._tally.count("cornplug_misses_total", self._app, KV_PAGE, "id_in_use")
        return False

    def handle_allocation(
        self, request: Request, blocks: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """Handle vLLM's block allocation for a request. vLLM loads `external_tokens` tokens into `blocks`,
        one list per cache group, or has declined the offer if `external_tokens` is 0."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            self._offers.handle_allocation(tracked, blocks, external_tokens)

    def build_metadata(self, output: SchedulerOutput) -> CornplugKVMetadata:
        """Return the message for the worker halves, with the loads and saves of the step that was just
        scheduled."""
        self._drop_replaced()
        moves = CornplugKVMetadata(loads=self._offers.take_new_loads())
        for group in self._groups:
            moves.cancelled_saves += group.saves.take_lost_saves()
            for request_id in output.preempted_req_ids or ():
                tracked = self._requests.get(request_id)
                pages = group.requests.find_state(tracked) if tracked is not None else None
                if pages is not None:
                    moves.cancelled_saves += group.saves.cancel_saves(pages)
            group.saves.process_replies()
        for ops in self._all_store_ops:
            if ops:
                ops.run()
        moves.computes = output.total_num_scheduled_tokens > 0
        moves.timed_step = self._costs.time_step(output) if not self._requests.disabled_reason else 0
        if self._group_requests:
            ends = self._requests.find_completing(
                output.num_scheduled_tokens, output.total_num_scheduled_tokens
            )
            for view in self._group_requests:
                view.set_completing(ends)
        for group in self._groups:
            moves.saves += group.saves.saves_for_step(output)
            moves.saves += group.idle.saves_for_step(output)
        return moves

    def handle_acks(self, acks: CornplugKVWorkerMetadata) -> None:
        """Process the worker halves' acknowledgements of loads and saves in earlier steps."""
        self._costs.handle_acks(acks)
        self._requests.unusable_reason = self._requests.unusable_reason or acks.unusable_reason
        for request_id, reason in acks.failed_loads.items():
            detached = self._detached_requests.get(request_id)
            tracked = detached or self._requests.get(request_id)
            self._offers.record_failed_load(tracked, reason)
            if tracked is not None:
                self._prepare_recompute(tracked)
        if acks.staged_pages:
            self._tally.count("cornplug_staged_pages_total", self._app, amount=acks.staged_pages)
        if acks.loaded_bytes:
            self._tally.count("cornplug_bytes_total", self._app, KV_PAGE, "load", amount=acks.loaded_bytes)
        for group in self._groups:
            group.saves.handle_acks(acks)

    def _prepare_recompute(self, tracked: TrackedRequest) -> None:
        """Check a request for completed pages in its next step, after a failed load. The request now computes
        pages that the store may have lost, so these pages are offered to the store again."""
        self._requests.schedule_check(tracked)
        if tracked.loading is not None:
            for _, pages in self._group_states_of(tracked):
                pages.save_again_from(tracked.loading.computed // self._page_tokens)

    def _group_states_of(self, tracked: TrackedRequest) -> list[tuple[_Group, TrackedRequest]]:
        """Return (group, record of the request's pages in the group) for each cache group that tracks the
        request."""
        found = [(group, group.requests.find_state(tracked)) for group in self._groups]
        return [(group, pages) for group, pages in found if pages is not None]

    def end_load(self, request_id: str) -> None:
        """Record that the worker halves have ended the load of the request with this id, successfully or
        not."""
        if request_id in self._detached_requests:
            self._offers.end_load(self._detached_requests.pop(request_id))
            return
        tracked = self._requests.get(request_id)
        if tracked is not None:
            self._offers.end_load(tracked)
            if tracked.request.is_finished():
                self._forget(tracked)

    def record_step_end(self) -> None:
        """Record that the engine has read the output of a step."""
        self._costs.record_step_end()

    def detach_load(self, request: Request) -> bool:
        """Let the load of a finished request complete after vLLM has removed the request. Returns False if
        the request has no load in flight."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request or tracked.loading is None:
            return False
        self._detached_requests[request.request_id] = tracked
        self._forget(tracked)
        return True

    def finish_request(self, request: Request, blocks: Sequence[Sequence[int]]) -> None:
        """Handle the end of a request. `blocks` has one list per cache group. vLLM frees these blocks after
        this call, or after the request's load has ended."""
        self._drop_replaced()
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        self._offers.withdraw(tracked)
        if tracked.loading is not None:
            # While the request's pages are being loaded, its blocks do not contain KV yet, and vLLM keeps the
            # blocks until the load has ended. Saves that are still open began before the request was
            # preempted, and are given up.
            return
        end = self._requests.final_computed_tokens(tracked)
        for group in self._groups if end else ():
            group.saves.offer_remaining(group.requests.state_of(tracked), end)
        for group, pages in self._group_states_of(tracked):
            group.idle.remember(pages, group.saves.known_block_ids(pages, blocks[group.saves.group]))
            group.saves.release_blocks(pages)
        self._forget(tracked)

    def _forget(self, tracked: TrackedRequest) -> None:
        for view in self._group_requests:
            view.forget(tracked)
        self._requests.forget(tracked)

    def has_pending_transfers(self) -> bool:
        """Return whether page copies or disk reads are in flight, so that the engine has to continue to run
        steps."""
        return self._costs.has_open_loads or self._offers.has_open_recall or self.has_open_saves()

    def has_open_saves(self) -> bool:
        """Return whether the engine must continue to run steps, to receive acknowledgements or to save pages
        while it is idle."""
        return bool(
            self._requests.has_gathered_requests
            or any(self._all_store_ops)
            or any(group.saves or group.idle for group in self._groups)
            or (self.events is not None and self.events.has_pending)
        )

    def has_pending_frees(self) -> bool:
        """Return whether blocks are kept for saves in progress and will be freed when the worker halves
        acknowledge these saves."""
        return any(group.saves.has_pinned_blocks for group in self._groups)

    def abandon(self) -> list[PageLoad]:
        """Release all blocks that are pinned for saves, because sharing has stopped. Returns the loads that
        the engine waits for and that were not sent to the worker halves."""
        for group in self._groups:
            group.saves.abandon()
        return self._offers.take_new_loads()
