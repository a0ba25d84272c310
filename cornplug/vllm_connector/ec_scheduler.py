"""The scheduler half of the encoder-cache connector: pull-through with a deadline.

    unknown ──ask──> fetching ──bytes verified and in hand──> arrived ──> engine's own cache
                        └──absent, refused, late──> failed ──> the engine encodes by itself

An item counts as available only when its verified bytes are in this process, so nothing that
dies later can break the promise. While it is fetched only its own request waits.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cornplug.encoder_service.protocol import Encode, Encoded
from cornplug.encoder_service.socket_client import SocketEncoder
from cornplug.errors import CheckpointError, CodecError, CornplugError, EncoderError, EncoderUnavailable
from cornplug.metrics import Tally
from cornplug.store import entry
from cornplug.vllm_connector import compat, weights
from cornplug.vllm_connector.ec_moves import Arrived, ECAcks, ECMoves
from cornplug.vllm_connector.identifiers import key_of
from cornplug.vllm_connector.media_inputs import MediaInputs
from cornplug.vllm_connector.model import TowerIdentity, dtype_name, tower_identity
from cornplug.vllm_connector.runtime import Runtime

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

WHAT = "embedding"
_BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
_FETCHERS = 4


@dataclass(slots=True)
class _Item:
    """One medium on its way. `arrived` is set last, by the fetching thread."""

    key: bytes
    salt: str | None
    rows: int
    deadline: float
    began: float
    waiting: set[str] = field(default_factory=set)
    arrived: Arrived | None = None
    source: str = ""
    failed: str = ""


class ECScheduler:
    """One per engine core; the engine's thread only looks at what other threads have put."""

    def __init__(self, config: VllmConfig, runtime: Runtime, tally: Tally) -> None:
        self._run = runtime
        self._tally = tally
        self._dtype = dtype_name(config.model_config.dtype)
        self._hidden = config.model_config.get_hidden_size()
        self._inputs = MediaInputs(config)
        self._encoder = SocketEncoder(runtime.config.encoder.socket)
        self._fetchers = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="cornplug-fetch")
        self._items: dict[str, _Item] = {}
        self._held: set[str] = set()
        """Identifiers in the engine's own encoder cache."""
        self._to_load: list[_Item] = []
        self._ask_after = 0.0
        self._refusals = 0
        self._identity: TowerIdentity | None = None
        threading.Thread(target=self._identify, args=(config,), name="cornplug-identify-ec", daemon=True).start()

    def _identify(self, config: VllmConfig) -> None:
        try:
            self._identity = tower_identity(config)
        except CheckpointError as e:
            # The API process says so once, with the remedy; here every identifier is foreign.
            compat.logger.debug("cornplug: no tower identity: %s", e)

    # -- the engine's questions -------------------------------------------------------------

    def available(self, request: Request, computed: int) -> bool:
        """False while something that `request` needs is on its way. Polled hundreds of times a
        second, so it only looks."""
        ready = True
        now = time.monotonic()
        for feature in request.mm_features:
            identifier = feature.identifier
            position = feature.mm_position
            if position.offset + position.length <= computed or identifier in self._held:
                continue
            item = self._items.get(identifier)
            if item is None:
                item = self._begin(feature, request.cache_salt, now)
                if item is None:
                    continue
                self._items[identifier] = item
            item.waiting.add(request.request_id)
            if item.arrived is None and not item.failed:
                if now < item.deadline:
                    ready = False
                else:
                    self._fail(item, "encoder_timeout")
        return ready

    def arrived(self, identifier: str) -> bool:
        """Whether its bytes are in hand."""
        item = self._items.get(identifier)
        return item is not None and item.arrived is not None and not weights.replaced()

    def allocated(self, identifier: str) -> None:
        """The engine made room: for what arrived, or for what it encodes itself."""
        self._held.add(identifier)
        item = self._items.pop(identifier, None)
        if item is not None and item.arrived is not None:
            self._to_load.append(item)

    def moves(self, output: SchedulerOutput) -> ECMoves:
        """The embeddings that this step's forward needs."""
        self._held.difference_update(output.free_encoder_mm_hashes)
        items, self._to_load = self._to_load, []
        app = self._run.app
        for item in items:
            assert item.arrived is not None
            self._tally.count("cornplug_hits_total", app, WHAT, item.source)
            self._tally.count("cornplug_saved_tower_passes_total", app)
            self._tally.count("cornplug_bytes_total", app, WHAT, "load", by=len(item.arrived.data))
        return ECMoves(
            arrived=[item.arrived for item in items if item.arrived is not None],
            publish=not weights.replaced() and self._run.config.engine.share_embeddings,
        )

    def finished(self, request: Request) -> None:
        """Drop what only this request was waiting for."""
        for feature in request.mm_features:
            item = self._items.get(feature.identifier)
            if item is not None:
                item.waiting.discard(request.request_id)
                if not item.waiting:
                    del self._items[feature.identifier]

    def acknowledged(self, acks: ECAcks) -> None:
        """Count what became of embeddings that a worker offered."""
        for outcome, size in acks.saves:
            self._tally.count("cornplug_saves_total", self._run.app, WHAT, outcome)
            if outcome == "stored":
                self._tally.count("cornplug_bytes_total", self._run.app, WHAT, "save", by=size)

    def close(self) -> None:
        """End the connection to the service and the fetching threads."""
        self._encoder.close()
        self._fetchers.shutdown(wait=False, cancel_futures=True)

    # -- fetching ---------------------------------------------------------------------------

    def _begin(self, feature: Any, salt: str | None, now: float) -> _Item | None:
        """Start fetching a medium; None where it has no key of ours, or we must not."""
        key = key_of(feature.identifier)
        if key is None or weights.replaced() or not self._run.config.engine.share_embeddings:
            return None
        position = feature.mm_position
        deadline = now + self._run.config.encoder.deadline_s
        item = _Item(key, salt, position.get_num_embeds(), deadline, now)
        self._fetchers.submit(self._fetch, item, feature)
        return item

    def _fetch(self, item: _Item, feature: Any) -> None:
        try:
            if not self._from_store(item, feature.identifier, "store"):
                self._ask(item, feature)
        except CornplugError as e:
            self._fail(item, e.reason)

    def _from_store(self, item: _Item, identifier: str, source: str) -> bool:
        try:
            found = entry.get(self._run.bulk, item.key, deadline_s=self._run.patience_s)
        except CodecError as e:
            self._tally.count("cornplug_misses_total", self._run.app, WHAT, e.reason)
            return False
        if found is None:
            return False
        header, payload = found
        self._arrive(item, Arrived(identifier, header.dtype, header.shape, payload), source)
        return True

    def _ask(self, item: _Item, feature: Any) -> None:
        """Have the service encode it. Raises CornplugError with the reason of the miss."""
        identity = self._identity.served_identity if self._identity is not None else None
        if identity is None:
            raise EncoderUnavailable("no service can serve this model", reason="not_served")
        if time.monotonic() < self._ask_after:
            raise EncoderUnavailable("the service failed a moment ago", reason="encoder_backoff")
        request = Encode(
            id=0,
            identity=identity,
            key=item.key,
            salt=item.salt,
            inputs=self._inputs.of(feature),
            app=self._run.app,
            deadline_s=max(0.0, item.deadline - time.monotonic()),
        )
        self._encoder.submit(request).add_done_callback(
            lambda future: self._fetchers.submit(self._answered, item, feature.identifier, future)
        )

    def _answered(self, item: _Item, identifier: str, future: Future[Encoded]) -> None:
        try:
            answer = future.result()
            self._refusals, self._ask_after = 0, 0.0
            if answer.key != item.key:
                raise EncoderUnavailable("the service answered for another key", reason="encoder_garbage")
            source = f"service_{answer.tower}"
            if answer.tensor is not None:
                tensor = answer.tensor
                self._arrive(item, Arrived(identifier, tensor.dtype, tensor.shape, bytearray(tensor.data)), source)
            elif not self._from_store(item, identifier, source):
                self._fail(item, "evicted")
        except EncoderError as e:
            self._back_off(e)
            self._fail(item, e.reason)
        except CornplugError as e:
            self._fail(item, e.reason)

    def _back_off(self, error: EncoderError) -> None:
        """After a failure that is the service's, not the picture's, spare the next ones the wait."""
        if error.reason not in ("encoder_down", "bad_input"):
            self._ask_after = time.monotonic() + _BACKOFF_S[min(self._refusals, len(_BACKOFF_S) - 1)]
            self._refusals += 1

    def _arrive(self, item: _Item, arrived: Arrived, source: str) -> None:
        if arrived.shape != (item.rows, self._hidden) or arrived.dtype != self._dtype:
            self._fail(item, "wrong_shape")
        elif not item.failed:
            item.source = source
            self._observe(item)
            item.arrived = arrived

    def _fail(self, item: _Item, reason: str) -> None:
        if not item.failed and item.arrived is None:
            item.failed = reason
            self._tally.count("cornplug_misses_total", self._run.app, WHAT, reason)
            self._observe(item)

    def _observe(self, item: _Item) -> None:
        self._tally.observe("cornplug_wait_seconds", time.monotonic() - item.began, self._run.app, WHAT)
