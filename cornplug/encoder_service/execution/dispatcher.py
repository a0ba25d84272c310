"""Below the queue: batches to executors as they fall idle, embeddings to the store, answers to who waits.

    Batcher ─take─> a lane of an executor ─Made─> publishing threads ─land─> Replies
                    (one thread each)             store, then answers

A batch is formed when a lane is free for it, as late as possible. What an executor fails on is
tried again one by one; what a dying one held is tried once more on another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Protocol

import torch

from cornplug.codec import PayloadKind
from cornplug.encoder_service.execution.executor import BatchExecutor, BatchResult, EncodeBatch
from cornplug.encoder_service.execution.result_cache import ResultCache
from cornplug.encoder_service.models.registry import LoadedModel
from cornplug.encoder_service.scheduling.batcher import Batcher, EncodeJob, PendingRequest
from cornplug.encoder_service.telemetry.observer import RequestObserver
from cornplug.encoder_service.towers.base import TowerItem
from cornplug.encoder_service.wire.messages import WireTensor
from cornplug.encoder_service.wire.status_codes import A_FAULT
from cornplug.encoder_service.wire.tensors import to_wire
from cornplug.errors import ReplicaLost

Origin = Literal["computed", "coalesced", "cached"]

_LOOK_S: Final = 0.05
"""How often a lane without its executor looks whether there is another."""
_MAX_PUBLISHERS: Final = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPayload:
    """What a flight carries through the batcher."""

    model: LoadedModel
    item: TowerItem


class ReplySink(Protocol):
    """Who tells those that wait. Thread-safe."""

    def answer(
        self, pending: PendingRequest, origin: Origin, *, stored: bool, tensor: WireTensor | None
    ) -> None: ...

    def refuse_internal(self, pending: PendingRequest, message: str, retry_after_s: float | None) -> None: ...

    def computed(self, batch: Sequence[EncodeJob[JobPayload]], seconds: float) -> None:
        """A batch has left its executor in good order, after `seconds` in it."""


class BatchDispatcher:
    """Owns the threads between batcher and answers. Does not own the executors."""

    def __init__(
        self,
        batcher: Batcher[JobPayload],
        executors: Sequence[BatchExecutor],
        shelf: ResultCache,
        observer: RequestObserver,
        replies: ReplySink,
        shares_features: Callable[[LoadedModel], bool],
    ) -> None:
        self._shares_features = shares_features
        self._batcher = batcher
        self._executors = tuple(executors)
        self._shelf = shelf
        self._observer = observer
        self._replies = replies
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._behind: dict[bytes, list[EncodeJob[JobPayload]]] = {}
        """Feature keys in a tower now -> flights of other batches that want the same features."""
        lanes = [executor for executor in self._executors for _ in range(executor.lanes)]
        # A future holds whatever a tower fails with, so that nothing ends a lane.
        self._computing = ThreadPoolExecutor(len(lanes), "cornplug-compute")
        self._publishing = ThreadPoolExecutor(min(_MAX_PUBLISHERS, len(lanes)), "cornplug-publish")
        self._lanes = [
            threading.Thread(target=self._serve, args=(executor,), name=f"cornplug-lane-{i}", daemon=True)
            for i, executor in enumerate(lanes)
        ]
        for lane in self._lanes:
            lane.start()

    def alive(self) -> bool:
        """Every lane goes on, and something computes."""
        return all(lane.is_alive() for lane in self._lanes) and self.ready()

    def ready(self) -> bool:
        """Whether any executor would take a batch."""
        return any(executor.ready() for executor in self._executors)

    def close(self) -> None:
        """Once the batcher is closed: finish what it holds, then end the threads."""
        self._closing.set()
        for lane in self._lanes:
            lane.join()
        self._computing.shutdown(wait=True)
        self._publishing.shutdown(wait=True)

    def _serve(self, executor: BatchExecutor) -> None:
        while True:
            # Where nothing computes, batches are taken all the same: to be refused, not to wait.
            while not executor.ready() and self.ready() and not self._closing.is_set():
                executor.wait_ready(_LOOK_S)
            batch = self._batcher.take()
            if not batch:
                return
            self._run(batch, executor)

    def _run(self, batch: Sequence[EncodeJob[JobPayload]], executor: BatchExecutor) -> None:
        batch = self._alone_in_tower(batch)
        if not batch:
            return
        self._attempt(batch, executor)
        with self._lock:
            waited = [f for key in {f.feature_key for f in batch} for f in self._behind.pop(key, ())]
        if waited:
            self._run(waited, executor)

    def _alone_in_tower(self, batch: Sequence[EncodeJob[JobPayload]]) -> list[EncodeJob[JobPayload]]:
        """What of the batch is in no other executor's tower; the rest is run when that has ended."""
        mine: list[EncodeJob[JobPayload]] = []
        with self._lock:
            others = frozenset(self._behind)
            for job in batch:
                if job.feature_key in others:
                    self._behind[job.feature_key].append(job)
                    continue
                mine.append(job)
                if self._shares_features(job.payload.model):
                    self._behind.setdefault(job.feature_key, [])
        return mine

    def _attempt(self, batch: Sequence[EncodeJob[JobPayload]], executor: BatchExecutor) -> None:
        chosen = self._ready_one(executor)
        if chosen is None:
            return self._refuse(batch, "no replica is running; they are being restarted", retry_after_s=1.0)
        error = self._try(batch, chosen)
        if error is None:
            return None
        if len(batch) == 1 and not isinstance(error, ReplicaLost):
            return self._fail(batch, error)
        log.warning("a batch of %d failed (%s); running each alone", len(batch), error)
        for job in batch:
            # One that has lost a replica already, alone in its batch, may be what kills them.
            again = self._ready_one(chosen)
            error = ReplicaLost("no replica is left") if again is None else self._try([job], again)
            if error is not None:
                self._fail([job], error)
        return None

    def _try(self, batch: Sequence[EncodeJob[JobPayload]], executor: BatchExecutor) -> BaseException | None:
        started = time.monotonic()
        error = self._computing.submit(self._compute, batch, executor).exception()
        if error is None:  # what failed at once would make the tower look quick
            self._replies.computed(batch, time.monotonic() - started)
        return error

    def _ready_one(self, first: BatchExecutor) -> BatchExecutor | None:
        return next((e for e in (first, *self._executors) if e.ready()), None)

    def _compute(self, batch: Sequence[EncodeJob[JobPayload]], executor: BatchExecutor) -> None:
        """One task; its embeddings to the publishing threads. Nothing is published of a task that fails."""
        index: dict[bytes, int] = {}
        first: list[EncodeJob[JobPayload]] = []
        for job in batch:
            if job.feature_key not in index:
                index[job.feature_key] = len(first)
                first.append(job)
        kept = tuple(self._kept(job) for job in first)
        task = EncodeBatch(
            items=tuple(job.payload.item for job in first),
            features=kept,
            wanted=tuple((job.payload.model, index[job.feature_key]) for job in batch),
            keep=self._shares_features(first[0].payload.model),
        )
        ran = [job.tokens for job, known in zip(first, kept, strict=True) if known is None]
        with self._observer.computing(batch, ran):
            made = executor.run(task)
        origins: list[Origin] = ["computed" if features is None else "cached" for features in kept]
        for job, embedding in zip(batch, made.embeddings, strict=True):
            place = index[job.feature_key]
            published = self._publishing.submit(self._publish, job, embedding, origins[place])
            published.add_done_callback(partial(self._published, job))
            if origins[place] == "computed":
                origins[place] = "coalesced"
        self._keep(first, made)

    def _kept(self, job: EncodeJob[JobPayload]) -> torch.Tensor | None:
        model = job.payload.model
        if not self._shares_features(model):
            return None
        return self._shelf.features(job.feature_key, model.dtype)

    def _keep(self, first: Sequence[EncodeJob[JobPayload]], made: BatchResult) -> None:
        for place, features in made.features.items():
            job = first[place]
            self._shelf.keep(job.feature_key, features)
            if not job.payload.model.checkpoint.family.shares_features:
                continue  # larger than the embeddings, and of no use to any other service
            first_wait = job.requests[0]
            self._publishing.submit(
                self._shelf.publish,
                PayloadKind.FEATURE,
                job.feature_key,
                features,
                first_wait.request.app,
                account=first_wait.account,
            )

    def _publish(self, job: EncodeJob[JobPayload], embedding: torch.Tensor, origin: Origin) -> None:
        first = job.requests[0]
        with self._observer.stage("publish", first):
            stored = self._shelf.publish(
                PayloadKind.EMBEDDING, job.key[0], embedding, first.request.app, account=first.account
            )
        # Landed after publishing: who asks in between joins, who asks later finds it in the store.
        requests = self._batcher.finish(job)
        tensor = None if stored and not any(w.inline for w in requests) else to_wire(embedding)
        for pending in requests:
            self._replies.answer(
                pending, origin, stored=stored, tensor=tensor if pending.inline or not stored else None
            )
            origin = "coalesced" if origin == "computed" else origin

    def _published(self, job: EncodeJob[JobPayload], done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            self._fail([job], error)

    def _fail(self, batch: Sequence[EncodeJob[JobPayload]], error: BaseException) -> None:
        """Whatever a thread failed with, those who wait for it are told so."""
        log.error("encoding failed", exc_info=error)
        lost = isinstance(error, ReplicaLost)
        self._refuse(batch, str(error) if lost else A_FAULT, 1.0 if lost else None)

    def _refuse(
        self, batch: Sequence[EncodeJob[JobPayload]], message: str, retry_after_s: float | None
    ) -> None:
        for job in batch:
            for pending in self._batcher.finish(job):
                self._replies.refuse_internal(pending, message, retry_after_s)
