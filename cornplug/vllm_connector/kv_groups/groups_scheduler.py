"""Scheduler half of the KV connector for a model with several cache groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from cornplug.engine_common.runtime import EngineRuntime
from cornplug.metrics import Tally
from cornplug.vllm_connector.kv.deferred_ops import DeferredStoreOps
from cornplug.vllm_connector.kv.idle_saves import IdleSaves
from cornplug.vllm_connector.kv.metadata import CornplugKVMetadata, PageSave
from cornplug.vllm_connector.kv.page_saves import PageSaves
from cornplug.vllm_connector.kv.scheduler import SchedulerHalf
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest
from cornplug.vllm_connector.kv_groups.group_offers import GroupOffers
from cornplug.vllm_connector.kv_groups.group_requests import GroupRequests
from cornplug.vllm_connector.kv_groups.page_kinds import PageKind, whole_page
from cornplug.vllm_connector.kv_groups.state_saves import StateSaves
from cornplug.vllm_connector.kv_groups.window_saves import WindowSaves

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class _Group:
    """Saves of one cache group."""

    kind: PageKind
    requests: GroupRequests
    saves: PageSaves
    idle: IdleSaves


def _saves_of(kind: PageKind) -> type[PageSaves]:
    if kind.whole:
        return PageSaves
    return StateSaves if kind.geometry.state else WindowSaves


class GroupsScheduler(SchedulerHalf):
    """Scheduler half for a model with several cache groups, whose pages are loaded together and saved per
    group. There is one per engine core."""

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
        """Set the engine's manager of blocks of these specs, which knows the blocks of a request."""
        self._group_offers.bind(manager.block_pool.null_block.block_id)
        # Like vLLM's own offloading, events cover only full attention.
        first = next(i for i, group in enumerate(self._groups) if group.kind.whole)
        whole = self._groups[first]
        self._announce(manager.block_pool, specs[first], first, whole.saves, whole.idle)
        for i, group in enumerate(self._groups):
            group.saves.bind(manager, group.kind.block_size, i)
            group.idle.bind(manager.block_pool, group.kind.block_size)

    def matched_tokens(self, request: Request, computed: int) -> int | None:
        """Return the number of tokens beyond `computed` that the store offers, or None while pages are read
        from disk, and once after a failed load. Called often, and usually served from memory."""
        tracked = self._admitted(request, computed)
        if self._gives_way(tracked):
            return None
        if tracked.keys is None:
            return 0
        end = computed // self._page_tokens * self._page_tokens
        for group in self._groups:
            # Of the tokens in the engine's own cache, a later request needs only the window or the state
            # before the end. Earlier pages are not worth saving.
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
        """Record that the engine accepted the offer and loads `external` tokens into these blocks of each
        group."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            self._group_offers.take_groups(tracked, blocks, external)

    def moves(self, output: SchedulerOutput) -> CornplugKVMetadata:
        """Return the loads and saves of the step that was just scheduled."""
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
        """A request's pages of each group that has some."""
        found = [(group, group.requests.get(request)) for group in self._groups]
        return [(group, tracked) for group, tracked in found if tracked is not None]

    def _computes_again(self, tracked: TrackedRequest) -> None:
        super()._computes_again(tracked)
        if tracked.loading is not None:
            for _, pages in self._pages_of(tracked.request):
                pages.save_again_from(tracked.loading.computed // self._page_tokens)

    def finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> None:
        """Handle the end of a request. The engine frees these blocks of each group next, or after its
        load."""
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
        """A request's blocks of a group, including blocks that it has released and that vLLM still caches."""
        held = blocks[self._groups.index(group)]
        return group.saves.kept(pages, held) if isinstance(group.saves, WindowSaves) else held

    def _forget(self, tracked: TrackedRequest) -> None:
        for group in self._groups:
            group.requests.forget(tracked.request)
        super()._forget(tracked)

    def saves_open(self) -> bool:
        """Whether the engine must keep stepping, for acknowledgements or to save in idle steps."""
        return bool(
            self._requests.gathering
            or self._store_ops
            or any(group.saves or group.saves.store_ops or group.idle for group in self._groups)
            or (self.events is not None and self.events.waits)
        )

    def frees_pending(self) -> bool:
        """Whether acknowledgements will free blocks that are held for saves."""
        return any(group.saves.pinned for group in self._groups if isinstance(group.saves, WindowSaves))
