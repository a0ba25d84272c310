"""vLLM's KV connector class. It delegates to the scheduler half and the worker half."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from cornplug.engine_common.rank_pages import RankPages
from cornplug.engine_common.runtime import KV_PAGE, EngineRuntime, log_store_size
from cornplug.errors import ConfigError, LayoutError
from cornplug.metrics import Tally
from cornplug.store.base import NO_LEASES
from cornplug.vllm_connector import compat, cpu_use
from cornplug.vllm_connector.cpu_use import IdleBackoff
from cornplug.vllm_connector.kv import pauses
from cornplug.vllm_connector.kv.cache_geometry import (
    Scales,
    checkpoint_scales,
    rank_slice,
    scales_of_layers,
)
from cornplug.vllm_connector.kv.group_worker import GroupWorker, StateGroupWorker
from cornplug.vllm_connector.kv.metadata import CornplugKVMetadata, CornplugKVWorkerMetadata, PageLoad
from cornplug.vllm_connector.kv.page_kinds import PageKind, combined_page_size, page_kinds
from cornplug.vllm_connector.kv.scheduler import KVScheduler
from cornplug.vllm_connector.kv.worker import DisabledKVWorker, KVWorker
from cornplug.vllm_connector.runtime import get_runtime, retry_without_sharing, stop_sharing_on_error
from cornplug.vllm_connector.stats import KVProm, KVStats, drain_kv

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class CornplugConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector for cornplug. It shares KV pages with all engines that run the same model."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ConfigError(
                "kv_load_failure_policy",
                "'fail' would abort requests when a page is lost",
                'Set it to "recompute" in --kv-transfer-config, or use --kv-connector cornplug.',
            )
        self._tally = Tally()
        self._runtime: EngineRuntime = get_runtime(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: KVScheduler | None = None
        self._worker: KVWorker | DisabledKVWorker | None = None
        self._idle_backoff = IdleBackoff()
        self._detached_blocks: dict[str, list[KVCacheBlock]] = {}
        """Blocks that stay pinned until the load of a finished request has completed, by request id. A new
        request may already use the same id."""
        self._unsent_loads: list[PageLoad] = []
        """Loads that were promised to the engine but not yet sent to the worker half when sharing stopped.
        The engine waits for their result."""
        self._has_several_groups = len(kv_cache_config.kv_cache_groups) > 1
        engine = self._runtime.config.engine
        try:
            if not engine.share_kv:
                raise LayoutError("engine.share_kv is false", reason="disabled")
            kinds = page_kinds(vllm_config, kv_cache_config, engine.page_tokens)
            quantised = any(kind.geometry.quantised for kind in kinds)
            scales = checkpoint_scales(vllm_config) if quantised else {}
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = KVScheduler(vllm_config, self._runtime, kinds, self._tally)
                # Each token occupies one slot per cache group.
                own_tokens = kv_cache_config.num_blocks * kinds[0].block_size // len(kinds)
                log_store_size(self._runtime, combined_page_size(kinds), own_tokens, compat.logger)
            else:
                self._worker = self._create_worker(kinds, scales)
        except LayoutError as e:
            compat.logger.warning("cornplug: KV of this engine is not shared: %s", e)
            if role == KVConnectorRole.WORKER:
                self._worker = DisabledKVWorker(vllm_config.cache_config.block_size, e.reason)

    def _create_worker(self, kinds: Sequence[PageKind], scales: Scales) -> KVWorker:
        timeout_s, size = self._runtime.background_timeout_s, combined_page_size(kinds).page_bytes
        workers: list[GroupWorker] = []
        for kind in kinds:
            held = rank_slice(self._vllm_config, self._kv_cache_config, kind.geometry)
            pages = RankPages(kind.geometry, held, self._runtime.store)
            beside, share = workers[-1] if workers else None, kind.geometry.page_bytes / size
            if kind.geometry.state:
                workers.append(StateGroupWorker(pages, timeout_s, other_worker=beside, slab_share=share))
            else:
                known = scales_of_layers(scales, kind.layer_names)
                worker = GroupWorker(
                    pages, kind.block_size, timeout_s, other_worker=beside, slab_share=share, scales=known
                )
                workers.append(worker)
        # A pipeline stage's part of a page has a fixed number of layers, including layers without a cache.
        one_stage = self._vllm_config.parallel_config.pipeline_parallel_size == 1
        return KVWorker(workers, [kind.layer_names for kind in kinds], allow_shared_caches=one_stage)

    # -- worker half ------------------------------------------------------------------------

    @retry_without_sharing
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches, self._vllm_config.compilation_config.static_forward_context)

    @retry_without_sharing
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # Both of vLLM's model runners call `handle_preemptions` first in each step.
        moves = kv_connector_metadata
        assert isinstance(moves, CornplugKVMetadata)
        cpu_use.record_step_start(computes=moves.computes)
        if self._worker is not None:
            # Cancel first, because the blocks of cancelled saves may already have been overwritten.
            if moves.cancelled_saves:
                self._worker.cancel_saves(moves.cancelled_saves)
            self._worker.begin_step(computes=moves.computes)

    @retry_without_sharing
    def unregister_kv_caches(self) -> None:
        # vLLM calls `unregister_kv_caches` in release 0.33 and later.
        self._end_copies()

    def _end_copies(self) -> None:
        """Wait for all copies to end before the engine's sleep mode frees the KV cache
        (`kv/pauses.py`)."""
        if self._worker is not None:
            self._worker.drain()

    @retry_without_sharing
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        moves = self._get_connector_metadata()
        assert isinstance(moves, CornplugKVMetadata)
        if self._worker is not None:
            self._worker.start_loads(moves.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing. Loads are asynchronous, and vLLM runs a request only after all its layers are
        loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing. A page contains all layers, so pages are copied after the forward pass."""

    @retry_without_sharing
    def wait_for_save(self) -> None:
        moves = self._get_connector_metadata()
        assert isinstance(moves, CornplugKVMetadata)
        if self._worker is not None:
            self._worker.start_saves(moves.saves)
            if moves.timed_step:
                self._worker.record_step_end(moves.timed_step)

    @retry_without_sharing
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        # Saves do not hold blocks, so no request is ever reported as "sent".
        return None, self._worker.take_finished() or None

    @retry_without_sharing
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None and self._has_several_groups:
            results.failed_recving = self._worker.failed_loads()
        return results

    @retry_without_sharing
    def get_block_ids_with_load_errors(self) -> set[int]:
        # With several groups, vLLM accepts reports of failed requests, but not of failed blocks.
        if self._worker is None or self._has_several_groups:
            return set()
        return self._worker.take_bad_blocks()

    @retry_without_sharing
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_acks() if self._worker is not None else None

    # -- scheduler half ---------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            specs = [group.kv_cache_spec for group in self._kv_cache_config.kv_cache_groups]
            self._scheduler.bind(kv_cache_manager, specs)

    def _fail_load(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Send the worker half a load that fails. Otherwise the engine would wait after an error for a load
        that the worker half never received."""
        if not num_external_tokens or any(
            load.request_id == request.request_id for load in self._unsent_loads
        ):
            return
        for group, ids in enumerate(blocks.get_block_ids()):
            size = self._kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
            self._unsent_loads.append(
                PageLoad(request.request_id, 0, len(ids) * size, 0, NO_LEASES, array("q", ids), group=group)
            )

    def _finish_detached_loads(self, connector_output: Any) -> None:
        """Release the blocks of completed loads whose requests have already finished, and remove these loads
        from the output that vLLM processes."""
        for request_id in set(connector_output.finished_recving or ()) & self._detached_blocks.keys():
            connector_output.finished_recving = connector_output.finished_recving - {request_id}
            assert self._kv_cache_manager is not None
            self._kv_cache_manager.block_pool.free_blocks(reversed(self._detached_blocks.pop(request_id)))

    def _build_final_metadata(self, *_args: Any) -> KVConnectorMetadata:
        loads, self._unsent_loads = self._unsent_loads, []
        return CornplugKVMetadata(loads=loads)

    @stop_sharing_on_error(lambda *_: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    @stop_sharing_on_error(_fail_load)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is not None:
            self._scheduler.handle_allocation(request, blocks.get_block_ids(), num_external_tokens)

    def _on_other_connector_load(self) -> None:
        """Record that another KV connector of this engine will load KV (`kv/page_keys.py`)."""
        if self._scheduler is not None:
            self._scheduler.on_other_connector_load()

    @stop_sharing_on_error(_build_final_metadata)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._scheduler is None:
            return self._build_final_metadata()
        moves = self._scheduler.build_metadata(scheduler_output)
        empty = not scheduler_output.total_num_scheduled_tokens
        self._idle_backoff.sleep_if_idle(
            is_empty=empty and not moves.has_transfers, has_pending_work=self._scheduler.has_pending_transfers
        )
        return moves

    @stop_sharing_on_error(_finish_detached_loads)
    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is None:
            self._finish_detached_loads(connector_output)
            return
        acks = connector_output.kv_connector_worker_meta
        if isinstance(acks, CornplugKVWorkerMetadata):
            self._scheduler.handle_acks(acks)
        for request_id in connector_output.finished_recving or ():
            self._scheduler.end_load(request_id)
        self._finish_detached_loads(connector_output)
        self._scheduler.record_step_end()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @stop_sharing_on_error(lambda *_: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finish_request(request, block_ids)
        # Do not let vLLM keep the blocks. A later request may have the same id, and a cache reset does not
        # wait for saves.
        return False, None

    def _detach_load(self, request: Request) -> bool:
        """Let vLLM remove a finished request while its load continues (`kv/pauses.py`). Return False if the
        request has no load in flight."""
        manager, half = self._kv_cache_manager, self._scheduler
        if half is None or manager is None or not half.detach_load(request):
            return False
        tables = manager.get_blocks(request.request_id).blocks
        blocks = [block for table in tables for block in table if not block.is_null]
        manager.block_pool.touch(blocks)
        self._detached_blocks[request.request_id] = blocks
        return True

    @stop_sharing_on_error(lambda *_: False)
    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_frees()

    @stop_sharing_on_error(lambda *_: True)
    def reset_cache(self) -> bool:
        if self._scheduler is not None and not pauses.is_pausing():
            self._scheduler.forget_stored()
        return True

    @stop_sharing_on_error(lambda *_: ())
    def take_events(self) -> Iterable[KVCacheEvent]:
        if self._scheduler is None or self._scheduler.events is None:
            return ()
        return self._scheduler.events.take_events()

    @stop_sharing_on_error(lambda *_: False)
    def has_pending_push_work(self) -> bool:
        return bool(self._unsent_loads) or (self._scheduler is not None and self._scheduler.has_open_saves())

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False, because a lost save only causes a later cache miss."""
        return False

    # -- both halves ------------------------------------------------------------------------

    def _stop_sharing(self, hook: str, error: Exception) -> None:
        """Stop sharing KV after an unexpected error in `hook`. The engine continues without sharing."""
        compat.logger.error(
            "cornplug: this engine no longer shares KV, because %s failed", hook, exc_info=error
        )
        self._tally.count("cornplug_misses_total", self._runtime.app, KV_PAGE, "error")
        try:
            if self._scheduler is not None:
                stopped, self._scheduler = self._scheduler, None
                self._unsent_loads += stopped.abandon()
            elif isinstance(self._worker, KVWorker):
                size = self._vllm_config.cache_config.block_size
                self._worker = DisabledKVWorker.replacing(self._worker, size, "error")
        except Exception:  # noqa: BLE001 - any error; the first error was already logged
            compat.logger.exception("cornplug: could not release all KV blocks")

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def get_kv_connector_stats(self) -> KVStats | None:
        return drain_kv(self._tally)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStats | None:
        return KVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVProm:
        return KVProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)
