"""Core of the encoder service. It admits and queues requests. `BatchDispatcher` runs batches, and
`ReplySender` sends replies.

    submit ─> admission threads ─> Batcher ─> BatchDispatcher: executors, publishing ─> replies
              check, digest, join

Every request gets exactly one reply. An error in one media item is reported only to the request for this
item. It does not affect other items in the same batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec

from cornplug import identity
from cornplug.config import EncoderConfig
from cornplug.encoder_service.admission import AdmissionRefusal, EncodeAdmission
from cornplug.encoder_service.batcher import Batcher, EncodeJob, EncodeResult, PendingRequest
from cornplug.encoder_service.execution.dispatcher import BatchDispatcher, JobPayload, ReplySender
from cornplug.encoder_service.execution.executor import BatchExecutor, InProcessExecutor, WeightReloader
from cornplug.encoder_service.execution.result_cache import ResultCache
from cornplug.encoder_service.fair_queue import MAX_WAITING, QueueLimit
from cornplug.encoder_service.formats.messages import (
    INTERNAL_ERROR_MESSAGE,
    EncodeReply,
    EncodeRequest,
    ServedModel,
)
from cornplug.encoder_service.model_registry import LoadedModel, ModelRegistry
from cornplug.encoder_service.preprocess.decode_lanes import (
    BudgetShare,
    ByteBudget,
    DecodeLanes,
    DecodeLimits,
)
from cornplug.encoder_service.request_observer import NO_TRACING, RequestObserver, RequestTracing
from cornplug.encoder_service.service_metrics import ServiceGauges, ServiceMetrics
from cornplug.encoder_service.towers.base import TowerInput, TowerItem
from cornplug.errors import EncoderRefused
from cornplug.qos import QosCaller, QosClasses, ServiceClass

MAX_BATCH_TOKENS: Final = 32_768
"""Maximum number of tokens in a batch, unless its first item has more. This limits the memory for a tower."""
_APP_MAX: Final = 64
_CLOSE_TIMEOUT_S: Final = 1.0
"""Maximum seconds that `close` waits for a tower to finish its current layer."""
_DECODER_BYTES: Final = 1 << 30
"""Maximum bytes of a decoding process's address space, without the media item."""
_DECODER_BYTES_PER_PIXEL: Final = 24
"""Maximum bytes that a decoding process uses per pixel of the largest accepted image. This includes the
coefficients, and the decoded, the rotated and the blended image."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLimits:
    """Limits for a service's batches, queue and memory."""

    max_batch_items: int = 16
    """Maximum number of media items in one batch of a tower."""
    max_batch_tokens: int = MAX_BATCH_TOKENS
    max_waiting: int = MAX_WAITING
    max_prepared_bytes: int = 4 << 30
    admission_threads: int = 2


class EncoderCore:
    """Encoder service without its sockets. Thread-safe. Call `close` to end its threads."""

    def __init__(
        self,
        registry: ModelRegistry,
        cache: ResultCache,
        *,
        secret: bytes,
        executors: Sequence[BatchExecutor] = (),
        limits: EncoderLimits | None = None,
        classes: QosClasses | None = None,
        tracing: RequestTracing = NO_TRACING,
    ) -> None:
        limits = limits or EncoderLimits()
        self.registry = registry
        self.classes = classes or QosClasses.single()
        self._executors = tuple(executors) or (InProcessExecutor(registry.device),)
        self._queue_limit = QueueLimit(self.classes.ranked_classes(), limits.max_waiting)
        self.budget = ByteBudget(
            {qos: qos.share for qos in self.classes.ranked_classes()},
            limits.max_prepared_bytes,
            purpose="to prepare it",
        )
        self.decode_lanes: DecodeLanes | None = None
        """Lanes (threads with processes) that decode media, or None before `open_decode_lanes` was called."""
        self._admission = EncodeAdmission(
            max_items=limits.max_batch_items,
            max_tokens=limits.max_batch_tokens,
            clock=time.monotonic,
            lanes=lambda: sum(e.lanes for e in self._executors if e.is_ready()),
        )
        self._batcher: Batcher[JobPayload] = Batcher(
            max_items=limits.max_batch_items,
            max_tokens=limits.max_batch_tokens,
            clock=time.monotonic,
            on_late=lambda pending: self._replies.refuse_late(pending),
            batch_token_limit=self._admission.batch_token_limit,
            has_urgent_lane=len(self.classes.ranked_classes()) > 1,
            is_long=self._admission.is_long,
        )
        self.metrics = ServiceMetrics(
            ServiceGauges(
                self.count_waiting,
                queue_by_class=self._batcher.queue_by_class,
                models=registry.served_models,
                predicted_s_by_class=self._predict_by_class_s,
                decode_queue_by_class=lambda: (
                    {} if self.decode_lanes is None else self.decode_lanes.queue_by_class()
                ),
                prepared_bytes=self.budget.count_used_bytes,
                executors=lambda: (sum(e.is_ready() for e in self._executors), len(self._executors)),
            ),
            classes=[c.name for c in self.classes.ranked_classes()],
        )
        self.observer = RequestObserver(self.metrics, tracing)
        self._replies = ReplySender(self._admission, self.observer)
        self._cache = cache
        cache.on_failure = lambda reason: self.metrics.store_failures.labels(reason).inc()
        self._secret = secret
        self._admission_threads = ThreadPoolExecutor(limits.admission_threads, "cornplug-admit")
        self._reloader = WeightReloader(registry, self._executors, self._queue_limit.identities_in_use)
        self._dispatcher = BatchDispatcher(
            self._batcher,
            self._executors,
            cache,
            self._replies,
            registry.shares_features,
            urgent_lanes=len(self.classes.ranked_classes()) > 1,
        )
        self._closed_cleanly: bool | None = None

    def open_decode_lanes(self, config: EncoderConfig) -> DecodeLanes:
        """Create and return the lanes (threads with processes) that decode media. `close` ends them."""
        if self.decode_lanes is not None:
            self.decode_lanes.close()
        self.decode_lanes = DecodeLanes(
            self.classes.ranked_classes(),
            lanes=config.prepare_threads,
            limits=DecodeLimits(
                max_bytes=_DECODER_BYTES + _DECODER_BYTES_PER_PIXEL * config.max_pixels,
            ),
            on_killed=lambda why: self.metrics.decoders_killed.labels(why).inc(),
            clock=time.monotonic,
        )
        return self.decode_lanes

    def submit(
        self,
        request: EncodeRequest,
        *,
        inputs: Mapping[str, TowerInput] | None = None,
        inline: bool = False,
        caller: QosCaller | None = None,
        budget_share: BudgetShare | None = None,
    ) -> Future[EncodeResult]:
        """Request one embedding.

        The future never raises, because errors are `EncodeRefusal` replies. Cancel the future to withdraw the
        request.

        Args:
            inputs: Tower inputs as tensors in this process. The default is `request.inputs`.
            inline: Whether the reply must contain the tensor even if the store has it.
            caller: Class and account of the caller. None for an engine on this host, whose class is
                determined by `request.app`.
            budget_share: Budget share that already counts the bytes of the inputs. By default, the bytes of
                `request.inputs` are counted until the reply.
        """
        qos = self.classes.class_of_app(request.app) if caller is None else caller.qos
        if caller is not None and caller.app is not None:
            request = msgspec.structs.replace(request, app=caller.app)
        account = None if caller is None else caller.account
        pending = PendingRequest(
            request=request, received_s=time.monotonic(), qos=qos, inline=inline, account=account
        )
        model = self.registry.find_by_identity(request.identity)
        self.observer.on_received(pending, model)
        if model is None:
            names = ", ".join(m.name for m in self.registry.served_models())
            self._replies.refuse(
                pending, "unknown_model", f"no served model has this identity; served models: {names}"
            )
            return pending.future
        if not self._dispatcher.is_ready():
            self._replies.refuse(pending, "overloaded", "no replica is running; all are being restarted", 1.0)
            return pending.future
        if (full := self._queue_limit.acquire(pending)) is not None:
            self._replies.refuse(pending, *full, self._admission.predict_half_drained_s(self._batcher))
            return pending.future
        if budget_share is None and not self._reserve_bytes(pending):
            self._queue_limit.release(pending)
            return pending.future
        pending.future.add_done_callback(lambda _: self._release_slot(pending))
        admitted = self._admission_threads.submit(self._admit, pending, model, inputs or request.inputs)
        admitted.add_done_callback(lambda done: self._report_failure(done, pending))
        return pending.future

    def reply_from_cache(
        self, request: EncodeRequest, *, inline: bool, caller: QosCaller
    ) -> EncodeReply | None:
        """Return the reply if the store has the embedding, else None. The request's inputs are not needed.

        A miss is not counted, because the caller calls `submit` next.
        """
        model = self.registry.find_by_identity(request.identity)
        if model is None:
            return None
        if caller.app is not None:
            request = msgspec.structs.replace(request, app=caller.app)
        received_s = time.monotonic()
        found = self._cache.look_up_embedding(request.key, model.dtype, inline=inline)
        if found is None:
            return None
        pending = PendingRequest(request=request, received_s=received_s, qos=caller.qos, inline=inline)
        self.observer.on_received(pending, model)
        self._admission.record_cache_outcome(hit=True)
        return self._replies.send_embedding(pending, "cached", stored=True, tensor=found.tensor)

    def _reserve_bytes(self, pending: PendingRequest) -> bool:
        """Count the bytes of a request's inputs in the budget until the reply. If they do not fit, reject the
        request and return False."""
        share = self.budget.open_share(pending.qos)
        try:
            share.resize(sum(len(tensor.data) for tensor in pending.request.inputs.values()))
        except EncoderRefused as e:
            self._replies.refuse(
                pending, "overloaded", str(e), self._admission.predict_half_drained_s(self._batcher)
            )
            return False
        pending.future.add_done_callback(lambda _: share.close())
        return True

    def predict_class_s(self, qos: ServiceClass) -> float:
        """Return the predicted seconds until a tower has processed a new request of this class. Decoding is
        not included."""
        return self._admission.predict_class_s(qos, self._batcher)

    def _predict_by_class_s(self) -> dict[str, float]:
        towers = self._admission.predict_by_class_s(self.classes.ranked_classes(), self._batcher)
        decoding = {} if self.decode_lanes is None else self.decode_lanes.predict_by_class_s()
        return {name: seconds + decoding.get(name, 0.0) for name, seconds in towers.items()}

    def precheck(self, qos: ServiceClass, deadline_s: float) -> AdmissionRefusal | None:
        """Return why a request of this class with this deadline must be rejected, or None if it may continue.

        Uses only information that is available before the media item is decoded.
        """
        return self._admission.precheck(qos, deadline_s, self._batcher)

    def count_waiting(self) -> int:
        """Return the number of admitted requests that have no reply yet."""
        return len(self._queue_limit)

    @property
    def has_store(self) -> bool:
        """Whether there is a store to publish embeddings to."""
        return self._cache.has_store

    def is_healthy(self) -> bool:
        """Return whether all lanes are running and at least one executor is ready."""
        return self._dispatcher.is_alive()

    def start_decoding(self) -> None:
        """Start the decoding processes, so that the first media items do not wait for them."""
        if self.decode_lanes is not None:
            self.decode_lanes.start_processes()

    def stop_decoding(self) -> bool:
        """Stop all decoding, and reject the requests whose media items are not decoded yet. Return False if
        an image processor is still running."""
        return self.decode_lanes is None or self.decode_lanes.close()

    def is_decoding_ready(self) -> bool:
        """Return whether a new media item would soon be decoded."""
        return self.decode_lanes is None or self.decode_lanes.is_ready()

    def reload(self, name: str | None = None) -> tuple[ServedModel, ...]:
        """Load and serve the weights that are now on disk, for the model `name` or for all models if None.

        Blocks while the weights load. Requests continue. The result and the errors are the same as for
        `WeightReloader.reload`.
        """
        return self._reloader.reload(name)

    def drain(self, deadline_s: float) -> bool:
        """Stop admitting requests, and wait for the replies to admitted requests. Return False if the
        deadline passes first."""
        return self._queue_limit.drain(deadline_s)

    def close(self) -> bool:
        """Reject the remaining requests, then end the threads. A running pass ends after its current layer.

        Returns False if a thread is still computing after about 2 s. The process must then be killed.
        """
        if self._closed_cleanly is None:
            self._queue_limit.drain(0.0)
            decoding_ended = self.stop_decoding()
            self._admission_threads.shutdown(wait=True, cancel_futures=True)
            self._batcher.close()
            self._closed_cleanly = self._dispatcher.close(_CLOSE_TIMEOUT_S) and decoding_ended
        return self._closed_cleanly

    def _admit(self, pending: PendingRequest, model: LoadedModel, inputs: Mapping[str, TowerInput]) -> None:
        request = pending.request
        if pending.future.cancelled():
            return
        if len(request.key) != identity.DIGEST_BYTES:
            problem = f"key: must have {identity.DIGEST_BYTES} bytes, not {len(request.key)}"
            return self._replies.refuse(pending, "bad_input", problem)
        if not 1 <= len(request.app) <= _APP_MAX:
            return self._replies.refuse(pending, "bad_input", f"app: must have 1 to {_APP_MAX} characters")
        if self._reply_from_store(pending, model):
            return self._admission.record_cache_outcome(hit=True)
        try:
            with self.observer.record_stage("prepare", pending):
                item = model.tower.prepare(inputs)
        except EncoderRefused as e:
            return self._replies.refuse(pending, "bad_input", str(e))
        # Only the item is needed from here on, so free the request's inputs.
        request = pending.request = msgspec.structs.replace(request, inputs={})
        feature_key = self._feature_key(request, model, item)
        if pending.due_s <= time.monotonic():
            return self._replies.refuse_late(pending)
        key = (request.key, request.identity)
        joins = self._batcher.has_job(key)
        if not joins and self._reply_from_store(pending, model):
            # Between the two lookups, a job with this key has stored its result and finished.
            return self._admission.record_cache_outcome(hit=True)
        self.observer.on_queued(pending, item.tokens)
        job = EncodeJob(
            key=key,
            feature_key=feature_key,
            tower=model.tower,
            tokens=item.tokens,
            payload=JobPayload(model=model, item=item),
            requests=[pending],
        )
        self._admission.record_cache_outcome(hit=joins)
        # A request that joins a running or queued job adds no work, so it is always admitted.
        refusal = None if joins else self._admission.admit(job, self._batcher)
        if refusal is not None:
            return self._replies.refuse(pending, refusal.reason, refusal.message, refusal.retry_after_s)
        self._batcher.join_or_add(job)
        return None

    def _feature_key(self, request: EncodeRequest, model: LoadedModel, item: TowerItem) -> bytes:
        """Return a key that is equal for jobs that can share the features of one tower pass."""
        if not self.registry.shares_features(model):
            # No other job could use these features. Computing their digest would read tens of megabytes.
            return identity.digest("cornplug-own-features-v1", request.key, request.identity)
        return identity.feature_key(
            self._secret, model.tower_fp, model.tower_spec_fp, item.digests, request.cache_salt
        )

    def _reply_from_store(self, pending: PendingRequest, model: LoadedModel) -> bool:
        found = self._cache.look_up_embedding(pending.request.key, model.dtype, inline=pending.inline)
        if found is not None:
            self._replies.send_embedding(pending, "cached", stored=True, tensor=found.tensor)
        return found is not None

    def _report_failure(self, done: Future[None], pending: PendingRequest) -> None:
        """Reject a request whose admission failed, or did not start before the service stopped."""
        if done.cancelled():
            self._replies.refuse(pending, "overloaded", "the service is stopping", 1.0)
        elif (error := done.exception()) is not None:
            log.error("encoding failed", exc_info=error)
            self._replies.refuse(pending, "internal", INTERNAL_ERROR_MESSAGE)

    def _release_slot(self, pending: PendingRequest) -> None:
        self.observer.on_disconnect(pending)
        self._queue_limit.release(pending)
