"""Scheduler half of the encoder-cache connector. It finds embeddings within a deadline.

    unknown ──leased in the store───────────────────────────> arrived ──> workers copy ──> engine's own cache
       └──send a request──> requested ──leased, or in hand────┘               └── corrupt, out of reach
                               └──absent, refused, late──> failed ──────────────> the engine encodes

An item (the embedding of one image, video or audio) counts as available when its entry is leased
(`embedding_leases.py`), or when its bytes are in this process. This half never reads the bytes of an entry. A
worker that cannot load a leased entry lets the engine's tower encode the item in the same step
(`late_misses.py`). While the service computes the embedding, only requests that contain the item wait, or
have the tokens before the item prefilled (`early_prefill.py`). The engine's own thread talks to the store.
The store replies in 0.1 ms. Switching to another thread and back would take longer, because vLLM's busy loop
holds Python's interpreter lock."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cornplug.codec import ITEM_BYTES
from cornplug.encoder_service.formats.messages import EncodeReply, WireTensor
from cornplug.encoder_service.formats.tensors import dtype_name
from cornplug.engine_common import weights_guard
from cornplug.engine_common.embeddings import EmbeddingPublisher, ExpectedEmbedding
from cornplug.engine_common.load_policy import FetchRule
from cornplug.engine_common.runtime import EMBEDDING, EngineRuntime
from cornplug.errors import CodecError, CornplugError, StoreError
from cornplug.metrics import Tally
from cornplug.vllm_connector.cpu_use import WAKE_TIMER
from cornplug.vllm_connector.media.early_prefill import EarlyPrefill
from cornplug.vllm_connector.media.embedding_leases import MAX_AGE_S, EmbeddingLeases
from cornplug.vllm_connector.media.encoder_requests import EncoderRequests, PendingEmbedding
from cornplug.vllm_connector.media.metadata import (
    ArrivedEmbedding,
    CornplugECMetadata,
    CornplugECWorkerMetadata,
    LeasedRows,
)
from cornplug.vllm_connector.media.mm_identifiers import is_stale, key_of
from cornplug.vllm_connector.media.partial_models import LostEmbeddings
from cornplug.vllm_connector.media.video_digest import unshared_reason
from cornplug.vllm_connector.model.model_config import embedding_width

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


_MAX_WAITING_BYTES = 1 << 30
"""Maximum total size in bytes of embeddings that were requested or have arrived. Above this limit, requests
for further embeddings wait."""
_MAX_METADATA_BYTES = 256 << 10
"""Maximum size in bytes of rows in a service's reply that are sent to the workers in a step's metadata.
Larger rows are first saved in the store, and then leased."""
_IDLE_WAIT_S = 0.005
"""Length in seconds of one wait in an idle engine. The engine notices a new request at most this much
later."""
_IDLE_STEP_S = 0.020
"""Maximum seconds between two steps of an engine whose requests all wait for the encoder service."""


class ECScheduler:
    """Scheduler half of the encoder-cache connector in one engine core. It decides which embeddings to load
    from the store, to request from the encoder service, or to leave to the engine. The engine's thread polls.
    The service's replies arrive on other threads."""

    def __init__(
        self,
        config: VllmConfig,
        runtime: EngineRuntime,
        tally: Tally,
        early: EarlyPrefill | None = None,
        *,
        encoder_only: bool = False,
    ) -> None:
        self._runtime = runtime
        self._lost_embeddings = LostEmbeddings(runtime) if encoder_only else None
        """Embeddings to save again, in an engine that runs only its encoder (see `LostEmbeddings`). None in
        other engines. An engine with this object sends no requests to an encoder service."""
        self._tally = tally
        self._dtype = dtype_name(config.model_config.dtype)
        self._width = embedding_width(config)
        self._service = EncoderRequests(config, runtime)
        parallel = config.parallel_config
        # Only the first pipeline stage has the encoder.
        self._leases = EmbeddingLeases(
            runtime, parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
        )
        self._cache_rows: float = math.inf
        """Number of rows that the engine's encoder cache can take."""
        self._publisher = EmbeddingPublisher(runtime, lambda outcome, size: None)
        self._items: dict[str, PendingEmbedding] = {}
        self._waiting_bytes = 0
        self._cached: set[str] = set()
        """Identifiers of embeddings in the engine's own encoder cache."""
        self._to_load: list[PendingEmbedding] = []
        self._allocated: set[str] = set()
        """Identifiers of embeddings for which the engine reserved encoder-cache memory in this step."""
        self._rule = FetchRule(runtime.config.store.load_when)
        self._early = early or EarlyPrefill()
        self._early.set_callbacks(
            self._is_in_flight, lambda: tally.count("cornplug_early_prefills_total", runtime.app)
        )

    # -- the engine's calls ------------------------------------------------------------------

    def can_schedule(self, request: Request, computed: int) -> bool:
        """Return whether vLLM may schedule `request` now. Returns False while the request waits for
        embeddings, unless enough of its tokens before the first embedding in flight can be prefilled early.

        This method is called hundreds of times per second and never waits.
        """
        last = request.mm_features[-1].mm_position if request.mm_features else None
        if last is None or last.offset + last.length <= computed:
            return True  # As in vLLM's scheduler, features are ordered by position.
        begun, end = True, -1
        now = time.monotonic()
        left, counted = self._cache_rows, set[str]()
        for feature in request.mm_features:
            identifier = feature.identifier
            position = feature.mm_position
            if position.offset + position.length <= computed:
                continue
            if self._is_cached(identifier):
                if self._lost_embeddings is not None:
                    self._lost_embeddings.check(identifier, request.request_id)
                continue
            if identifier not in counted:
                left -= position.get_num_embeds()
                counted.add(identifier)
            # vLLM schedules items in order, and no item that does not fit into its encoder cache. Items
            # beyond it are requested in advance, and the request does not wait for them.
            is_next = left >= 0
            item = self._items.get(identifier)
            if item is None:
                is_full = self._waiting_bytes > _MAX_WAITING_BYTES
                if is_full and not (is_next and self._is_waiting(request)):
                    begun = begun and not is_next
                    if is_next:
                        continue
                    break
                item = self._begin_item(feature, request, now)
                if item is None:
                    continue
                self._items[identifier] = item
                self._waiting_bytes += item.size_bytes
            item.waiting_requests.add(request.request_id)
            if item.is_settled:
                self._renew_lease(item, now)
            else:
                self._poll_item(item, now)
                if is_next and end < 0 and not item.is_settled:
                    end = position.offset
        if begun and end >= 0:
            return self._early.try_admit(request, computed, end)
        if begun:
            self._early.forget(request.request_id)
        return begun

    def limit_rows(self, cache_rows: int) -> None:
        """Set the number of rows that the engine's encoder cache can take."""
        self._cache_rows = cache_rows

    def has_arrived(self, identifier: str) -> bool:
        """Return whether this embedding is leased or in this process, and usable. vLLM calls this only if the
        engine's own cache lacks the embedding."""
        if identifier in self._cached:
            # The engine's encoder cache was reset. vLLM does not report such a reset to connectors.
            self._cached.clear()
        item = self._items.get(identifier)
        return item is not None and item.is_usable

    def record_allocation(self, request: Request, input_id: int) -> None:
        """Record that the engine has reserved encoder-cache memory for an embedding that has arrived, or that
        the engine encodes itself. `input_id` is the index of its media item in the request."""
        identifier = request.mm_features[input_id].identifier
        self._allocated.add(identifier)
        item = self._remove_item(identifier)
        if item is not None and item.arrived is not None and item.is_usable:
            item.arrived = replace(item.arrived, request_id=request.request_id, input_id=input_id)
            self._to_load.append(item)
        elif item is not None:
            self._leases.release(item.arrived)

    def build_metadata(self, output: SchedulerOutput) -> CornplugECMetadata:
        """Return the message for the worker halves. It contains the embeddings to load before this step's
        forward pass."""
        # An embedding that a step evicts and then loads again is in the cache after that step.
        self._cached.difference_update(output.free_encoder_mm_hashes)
        self._cached |= self._allocated
        self._allocated.clear()
        if not output.total_num_scheduled_tokens:
            self._wait_if_idle()
        for item in self._to_load:
            if not self._leases.mark_sent(item):
                self._count_loaded(item)
        moves = CornplugECMetadata(
            arrived=self._promised_embeddings(),
            save_again=[] if self._lost_embeddings is None else self._lost_embeddings.drain(),
            publish=not weights_guard.has_replaced_weights() and self._runtime.config.engine.share_embeddings,
            epoch=weights_guard.epoch(),
        )
        self._to_load.clear()
        return moves

    def stop(self) -> list[ArrivedEmbedding]:
        """Stop fetching embeddings. Returns the embeddings that the engine expects with the next step. The
        engine has already reserved memory for them."""
        self._items = {identifier: item for identifier, item in self._items.items() if item.is_usable}
        return self._promised_embeddings()

    def _promised_embeddings(self) -> list[ArrivedEmbedding]:
        return [item.arrived for item in self._to_load if item.arrived is not None]

    def find_arrived(self, identifier: str) -> ArrivedEmbedding | None:
        """Return an embedding that has arrived and for which the engine has not reserved memory yet. Return
        None if there is no such embedding."""
        item = self._items.get(identifier)
        return item.arrived if item is not None and item.is_usable else None

    def finish_request(self, request: Request) -> None:
        """Handle the end of a request: drop embeddings for which no other request waits."""
        if self._lost_embeddings is not None:
            self._lost_embeddings.finish_request(request.request_id)
        self._early.forget(request.request_id)
        for feature in request.mm_features:
            item = self._items.get(feature.identifier)
            if item is not None:
                item.waiting_requests.discard(request.request_id)
                if not item.waiting_requests:
                    self._remove_item(feature.identifier)
                    self._leases.release(item.arrived)

    def handle_acks(self, acks: CornplugECWorkerMetadata) -> None:
        """Count the outcomes of the workers' loads and saves, and record their measurements."""
        for item, reason in self._leases.handle_acks(acks):
            if reason:
                self._tally.count("cornplug_misses_total", self._runtime.app, EMBEDDING, reason)
            else:
                self._count_loaded(item)
        for rows, seconds in acks.encode_times:
            self._rule.record_encode(rows, seconds)
        for size, seconds in acks.load_times:
            self._rule.record_read(size, seconds)
        for outcome, size in acks.saves:
            self._tally.count("cornplug_saves_total", self._runtime.app, EMBEDDING, outcome)
            if outcome == "stored":
                self._tally.count("cornplug_bytes_total", self._runtime.app, EMBEDDING, "save", amount=size)

    def close(self) -> None:
        """Close the connection to the encoder service, and stop all threads."""
        self._service.close()
        self._publisher.close()

    def _wait_if_idle(self) -> None:
        """Wait up to `_IDLE_STEP_S` for a reply from the service, if any embedding is in flight.

        Without this wait, vLLM would poll 650 times per second. The engine core and a worker would occupy two
        cores that the encoder needs.
        """
        if all(item.is_settled for item in self._items.values()):
            return
        end = time.monotonic() + _IDLE_STEP_S
        while not self._service.wait_for_reply(_IDLE_WAIT_S) and time.monotonic() < end:
            if WAKE_TIMER.has_pending_input():
                return

    # -- fetching ---------------------------------------------------------------------------

    def _is_in_flight(self, identifier: str) -> bool:
        item = self._items.get(identifier)
        return item is not None and not item.is_settled

    def _is_cached(self, identifier: str) -> bool:
        return identifier in self._cached or identifier in self._allocated

    def _is_waiting(self, request: Request) -> bool:
        """Return whether the request already waits for an embedding. Such a request may always request
        further embeddings. Otherwise all requests could wait for each other."""
        items = (self._items.get(feature.identifier) for feature in request.mm_features)
        return any(item is not None and request.request_id in item.waiting_requests for item in items)

    def _remove_item(self, identifier: str) -> PendingEmbedding | None:
        item = self._items.pop(identifier, None)
        if item is not None:
            self._waiting_bytes -= item.size_bytes
        return item

    def _count_loaded(self, item: PendingEmbedding) -> None:
        app = self._runtime.app
        self._tally.count("cornplug_hits_total", app, EMBEDDING, item.source)
        self._tally.count("cornplug_saved_tower_passes_total", app)
        self._tally.count("cornplug_bytes_total", app, EMBEDDING, "load", amount=item.size_bytes)

    def _begin_item(self, feature: Any, request: Request, now: float) -> PendingEmbedding | None:
        """Create an item: lease its embedding in the store, or request it from the service. Return None if
        the engine is not sharing embeddings now."""
        engine = self._runtime.config.engine
        # In an engine without a tower, the embedding rows arrive with the request.
        if weights_guard.has_replaced_weights() or not engine.share_embeddings or engine.tower == "service":
            return None
        rows = feature.mm_position.get_num_embeds()
        key = key_of(feature.identifier, weights_guard.epoch())
        if key is None:
            return self._fail_unshared(feature.identifier, rows, now)
        deadline = now + self._rule.encode_deadline_s(rows, ceiling_s=self._runtime.config.encoder.deadline_s)
        expected = ExpectedEmbedding(key, rows, self._width, self._dtype)
        size = rows * self._width * ITEM_BYTES[self._dtype]
        item = PendingEmbedding(feature.identifier, expected, size, deadline, now)
        if not self._rule.should_fetch(rows=rows, size_bytes=item.size_bytes):
            self._fail_item(item, "cheaper")
            return item
        store_problem = ""
        try:
            try:
                if self._lease_item(item, "store"):
                    return item
            except StoreError as e:
                # The service can still send the bytes in its reply.
                store_problem = e.reason
            if self._lost_embeddings is not None:
                self._fail_item(item, store_problem or "absent")
                return item
            self._service.submit(item, feature, request)
        except CornplugError as e:
            self._fail_item(item, store_problem or e.reason)
        return item

    def _fail_unshared(self, identifier: str, rows: int, now: float) -> PendingEmbedding:
        """Create an item in the failed state, for media without an embedding key, and count the miss."""
        stale = is_stale(identifier, weights_guard.epoch())
        reason = "weights_updated" if stale else unshared_reason(identifier) or "foreign_name"
        item = PendingEmbedding(identifier, ExpectedEmbedding(b"", rows), 0, now, now)
        self._fail_item(item, reason)
        return item

    def _poll_item(self, item: PendingEmbedding, now: float) -> None:
        """Complete or fail an item, if the service has replied or the item's deadline has passed."""
        try:
            if item.rows is not None:
                if item.save_outcome or now >= item.deadline_s:
                    self._take_saved_rows(item, item.rows)
            elif item.reply is not None and item.reply.done():
                self._handle_reply(item, item.reply.result())
            elif now >= item.deadline_s:
                self._fail_item(item, self._service.policy.record_timeout(now))
        except CornplugError as e:
            self._fail_item(item, self._service.policy.record_failure(e, time.monotonic()))

    def _lease_item(self, item: PendingEmbedding, source: str) -> bool:
        try:
            arrived = self._leases.lease(item.identifier, item.expected)
        except CodecError as e:
            if e.reason == "wrong_shape":
                raise
            self._tally.count("cornplug_misses_total", self._runtime.app, EMBEDDING, e.reason)
            return False
        if arrived is None:
            return False
        self._complete_item(item, arrived, source)
        return True

    def _renew_lease(self, item: PendingEmbedding, now: float) -> None:
        """Lease an item's embedding again, if its lease is old. If that fails, the engine encodes the
        item."""
        old = item.arrived
        if old is None or not isinstance(old.data, LeasedRows) or now < item.arrived_s + MAX_AGE_S:
            return
        reason, item.arrived = "evicted", None
        try:
            item.arrived = self._leases.lease(item.identifier, item.expected)
            item.arrived_s = now
        except CornplugError as e:
            reason = e.reason
        self._leases.release(old)
        if item.arrived is None:
            self._fail_item(item, reason)

    def _handle_reply(self, item: PendingEmbedding, reply: EncodeReply) -> None:
        source = self._service.policy.check_reply(reply, item.expected)
        if reply.tensor is None:
            if not self._lease_item(item, source):
                self._fail_item(item, "evicted")
            return
        tensor = reply.tensor
        if not reply.stored:
            # The service could not store the embedding, for example because it runs on another host. Save the
            # embedding here, also for the other engines on this host.
            self._publisher.enqueue(item.expected.key, tensor, on_end=partial(self._record_saved, item))
            if len(tensor.data) > _MAX_METADATA_BYTES:
                item.rows, item.source = tensor, source
                return
        self._complete_item(
            item, ArrivedEmbedding(item.identifier, tensor.dtype, tensor.shape, tensor.data), source
        )

    def _record_saved(self, item: PendingEmbedding, outcome: str) -> None:
        item.save_outcome = outcome
        self._service.notify()

    def _take_saved_rows(self, item: PendingEmbedding, rows: WireTensor) -> None:
        """Lease rows from a reply that were saved in the store. If they were not saved, send their bytes."""
        item.rows = None
        if item.save_outcome in ("stored", "present"):
            with suppress(CornplugError):
                if self._lease_item(item, item.source):
                    return
        arrived = ArrivedEmbedding(item.identifier, rows.dtype, rows.shape, rows.data)
        self._complete_item(item, arrived, item.source)

    def _complete_item(self, item: PendingEmbedding, arrived: ArrivedEmbedding, source: str) -> None:
        item.arrived, item.source, item.arrived_s = arrived, source, time.monotonic()
        self._observe_wait(item)

    def _fail_item(self, item: PendingEmbedding, reason: str) -> None:
        item.failure = reason
        self._tally.count("cornplug_misses_total", self._runtime.app, EMBEDDING, reason)
        self._observe_wait(item)

    def _observe_wait(self, item: PendingEmbedding) -> None:
        self._tally.observe(
            "cornplug_wait_seconds", time.monotonic() - item.began_s, self._runtime.app, EMBEDDING
        )
