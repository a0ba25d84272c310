"""Runs batches on executors, saves the embeddings in the store, and sends the replies to waiting requests.

    Batcher ─batch─> a lane of an executor ─BatchResult─> publishing threads ─> ReplySender
                     (one thread each)                    store, then replies

A lane is a thread that runs one batch at a time on an executor. A batch is formed as late as possible, when a
lane is free. If a batch fails, its jobs are retried one by one. If a replica (an executor's process) dies,
its jobs are retried once on another replica.

`ReplySender` counts each reply before sending it to the caller.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch

from cornplug.codec import PayloadKind
from cornplug.encoder_service.admission import EncodeAdmission
from cornplug.encoder_service.batcher import Batcher, EncodeJob, PendingRequest
from cornplug.encoder_service.execution.executor import BatchExecutor, BatchResult, EncodeBatch
from cornplug.encoder_service.execution.result_cache import ResultCache
from cornplug.encoder_service.formats.messages import (
    INTERNAL_ERROR_MESSAGE,
    EncodeRefusal,
    EncodeReply,
    WireTensor,
)
from cornplug.encoder_service.formats.tensors import to_wire
from cornplug.encoder_service.model_registry import LoadedModel
from cornplug.encoder_service.request_observer import RequestObserver
from cornplug.encoder_service.towers.base import PassAbandoned, TowerItem
from cornplug.errors import ReplicaLost

Origin = Literal["computed", "coalesced", "cached"]
Reason = Literal["unknown_model", "bad_input", "overloaded", "over_share", "too_late", "internal"]
_POLL_S: Final = 0.05
"""Seconds between checks for a ready executor, by a lane whose own executor is down."""
_MAX_PUBLISHERS: Final = 4
log = logging.getLogger(__name__)


class ReplySender:
    """Sends replies to pending requests, and reports the requests' durations to metrics and admission.
    Thread-safe."""

    def __init__(self, admission: EncodeAdmission, observer: RequestObserver) -> None:
        self.admission = admission
        self.observer = observer

    def send_embedding(
        self, pending: PendingRequest, origin: Origin, *, stored: bool, tensor: WireTensor | None
    ) -> EncodeReply:
        """Send the embedding to a request's caller, and return the reply."""
        seconds = time.monotonic() - pending.received_s
        request = pending.request
        reply = EncodeReply(
            id=request.id,
            key=request.key,
            origin=origin,
            stored=stored,
            tensor=tensor,
            service_time_s=seconds,
        )
        # Count the reply before the caller receives it, so that the caller's next scrape includes the reply.
        self.admission.record_reply(pending, seconds)
        self.observer.on_reply(pending, origin, stored=stored, seconds=seconds)
        pending.send_reply(reply)
        return reply

    def refuse(
        self, pending: PendingRequest, reason: Reason, message: str, retry_after_s: float | None = None
    ) -> None:
        """Reject one request, unless it already has a reply."""
        if pending.future.done():
            return
        self.observer.on_refusal(pending, reason)
        pending.send_reply(
            EncodeRefusal(id=pending.request.id, reason=reason, message=message, retry_after_s=retry_after_s)
        )

    def refuse_late(self, pending: PendingRequest) -> None:
        """Reject one request, because its deadline passed before a tower began to process it."""
        self.admission.record_reply(pending, time.monotonic() - pending.received_s)
        self.refuse(pending, "too_late", f"the work did not start within {pending.request.deadline_s:g} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPayload:
    """Model and tower input of one `EncodeJob`."""

    model: LoadedModel
    item: TowerItem


class BatchDispatcher:
    """Takes batches from the batcher on its own threads, runs them, and sends the replies. The caller must
    close the executors."""

    def __init__(
        self,
        batcher: Batcher[JobPayload],
        executors: Sequence[BatchExecutor],
        cache: ResultCache,
        replies: ReplySender,
        shares_features: Callable[[LoadedModel], bool],
        *,
        urgent_lanes: bool,
    ) -> None:
        """Create and start the threads. With `urgent_lanes`, each executor gets an additional lane for jobs
        whose service class is better than the classes of all running jobs.
        """
        self._shares_features = shares_features
        self._batcher = batcher
        self._executors = tuple(executors)
        self._cache = cache
        self._replies = replies
        self._observer, self._admission = replies.observer, replies.admission
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._deferred: dict[bytes, list[EncodeJob[JobPayload]]] = {}
        """Jobs that wait for features that another batch is computing, by feature key."""
        self._last_end_s: dict[BatchExecutor, float] = {}
        """Time at which each executor finished its last batch."""
        lanes = [executor for executor in self._executors for _ in range(executor.lanes)]
        urgent = self._executors if urgent_lanes else ()
        self._usual_lanes = len(lanes)
        # Towers run in this pool, so that the future catches their exceptions and the lane continues.
        self._computing = ThreadPoolExecutor(len(lanes) + len(urgent), "cornplug-compute")
        self._publishing = ThreadPoolExecutor(min(_MAX_PUBLISHERS, len(lanes)), "cornplug-publish")
        self._lanes = [
            threading.Thread(target=self._serve, args=(executor,), name=f"cornplug-lane-{i}", daemon=True)
            for i, executor in enumerate(lanes)
        ]
        self._lanes += [
            threading.Thread(
                target=self._serve_urgent, args=(executor,), name=f"cornplug-urgent-{i}", daemon=True
            )
            for i, executor in enumerate(urgent)
        ]
        for lane in self._lanes:
            lane.start()

    def is_alive(self) -> bool:
        """Return whether every lane is running and at least one executor is ready."""
        return all(lane.is_alive() for lane in self._lanes) and self.is_ready()

    def is_ready(self) -> bool:
        """Return whether at least one executor would accept a batch."""
        return any(executor.is_ready() for executor in self._executors)

    def close(self, deadline_s: float) -> bool:
        """Reject the jobs that are left in the batcher, end running tower passes between two layers, then end
        the threads. Call this after closing the batcher.

        Returns False if a pass is still running at the deadline, because its current layer takes too long.
        """
        self._closing.set()
        end = time.monotonic() + deadline_s
        for lane in self._lanes:
            lane.join(max(end - time.monotonic(), 0.0))
        ended = not any(lane.is_alive() for lane in self._lanes)
        self._computing.shutdown(wait=ended)
        self._publishing.shutdown(wait=ended)
        return ended

    def _serve(self, executor: BatchExecutor) -> None:
        while True:
            # If no executor is ready, take batches anyway, to reject them immediately.
            while not executor.is_ready() and self.is_ready() and not self._closing.is_set():
                executor.wait_ready(_POLL_S)
            batch = self._batcher.take_batch()
            if not batch:
                return
            self._run(batch, executor)
            # Free the batch's inputs while this thread waits for the next batch.
            del batch

    def _serve_urgent(self, executor: BatchExecutor) -> None:
        while (job := self._batcher.take_urgent_job(self._usual_lanes)) is not None:
            self._run([job], executor, urgent=True)

    def _run(
        self, batch: Sequence[EncodeJob[JobPayload]], executor: BatchExecutor, *, urgent: bool = False
    ) -> None:
        batch = self._defer_duplicates(batch)
        if not batch:
            return
        self._run_with_retry(batch, executor, urgent=urgent)
        with self._lock:
            deferred = [f for key in {f.feature_key for f in batch} for f in self._deferred.pop(key, ())]
        if deferred:
            self._run(deferred, executor, urgent=urgent)

    def _defer_duplicates(self, batch: Sequence[EncodeJob[JobPayload]]) -> list[EncodeJob[JobPayload]]:
        """Return the jobs whose features no other executor is computing. Other jobs are deferred until that
        executor has finished."""
        owned: list[EncodeJob[JobPayload]] = []
        with self._lock:
            running = frozenset(self._deferred)
            for job in batch:
                if job.feature_key in running:
                    self._deferred[job.feature_key].append(job)
                    continue
                owned.append(job)
                if self._shares_features(job.payload.model):
                    self._deferred.setdefault(job.feature_key, [])
        return owned

    def _run_with_retry(
        self, batch: Sequence[EncodeJob[JobPayload]], executor: BatchExecutor, *, urgent: bool
    ) -> None:
        if self._closing.is_set():
            return self._refuse(batch, "the service is stopping", retry_after_s=1.0, reason="overloaded")
        ready = self._ready_executor(executor)
        if ready is None:
            return self._refuse(batch, "no replica is running; all are being restarted", retry_after_s=1.0)
        error = self._run_once(batch, ready, urgent=urgent)
        if error is None:
            return None
        if isinstance(error, PassAbandoned):
            # A request gets this reply only if it joined a job after the pass ended, or at shutdown.
            why = "the batch was abandoned, because no request waited for it"
            return self._refuse(batch, why, retry_after_s=_POLL_S, reason="overloaded")
        if len(batch) == 1 and not isinstance(error, ReplicaLost):
            return self._fail(batch, error)
        log.warning("a batch of %d failed (%s); running its jobs one by one", len(batch), error)
        for job in batch:
            # A job that was alone in its batch is also retried, but only once, because it may have crashed
            # the replica.
            spare = self._ready_executor(ready)
            if spare is None:
                error = ReplicaLost("no replica is left")
            else:
                error = self._run_once([job], spare, urgent=urgent)
            if error is not None:
                self._fail([job], error)
        return None

    def _run_once(
        self, batch: Sequence[EncodeJob[JobPayload]], executor: BatchExecutor, *, urgent: bool
    ) -> BaseException | None:
        started = time.monotonic()
        done = self._computing.submit(self._compute, batch, executor, urgent=urgent)
        error = done.exception()
        if error is None:  # a failed batch may be short, so its time is not measured
            self._admission.record_batch(batch, time.monotonic() - started - done.result())
        return error

    def _ready_executor(self, preferred: BatchExecutor) -> BatchExecutor | None:
        return next((e for e in (preferred, *self._executors) if e.is_ready()), None)

    def _compute(
        self, batch: Sequence[EncodeJob[JobPayload]], executor: BatchExecutor, *, urgent: bool
    ) -> float:
        """Compute a batch, and pass its embeddings to the publishing threads. Return the seconds for which
        other batches delayed it.
        """
        index: dict[bytes, int] = {}
        distinct: list[EncodeJob[JobPayload]] = []
        for job in batch:
            if job.feature_key not in index:
                index[job.feature_key] = len(distinct)
                distinct.append(job)
        kept = tuple(self._cached_features(job) for job in distinct)
        encode_batch = EncodeBatch(
            items=tuple(job.payload.item for job in distinct),
            features=kept,
            targets=tuple((job.payload.model, index[job.feature_key]) for job in batch),
            returns_features=self._shares_features(distinct[0].payload.model),
            urgent=urgent,
            share=max(job.qos.share for job in batch),
            is_abandoned=lambda: (
                self._closing.is_set() or not any(_has_waiting_request(job) for job in batch)
            ),
        )
        ran = [job.tokens for job, known in zip(distinct, kept, strict=True) if known is None]
        with self._observer.record_batch(batch, ran):
            result, seconds = self._run_timed(executor, encode_batch)
        # If all features were cached, only the projector ran, and its time is the cost of the embeddings.
        token_s = seconds / max(1, sum(ran) or sum(job.tokens for job in batch))
        origins: list[Origin] = ["computed" if features is None else "cached" for features in kept]
        for job, embedding in zip(batch, result.embeddings, strict=True):
            i = index[job.feature_key]
            cost_s = job.tokens * token_s
            published = self._publishing.submit(self._publish, job, embedding, origins[i], cost_s)
            published.add_done_callback(partial(self._on_published, job))
            if origins[i] == "computed":
                origins[i] = "coalesced"
        self._cache_features(distinct, result, token_s)
        # A batch that is not urgent occupies its lane while it waits behind another batch on the same device.
        return result.paused_s + (result.waited_s if urgent else 0.0)

    def _run_timed(self, executor: BatchExecutor, batch: EncodeBatch) -> tuple[BatchResult, float]:
        """Run a batch. Return (result, seconds for which the batch used the device).

        On CUDA, a batch may start while kernels of the previous batch are still running. Therefore the time
        is counted from the end of the previous batch, unless an urgent batch paused this batch.
        """
        handed_s = time.monotonic()
        result = executor.run(batch)
        with self._lock:
            ended_s, began_s = time.monotonic(), handed_s + result.waited_s
            if not result.paused_s:
                began_s = max(began_s, self._last_end_s.get(executor, began_s))
            self._last_end_s[executor] = ended_s
        return result, max(0.0, ended_s - began_s - result.paused_s)

    def _cached_features(self, job: EncodeJob[JobPayload]) -> torch.Tensor | None:
        model = job.payload.model
        if not self._shares_features(model):
            return None
        return self._cache.look_up_features(job.feature_key, model.dtype)

    def _cache_features(
        self, distinct: Sequence[EncodeJob[JobPayload]], result: BatchResult, token_s: float
    ) -> None:
        for i, features in result.features.items():
            job = distinct[i]
            self._cache.cache_features(job.feature_key, features)
            if not job.payload.model.checkpoint.family.shares_features:
                continue  # features are larger than embeddings, and no other service would read them
            opener = job.requests[0]
            self._publishing.submit(
                self._cache.publish,
                PayloadKind.FEATURE,
                job.feature_key,
                features,
                opener.request.app,
                account=opener.account,
                cost_s=job.tokens * token_s,
            )

    def _publish(
        self, job: EncodeJob[JobPayload], embedding: torch.Tensor, origin: Origin, cost_s: float
    ) -> None:
        opener = job.requests[0]
        with self._observer.record_stage("publish", opener):
            stored = self._cache.publish(
                PayloadKind.EMBEDDING,
                job.key[0],
                embedding,
                opener.request.app,
                account=opener.account,
                cost_s=cost_s,
            )
        # Finish the job after publishing. A request that arrives earlier joins the job, and a request that
        # arrives later finds the embedding in the store.
        requests = self._batcher.finish(job)
        tensor = None if stored and not any(w.inline for w in requests) else to_wire(embedding)
        for pending in requests:
            self._replies.send_embedding(
                pending, origin, stored=stored, tensor=tensor if pending.inline or not stored else None
            )
            origin = "coalesced" if origin == "computed" else origin

    def _on_published(self, job: EncodeJob[JobPayload], done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            self._fail([job], error)

    def _fail(self, batch: Sequence[EncodeJob[JobPayload]], error: BaseException) -> None:
        """Log the error, and reject all requests in the batch."""
        log.error("encoding failed", exc_info=error)
        lost = isinstance(error, ReplicaLost)
        self._refuse(batch, str(error) if lost else INTERNAL_ERROR_MESSAGE, 1.0 if lost else None)

    def _refuse(
        self,
        batch: Sequence[EncodeJob[JobPayload]],
        message: str,
        retry_after_s: float | None,
        *,
        reason: Literal["internal", "overloaded"] = "internal",
    ) -> None:
        for job in batch:
            for pending in self._batcher.finish(job):
                self._replies.refuse(pending, reason, message, retry_after_s)


def _has_waiting_request(job: EncodeJob[JobPayload]) -> bool:
    return any(not pending.future.done() for pending in tuple(job.requests))
