"""vLLM's encoder-cache connector class. It delegates to the scheduler half and the worker half."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)

from cornplug.engine_common.runtime import EMBEDDING
from cornplug.metrics import Tally
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.media.early_prefill import create_early_prefill
from cornplug.vllm_connector.media.metadata import CornplugECMetadata, CornplugECWorkerMetadata
from cornplug.vllm_connector.media.scheduler import ECScheduler
from cornplug.vllm_connector.media.worker import ECWorker
from cornplug.vllm_connector.runtime import get_runtime, stop_sharing_on_error
from cornplug.vllm_connector.stats import ECProm, ECStats, drain_ec

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class CornplugECConnector(ECConnectorBase):
    """vLLM's encoder-cache connector for cornplug. It loads embeddings from the store and the encoder
    service, and saves the embeddings that this engine computes."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        assert vllm_config.ec_transfer_config is not None
        self._tally = Tally()
        run = get_runtime(vllm_config.ec_transfer_config.ec_connector_extra_config)
        self._scheduler: ECScheduler | None = None
        self._worker: ECWorker | None = None
        self._stopped_scheduler: ECScheduler | None = None
        """Scheduler half from before sharing stopped because of an error. None while sharing works."""
        self._final_metadata = CornplugECMetadata(publish=False)
        """Metadata for the next step after sharing has stopped. It contains the embeddings that the engine
        still expects."""
        self._app = run.app
        if vllm_config.model_config.multimodal_config is None:
            return
        if role == ECConnectorRole.SCHEDULER:
            early = create_early_prefill(vllm_config)
            self._scheduler = ECScheduler(
                vllm_config, run, self._tally, early, encoder_only=not self.is_consumer
            )
        else:
            self._worker = ECWorker(
                run,
                publishes=vllm_config.parallel_config.rank == 0,
                device=str(vllm_config.device_config.device),
                rank=vllm_config.parallel_config.rank,
                encoder_only=not self.is_consumer,
            )

    @property
    def scheduler(self) -> ECScheduler | None:
        """Scheduler half, or None in workers and if sharing has stopped."""
        return self._scheduler

    @property
    def worker(self) -> ECWorker | None:
        """Worker half, or None in the scheduler."""
        return self._worker

    # -- worker half ------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(encoder_cache, self._step_metadata())

    def start_save_caches(self, **kwargs: Any) -> None:
        # vLLM does not call `start_load_caches` in an engine that runs only its encoder, so load here.
        if self._worker is not None and not self.is_consumer:
            cache: dict[str, torch.Tensor] = kwargs["encoder_cache"]
            self._worker.load(cache, self._step_metadata())
            self._worker.save_again(cache, self._step_metadata())

    @stop_sharing_on_error(lambda *_, **__: None)
    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        # vLLM's profiling encodes dummy items outside of a step, without metadata. They are not shared.
        if self._worker is not None and self._connector_metadata is not None:
            self._worker.save(mm_hash, encoder_cache[mm_hash], self._step_metadata())

    @stop_sharing_on_error(lambda *_: None)
    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        return self._worker.take_acks() if self._worker is not None else None

    def _step_metadata(self) -> CornplugECMetadata:
        moves = self._get_connector_metadata()
        assert isinstance(moves, CornplugECMetadata)
        return moves

    # -- scheduler half ---------------------------------------------------------------------

    @stop_sharing_on_error(lambda *_: False)
    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler is not None and self._scheduler.has_arrived(identifier)

    @stop_sharing_on_error(lambda *_: True)
    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return self._scheduler is None or self._scheduler.can_schedule(request, num_computed_tokens)

    def _promise_arrived(self, request: Request, index: int) -> None:
        """After sharing has stopped, add an embedding that has already arrived to the next step's metadata.
        The engine expects this embedding and has reserved memory for it."""
        identifier = request.mm_features[index].identifier
        arrived = (
            self._stopped_scheduler.find_arrived(identifier) if self._stopped_scheduler is not None else None
        )
        if arrived is not None and all(one.identifier != identifier for one in self._final_metadata.arrived):
            self._final_metadata.arrived.append(
                replace(arrived, request_id=request.request_id, input_id=index)
            )

    @stop_sharing_on_error(_promise_arrived)
    def update_state_after_alloc(self, request: Request, index: int) -> None:
        if self._scheduler is not None:
            self._scheduler.record_allocation(request, index)

    def _take_final_metadata(self, *_args: Any) -> CornplugECMetadata:
        last, self._final_metadata = self._final_metadata, CornplugECMetadata(publish=False)
        return last

    @stop_sharing_on_error(_take_final_metadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        if self._scheduler is None:
            return self._take_final_metadata()
        return self._scheduler.build_metadata(scheduler_output)

    @stop_sharing_on_error(lambda *_: None)
    def update_connector_output(self, connector_output: Any) -> None:
        acks = connector_output.ec_connector_worker_meta
        if self._scheduler is not None and isinstance(acks, CornplugECWorkerMetadata):
            self._scheduler.handle_acks(acks)

    @stop_sharing_on_error(lambda *_: (False, None))
    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finish_request(request)
        return False, None

    # -- both halves ------------------------------------------------------------------------

    def _stop_sharing(self, hook: str, error: Exception) -> None:
        """Stop sharing embeddings after an unexpected error in `hook`. The engine continues without
        sharing."""
        compat.logger.error(
            "cornplug: this engine no longer shares embeddings, because %s failed", hook, exc_info=error
        )
        self._tally.count("cornplug_misses_total", self._app, EMBEDDING, "error")
        if self._scheduler is not None:
            self._stopped_scheduler, self._scheduler = self._scheduler, None
            self._final_metadata.arrived = self._stopped_scheduler.stop()
        elif self._worker is not None:
            self._worker.stop_publishing()

    def shutdown(self) -> None:
        for half in (self._scheduler, self._stopped_scheduler):
            if half is not None:
                half.close()
        if self._worker is not None:
            self._worker.close()

    def get_ec_connector_stats(self) -> ECStats | None:
        return drain_ec(self._tally)

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> ECStats | None:
        return ECStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> ECProm:
        return ECProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)
