"""Scheduler half of the KV connector, which decides what to load and save. Its methods are in the order in
which vLLM calls them for a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cornplug.engine_common import engine_state, lora_digests
from cornplug.engine_common.page_publish import EntryCost, PagePublisher
from cornplug.engine_common.runtime import KV_PAGE, EngineRuntime
from cornplug.kv_page import PageGeometry, PageSize
from cornplug.metrics import Tally
from cornplug.vllm_connector.kv.costs import LoadCosts
from cornplug.vllm_connector.kv.idle_saves import IdleSaves
from cornplug.vllm_connector.kv.load_offers import LoadOffers
from cornplug.vllm_connector.kv.metadata import CornplugKVMetadata, CornplugKVWorkerMetadata, PageLoad
from cornplug.vllm_connector.kv.open_saves import DeferredStoreOps
from cornplug.vllm_connector.kv.page_events import page_events
from cornplug.vllm_connector.kv.page_saves import PageSaves
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest, TrackedRequests

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request


class SchedulerHalf:
    """Base class of `KVScheduler` (one cache group) and `GroupsScheduler` (several cache groups). Every call
    to the store has a deadline."""

    def __init__(
        self,
        config: VllmConfig,
        runtime: EngineRuntime,
        page: PageGeometry,
        tally: Tally,
        *,
        whole: PageSize | None = None,
    ) -> None:
        """Create the scheduler half. `page` is the page geometry for full attention, from which page keys are
        computed. `whole` is the size of a page of all cache groups together, or None if there is one
        group."""
        self._app, self._page_tokens = runtime.app, page.page_tokens
        self._tally = tally
        self._costs = LoadCosts(runtime.config.store, whole or page)
        self._store_ops = DeferredStoreOps(runtime, self._publisher(runtime, page))
        self._requests = TrackedRequests(config, runtime, page, tally)
        self._epoch_word = engine_state.current().epoch_word
        self.events = page_events(config, runtime, self._requests)
        """KV events for the store's pages, or None if the engine does not publish KV events."""
        self._offers: LoadOffers
        self._all_saves: list[PageSaves]
        self._detached: dict[str, TrackedRequest] = {}
        """Finished requests whose pages are still being loaded, by request id. Another request may already
        use the same id."""

    def _publisher(
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
            cost=EntryCost(self._costs.page, share),
        )

    def forget_stored(self) -> None:
        """Ignore pages that were stored before this call."""
        self._offers.forget_stored(self._requests.all())
        if self.events is not None:
            self.events.forget_stored()

    def _drop_replaced(self) -> None:
        """Drop offers and pending saves of KV that was computed with weights or adapters that have been
        replaced since the last call."""
        if self._epoch_word[0] != self._requests.epoch:
            self._begin_epoch()
        if lora_digests.rereads() != self._requests.rereads:
            self._drop(self._requests.before_reread())

    def _begin_epoch(self) -> None:
        """Drop offers and pending saves of KV that was computed with the weights before an update."""
        self._drop(self._requests.before_update())
        if self.events is not None:
            self.events.weights_replaced()

    def _drop(self, before: Sequence[TrackedRequest]) -> None:
        for tracked in before:
            self._offers.withdraw(tracked)
        self._drop_saves(before)

    def _drop_saves(self, before: Sequence[TrackedRequest]) -> None:
        """Drop the pending saves of these requests and of all finished requests."""
        raise NotImplementedError

    def _announce(self, pool: BlockPool | None, spec: KVCacheSpec, group: int, *parts: Any) -> None:
        """Connect the load offers and `parts` to the KV events, if enabled, for the pages of one cache
        group."""
        if self.events is not None:
            self.events.bind(pool, spec, group, self._page_tokens)
            for part in (self._offers, *parts):
                part.events = self.events

    def another_connector_loads(self) -> None:
        """Record that another connector loads KV, so the engine's own prefix cache will contain KV of unknown
        origin."""
        self._requests.other_loads.seen()

    def waits(self) -> bool:
        """Return whether page copies or disk reads are in flight, so that the engine has to continue to run
        steps."""
        return self._costs.loads_open or self._offers.recall_open or self.saves_open()

    def saves_open(self) -> bool:
        """Return whether the engine must continue to run steps, to receive acknowledgements or to save pages
        while it is idle."""
        raise NotImplementedError

    def acknowledged(self, acks: CornplugKVWorkerMetadata) -> None:
        """Process the worker halves' acknowledgements of loads and saves in earlier steps."""
        self._costs.acknowledged(acks)
        self._requests.unusable = self._requests.unusable or acks.unusable
        for request_id, reason in acks.failed_loads.items():
            detached = self._detached.get(request_id)
            tracked = detached or self._requests.get(request_id)
            self._offers.failed(tracked, reason)
            if tracked is not None:
                self._computes_again(tracked)
        if acks.staged_pages:
            self._tally.count("cornplug_staged_pages_total", self._app, by=acks.staged_pages)
        if acks.loaded_bytes:
            self._tally.count("cornplug_bytes_total", self._app, KV_PAGE, "load", by=acks.loaded_bytes)
        for saves in self._all_saves:
            saves.acknowledged(acks)

    def _computes_again(self, tracked: TrackedRequest) -> None:
        """Check a request for completed pages in its next step, after a failed load. The request now computes
        pages that the store may have lost, so these pages are offered to the store again."""
        self._requests.look_at(tracked)

    def detach_load(self, request: Request) -> bool:
        """Let the load of a finished request complete after vLLM has removed the request. Returns False if
        the request has no load in flight."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request or tracked.loading is None:
            return False
        self._detached[request.request_id] = tracked
        self._forget(tracked)
        return True

    def _admitted(self, request: Request, computed: int) -> TrackedRequest:
        """Track a request that vLLM is about to admit with `computed` tokens from its own prefix cache."""
        self._drop_replaced()
        tracked = self._requests.track(request)
        if tracked.own is not None:
            tracked.own.admitted(computed if self._requests.trusts_cache(request) else 0)
        return tracked

    def _gives_way(self, tracked: TrackedRequest) -> bool:
        """Return whether vLLM should skip the request this time. Returns True once after each failed load."""
        gives_way, tracked.gives_way = tracked.gives_way, False
        return gives_way

    def _may_load(self, tracked: TrackedRequest) -> bool:
        """Return whether pages may be loaded for the request. No pages may be loaded while a finished request
        with the same id is still loading, because vLLM could not distinguish the ends of the two loads."""
        if tracked.request.request_id not in self._detached:
            return True
        if not tracked.load_failed:
            tracked.load_failed = True
            self._tally.count("cornplug_misses_total", self._app, KV_PAGE, "id_in_use")
        return False

    def loaded(self, request_id: str) -> None:
        """Record that the worker halves have ended the load of the request with this id, successfully or
        not."""
        if request_id in self._detached:
            self._offers.ended(self._detached.pop(request_id))
            return
        tracked = self._requests.get(request_id)
        if tracked is not None:
            self._offers.ended(tracked)
            if tracked.request.is_finished():
                self._forget(tracked)

    def _forget(self, tracked: TrackedRequest) -> None:
        self._requests.forget(tracked)

    def abandon(self) -> list[PageLoad]:
        """Release all blocks that are pinned for saves, because sharing has stopped. Returns the loads that
        the engine waits for and that were not sent to the worker halves."""
        for saves in self._all_saves:
            saves.abandon()
        return self._offers.new_loads()

    def step_ended(self) -> None:
        """Record that the engine has read the output of a step."""
        self._costs.step_ended()


class KVScheduler(SchedulerHalf):
    """Scheduler half of the KV connector for a model with one cache group. There is one instance per engine
    core."""

    def __init__(
        self, config: VllmConfig, runtime: EngineRuntime, geometry: PageGeometry, tally: Tally
    ) -> None:
        super().__init__(config, runtime, geometry, tally)
        seen = self._publisher(runtime, geometry, only_seen=runtime.config.engine.save == "second")
        self._offers = LoadOffers(runtime, geometry, tally, self._costs, self._store_ops)
        self._saves = PageSaves(runtime, geometry, self._requests, seen, self._store_ops)
        self._all_saves = [self._saves]
        unseen = self._publisher(runtime, geometry)
        self._idle = IdleSaves(runtime, geometry, self._requests, self._saves, unseen)

    def bind(self, manager: KVCacheManager, spec: KVCacheSpec) -> None:
        """Set the engine's KV cache manager, which is used to look up a request's blocks. `spec` is the
        `KVCacheSpec` of the cache group."""
        self._saves.bind(manager, spec.block_size)
        self._idle.bind(manager.block_pool, spec.block_size)
        self._announce(manager.block_pool, spec, 0, self._saves, self._idle)

    def matched_tokens(self, request: Request, computed: int) -> int | None:
        """Return the number of tokens after the first `computed` tokens that can be loaded from the store.
        Returns None if vLLM should call this method again later: while pages are read from disk, and once
        after a failed load. vLLM calls this often. Most calls need no message to the store."""
        tracked = self._admitted(request, computed)
        if self._gives_way(tracked):
            return None
        if tracked.keys is None or request.skip_reading_prefix_cache or not self._requests.sharing:
            return 0
        if not self._may_load(tracked):
            return 0
        return self._offers.tokens(tracked, computed)

    def _drop_saves(self, before: Sequence[TrackedRequest]) -> None:
        self._saves.drop(before)
        self._idle.forget()

    def allocated(self, request: Request, blocks: Sequence[int], external: int) -> None:
        """Handle vLLM's block allocation for a request. vLLM loads `external` tokens into `blocks`, or has
        declined the offer if `external` is 0."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            self._offers.take(tracked, blocks, external)

    def moves(self, output: SchedulerOutput) -> CornplugKVMetadata:
        """Return the message for the worker halves, with the loads and saves of the step that was just
        scheduled."""
        self._drop_replaced()
        moves = CornplugKVMetadata(loads=self._offers.new_loads(), given_up=self._saves.lost())
        for request_id in output.preempted_req_ids or ():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                moves.given_up += self._saves.give_up(tracked)
        self._saves.take_answers()
        if self._store_ops:
            self._store_ops.run()
        moves.computes = output.total_num_scheduled_tokens > 0
        moves.timed = self._costs.time_step(output) if not self._requests.off else 0
        moves.saves = self._saves.of_step(output) + self._idle.of_step(output)
        return moves

    def finished(self, request: Request, blocks: Sequence[int]) -> None:
        """Handle the end of a request. vLLM frees these blocks after this call, or after the request's load
        has ended."""
        self._drop_replaced()
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        self._offers.withdraw(tracked)
        # While the request's pages are being loaded, its blocks do not contain KV yet, and vLLM keeps the
        # blocks until the load has ended. Saves that are still open began before the request was preempted,
        # and are given up.
        if tracked.loading is None:
            self._saves.offer_last(tracked, self._requests.last_end(tracked))
            self._idle.remember(tracked, blocks)
            self._saves.let_go(tracked)
            self._forget(tracked)

    def saves_open(self) -> bool:
        """Return whether the engine must continue to run steps, to receive acknowledgements or to save pages
        while it is idle."""
        gathering = self._requests.gathering
        if self._saves or gathering or self._store_ops or self._idle:
            return True
        return self.events is not None and self.events.waits
