"""From requests to embeddings: admit, batch, run the tower once, project, publish, answer.

    submit ─> admission threads ─> Batcher ─> one compute thread ─> one publishing thread
              check, digest, join             tower, projectors     store, answers

Every request gets exactly one answer. An error of one medium is that medium's answer; it
takes down neither its batch nor the process.
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

import msgspec
import torch

from cornplug import identity
from cornplug.codec import Kind
from cornplug.encoder_service.batcher import Answer, Batcher, Flight, Pace, Wait
from cornplug.encoder_service.meters import Meters
from cornplug.encoder_service.protocol import Encode, Encoded, Refused, Tensor
from cornplug.encoder_service.registry import Loaded, Registry
from cornplug.encoder_service.shelf import Shelf
from cornplug.encoder_service.towers.base import Item
from cornplug.encoder_service.towers.tensors import dtype_name, raw_bytes
from cornplug.errors import EncoderRefused
from cornplug.qos import Caller, Classes

Reason = Literal["unknown_model", "bad_input", "overloaded", "too_late", "internal"]
Origin = Literal["ran", "joined", "reused"]

MAX_BATCH_TOKENS: Final = 32_768
"""Rows that one tower pass may see, besides the first medium's: bounds its memory."""
_APP_MAX: Final = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a flight carries through the batcher."""

    model: Loaded
    item: Item


class Encoder:
    """The service without its sockets. Thread-safe; `close` ends its threads."""

    def __init__(
        self,
        registry: Registry,
        shelf: Shelf,
        *,
        secret: bytes,
        max_batch_items: int = 16,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        max_waiting: int = 256,
        classes: Classes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.classes = classes or Classes.single()
        self.meters = Meters(self.waiting)
        self._shelf = shelf
        shelf.on_failure = lambda reason: self.meters.store_failures.labels(reason).inc()
        self._secret = secret
        self._max_waiting = max_waiting
        self._clock = clock
        self._pace = Pace()
        self._lock = threading.Lock()
        self._waiting: set[Wait] = set()
        self._stopping = False
        self._batcher: Batcher[Work] = Batcher(
            max_items=max_batch_items, max_tokens=max_batch_tokens, clock=clock, on_late=self._refuse_late
        )
        self._admission = ThreadPoolExecutor(2, "cornplug-admit")
        self._compute = ThreadPoolExecutor(1, "cornplug-compute")
        self._publishing = ThreadPoolExecutor(1, "cornplug-publish")
        self._dispatcher = threading.Thread(target=self._dispatch, name="cornplug-dispatch", daemon=True)
        self._dispatcher.start()

    def submit(
        self, request: Encode, *, inline: bool = False, caller: Caller | None = None
    ) -> Future[Answer]:
        """Ask for one embedding. The future never fails: errors are `Refused` answers.

        Without a `caller` it is served in the class of its app, which is believed.

        Cancel the future when nobody waits any more. With `inline` the answer has the tensor
        even where the store took it.
        """
        qos = self.classes.of_app(request.app) if caller is None else caller.qos
        if caller is not None and caller.app is not None:
            request = msgspec.structs.replace(request, app=caller.app)
        wait = Wait(request=request, received_s=self._clock(), qos=qos, inline=inline)
        model = self.registry.by_identity(request.identity)
        if model is None:
            names = ", ".join(m.name for m in self.registry.served())
            self._refuse(wait, "unknown_model", f"no model of that identity is served; served: {names}")
            return wait.future
        with self._lock:
            full = self._stopping or len(self._waiting) >= self._max_waiting
            if not full:
                self._waiting.add(wait)
        if full:
            why = (
                "the service is stopping" if self._stopping else f"{self._max_waiting} requests wait already"
            )
            self._refuse(wait, "overloaded", why)
            return wait.future
        wait.future.add_done_callback(lambda _: self._forget(wait))
        admitted = self._admission.submit(self._admit, wait, model)
        admitted.add_done_callback(lambda done: self._check(done, (wait,)))
        return wait.future

    def waiting(self) -> int:
        """Requests admitted and not answered yet."""
        with self._lock:
            return len(self._waiting)

    def healthy(self) -> bool:
        """False once the dispatcher has ended."""
        return self._dispatcher.is_alive()

    def drain(self, deadline_s: float) -> bool:
        """Admit nothing more, and wait until what was admitted is answered. False when the
        deadline passed first."""
        with self._lock:
            self._stopping = True
        end = time.monotonic() + deadline_s
        while self.waiting():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        """Answer what is left, then end the threads."""
        self._admission.shutdown(wait=True)
        self._batcher.close()
        self._dispatcher.join()
        self._compute.shutdown(wait=True)
        self._publishing.shutdown(wait=True)

    def _admit(self, wait: Wait, model: Loaded) -> None:
        request = wait.request
        if wait.future.cancelled():
            return
        if len(request.key) != identity.DIGEST_BYTES:
            problem = f"key: {len(request.key)} bytes, want {identity.DIGEST_BYTES}"
            return self._refuse(wait, "bad_input", problem)
        if not 1 <= len(request.app) <= _APP_MAX:
            return self._refuse(wait, "bad_input", f"app: want 1 to {_APP_MAX} characters")
        if self._answer_from_store(wait, model):
            return None
        try:
            item = model.tower.prepare(request.inputs)
        except EncoderRefused as e:
            return self._refuse(wait, "bad_input", str(e))
        feature_key = identity.feature_key(
            self._secret, model.served.tower_fp, model.tower_spec_fp, item.digests, request.salt
        )
        self._batcher.join_or_add(
            Flight(
                key=(request.key, request.identity),
                feature_key=feature_key,
                tower=model.tower,
                tokens=item.tokens,
                work=Work(model=model, item=item),
                waits=[wait],
            )
        )
        return None

    def _answer_from_store(self, wait: Wait, model: Loaded) -> bool:
        key = wait.request.key
        if not wait.inline:
            present = self._shelf.present(key)
            if present:
                self._answer(wait, "reused", stored=True, tensor=None)
            return present
        tensor = self._shelf.fetch(Kind.EMBEDDING, key, model.dtype)
        if tensor is not None:
            self._answer(wait, "reused", stored=True, tensor=_to_wire(tensor))
        return tensor is not None

    def _dispatch(self) -> None:
        while batch := self._batcher.take():
            started = time.monotonic()
            done = self._compute.submit(self._encode, batch)
            if done.exception() is not None and len(batch) > 1:
                log.warning("a batch of %d failed (%s); running each alone", len(batch), done.exception())
                for flight in batch:
                    alone = self._compute.submit(self._encode, [flight])
                    self._check(alone, self._land_if(flight, alone))
            else:
                self._check(done, self._land_if(batch[0], done))
            self._pace.observe(len(batch), time.monotonic() - started)

    def _land_if(self, flight: Flight[Work], done: Future[None]) -> Sequence[Wait]:
        return self._batcher.land(flight) if done.exception() is not None else ()

    def _encode(self, batch: Sequence[Flight[Work]]) -> None:
        """One tower pass for what is not kept, then each projector once for its models."""
        features: dict[bytes, torch.Tensor] = {}
        missing: dict[bytes, Flight[Work]] = {}
        for flight in batch:
            key = flight.feature_key
            if key in features or key in missing:
                continue
            kept = self._kept(flight)
            if kept is None:
                missing[key] = flight
            else:
                features[key] = kept
        if missing:
            tower = batch[0].work.model.tower
            made = tower.encode([flight.work.item for flight in missing.values()])
            features.update(zip(missing, made, strict=True))
            self.meters.batch_items.observe(len(missing))
            self.meters.tower_passes.inc(len(missing))
        origins: dict[bytes, Origin] = {key: "ran" if key in missing else "reused" for key in features}
        # All projected before any is published: a failure here leaves the batch whole for a retry.
        embedded = [pair for group in _by_projector(batch) for pair in _project(group, features)]
        for flight, embedding in embedded:
            published = self._publishing.submit(self._publish, flight, embedding, origins[flight.feature_key])
            published.add_done_callback(partial(self._published, flight))
            if origins[flight.feature_key] == "ran":
                origins[flight.feature_key] = "joined"
        for key, flight in missing.items():
            if flight.work.model.checkpoint.family.shares_features:
                host = features[key].to("cpu").contiguous()
                self._shelf.keep(key, host)
                app = flight.waits[0].request.app
                self._publishing.submit(self._shelf.publish, Kind.FEATURE, key, host, app)

    def _kept(self, flight: Flight[Work]) -> torch.Tensor | None:
        model = flight.work.model
        if not model.checkpoint.family.shares_features:
            return None
        return self._shelf.features(flight.feature_key, model.dtype)

    def _publish(self, flight: Flight[Work], embedding: torch.Tensor, origin: Origin) -> None:
        app = flight.waits[0].request.app
        stored = self._shelf.publish(Kind.EMBEDDING, flight.key[0], embedding, app)
        # Landed after publishing: who asks in between joins, who asks later finds it in the store.
        waits = self._batcher.land(flight)
        tensor = None if stored and not any(w.inline for w in waits) else _to_wire(embedding)
        for wait in waits:
            self._answer(wait, origin, stored=stored, tensor=tensor if wait.inline or not stored else None)
            origin = "joined" if origin == "ran" else origin

    def _published(self, flight: Flight[Work], done: Future[None]) -> None:
        self._check(done, self._land_if(flight, done))

    def _answer(self, wait: Wait, tower: Origin, *, stored: bool, tensor: Tensor | None) -> None:
        seconds = self._clock() - wait.received_s
        request = wait.request
        answer = Encoded(
            id=request.id, key=request.key, tower=tower, stored=stored, tensor=tensor, seconds=seconds
        )
        # Counted before the caller hears of it, so that it finds itself in the next scrape.
        self.meters.answers.labels(request.app, tower, wait.qos.name).inc()
        self.meters.seconds.observe(seconds)
        wait.answer(answer)

    def _refuse_late(self, wait: Wait) -> None:
        self._refuse(wait, "too_late", f"not begun within {wait.request.deadline_s:g} s")

    def _refuse(self, wait: Wait, reason: Reason, message: str) -> None:
        if wait.future.done():
            return
        retry = self._pace.retry_after_s(self.waiting()) if reason == "overloaded" else None
        self.meters.refusals.labels(reason, wait.qos.name).inc()
        wait.answer(Refused(id=wait.request.id, reason=reason, message=message, retry_after_s=retry))

    def _check(self, done: Future[None], waits: Sequence[Wait]) -> None:
        """Whatever a thread failed with, those who wait for it are told so."""
        error = done.exception()
        if error is None:
            return
        log.error("encoding failed", exc_info=error)
        for wait in waits:
            self._refuse(wait, "internal", f"{type(error).__name__}: {error}")

    def _forget(self, wait: Wait) -> None:
        with self._lock:
            self._waiting.discard(wait)


def _by_projector(batch: Sequence[Flight[Work]]) -> list[list[Flight[Work]]]:
    groups: dict[int, list[Flight[Work]]] = {}
    for flight in batch:
        groups.setdefault(id(flight.work.model.projector), []).append(flight)
    return list(groups.values())


def _project(
    group: Sequence[Flight[Work]], features: dict[bytes, torch.Tensor]
) -> list[tuple[Flight[Work], torch.Tensor]]:
    projector = group[0].work.model.projector
    made = projector.project(
        [features[flight.feature_key] for flight in group], [flight.work.item for flight in group]
    )
    # On the CPU before the next batch begins, so that a GPU's memory is free again.
    return [(flight, e.to("cpu").contiguous()) for flight, e in zip(group, made, strict=True)]


def _to_wire(tensor: torch.Tensor) -> Tensor:
    return Tensor(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), data=bytes(raw_bytes(tensor)))
