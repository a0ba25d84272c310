"""Embeddings of one engine: the policy for requests to the encoder service, a background thread that saves
embeddings that the engine computed, and measurement of the tower's run time.

    not in the store ──allowed──> requested ──valid reply────────> "service_*"
                          │         └─ error, late, invalid ─> a miss; a failed service starts a back-off
                          └─ unidentified, not served, down, backed off ─> a miss

`EncoderRequestPolicy` does no I/O, and uses no threads or clock. The vLLM plugin polls for replies from an
engine's loop, and the SGLang plugin awaits them on an event loop.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

import torch

from cornplug.codec import ITEM_BYTES, PayloadKind
from cornplug.encoder_service.formats.messages import EncodeReply, WireTensor
from cornplug.encoder_service.formats.tensors import dtype_name, raw_bytes
from cornplug.engine_common.model_identity import TowerIdentity
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import CodecError, CornplugError, EncoderError, EncoderUnavailable
from cornplug.store.messages import MAX_COST_S
from cornplug.store.payload import NewPayload, put_payload

_BACKOFF_STEPS_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
_NO_BACKOFF_REASONS: Final = frozenset({"encoder_down", "bad_input", "no_inputs", "shm_cache"})
"""Error reasons that do not start a backoff: no service is running, or the error affects only one image."""

_MAX_QUEUED: Final = 64
_MAX_QUEUED_BYTES: Final = 256 << 20
"""Maximum total size in bytes of the queue of unsaved embeddings, so that a slow store cannot exhaust the
engine's memory. If the queue is empty, a larger embedding is accepted too."""
log = logging.getLogger(__name__)


class BackOff:
    """Increasing backoff after failures of the encoder service. Used by one thread.

    All times are seconds on the same monotonic clock.
    """

    def __init__(self) -> None:
        self._retry_at_s = 0.0
        self._failures = 0

    def is_active(self, now: float) -> bool:
        """Return whether to send no requests to the service now, because it failed recently."""
        return now < self._retry_at_s

    def record_failure(self, error: EncoderError, now: float) -> None:
        """Record a failed request. Concurrent requests that fail count as one failure."""
        if error.reason not in _NO_BACKOFF_REASONS and now >= self._retry_at_s:
            self._retry_at_s = now + _BACKOFF_STEPS_S[min(self._failures, len(_BACKOFF_STEPS_S) - 1)]
            self._failures += 1

    def record_reply(self) -> None:
        """Record a reply from the service, which ends the backoff."""
        self._retry_at_s, self._failures = 0.0, 0


@dataclass(frozen=True, slots=True)
class ExpectedEmbedding:
    """Key, shape and dtype that an embedding must have."""

    key: bytes
    rows: int
    width: int | None = None
    """Number of columns of the embedding, or None if the language model's width is unknown."""
    dtype: str | None = None
    """Name of the torch dtype without the "torch." prefix, or None if unknown."""

    def check(self, dtype: str, shape: Sequence[int], size_bytes: int) -> None:
        """Raise CodecError("wrong_shape") unless an embedding's dtype, shape and size have the expected
        values."""
        wanted = (self.rows, shape[-1] if self.width is None and shape else self.width)
        if tuple(shape) != wanted or dtype not in ITEM_BYTES or self.dtype not in (None, dtype):
            raise CodecError(f"{dtype} {tuple(shape)}", reason="wrong_shape")
        if size_bytes != math.prod(shape) * ITEM_BYTES[dtype]:
            raise CodecError(
                f"expected {dtype} {tuple(shape)}, received {size_bytes} bytes", reason="wrong_shape"
            )


class EncoderRequestPolicy:
    """Decides whether to send a request to the encoder service, and whether to accept the service's reply.
    All times are seconds on the same monotonic clock. Used by one thread."""

    def __init__(self) -> None:
        self._backoff = BackOff()

    def identity_for_request(
        self, tower: TowerIdentity | None, *, identified: bool, refusal: EncoderError | None, now: float
    ) -> bytes:
        """Return the model identity to send in a request to the encoder service.

        Args:
            tower: identity of the engine's tower, or None.
            identified: whether the tower's identification has finished. If it has, a `tower` of None means
                that there is no identity.
            refusal: the error with which the connection would immediately reject a request, or None.

        Raises EncoderError if no request should be sent now. Call this before packing the pixels, which takes
        tens of milliseconds.
        """
        if tower is None or tower.served_identity is None:
            reason = "not_served" if identified else "identifying"
            raise EncoderUnavailable("no encoder service is known to serve this model", reason=reason)
        if refusal is not None:
            raise refusal
        if self._backoff.is_active(now):
            raise EncoderUnavailable("the encoder service failed recently", reason="encoder_backoff")
        return tower.served_identity

    def check_reply(self, reply: EncodeReply, expected: ExpectedEmbedding) -> str:
        """Check a reply, and return the embedding's source as a metrics label. A reply without a tensor means
        that the embedding is in the store.

        Raises EncoderUnavailable("encoder_bad_response"), CodecError("wrong_shape").
        """
        self._backoff.record_reply()
        if reply.key != expected.key:
            raise EncoderUnavailable(
                "the encoder service replied with a different key", reason="encoder_bad_response"
            )
        if reply.tensor is not None:
            expected.check(reply.tensor.dtype, reply.tensor.shape, len(reply.tensor.data))
        return f"service_{reply.origin}"

    def record_failure(self, error: CornplugError, now: float) -> str:
        """Return the miss reason for a request that failed with this error. If the error is a failure of the
        service, start a backoff."""
        if isinstance(error, EncoderError):
            self._backoff.record_failure(error, now)
        return error.reason

    def record_timeout(self, now: float) -> str:
        """Return the miss reason for a request that exceeded its deadline. Start a backoff."""
        return self.record_failure(
            EncoderUnavailable("the encoder service did not reply in time", reason="encoder_timeout"), now
        )


class TowerTimer:
    """Measures the tower's run time in each step. Used by the engine's thread. GPUs run asynchronously, so
    their run time is measured with device events."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start: Any = None
        self._end: Any = None
        self._rows = 0
        self._unfinished: list[tuple[int, Any, Any]] = []

    def begin_step(self) -> None:
        """Start to measure a step. If the tower runs in this step, it must be this thread's next
        operation."""
        self._start, self._end, self._rows = self._timestamp(), None, 0

    def record_rows(self, rows: int) -> None:
        """Record that the tower has encoded `rows` more rows in this step."""
        self._end = self._timestamp()
        self._rows += rows

    def take_measurements(self) -> list[tuple[int, float]]:
        """Return (number of rows, seconds) for each step in which the tower ran. Each step is returned once,
        after the device has finished it."""
        if self._rows and self._start is not None:
            self._unfinished.append((self._rows, self._start, self._end))
            self._start, self._rows = None, 0
        done = [one for one in self._unfinished if not self._cuda or one[2].query()]
        self._unfinished = [one for one in self._unfinished if one not in done]
        return [(rows, self._elapsed_s(began, ended)) for rows, began, ended in done]

    def _timestamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed_s(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) / 1e3 if self._cuda else float(ended - began)


class EmbeddingPublisher:
    """Saves embeddings to the store on a background thread. For each embedding, calls `report(outcome,
    bytes)` once, from any thread."""

    def __init__(self, runtime: EngineRuntime, report: Callable[[str, int], None]) -> None:
        self._runtime = runtime
        self._report = report
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cornplug-publish")
        self._lock = threading.Lock()
        self._queued_sizes: list[int] = []
        """Size in bytes of each embedding in the queue."""

    def enqueue(
        self,
        key: bytes,
        embedding: torch.Tensor | WireTensor,
        *,
        cost_s: float = 0.0,
        wait_s: float = 0.0,
        on_end: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        """Queue an embedding of shape (rows, hidden), on any device, to be saved. Waits at most `wait_s`.

        Args:
            cost_s: Seconds that this engine's tower needs to compute the embedding, or 0 if not measured.
            wait_s: Maximum seconds to wait if the queue is full.
            on_end: Called once with the outcome, from any thread.
        """
        size = _size_bytes(embedding)
        if not self._reserve_queue_bytes(size):
            if wait_s:
                self.flush(wait_s)
            if not wait_s or not self._reserve_queue_bytes(size):
                self._report("busy", 0)
                on_end("busy")
                return
        mark = None
        if isinstance(embedding, torch.Tensor) and embedding.is_cuda:
            mark = torch.cuda.Event()
            mark.record()
        self._thread.submit(self._save, key, embedding, mark, min(cost_s, MAX_COST_S), on_end)

    def _reserve_queue_bytes(self, size_bytes: int) -> bool:
        with self._lock:
            waiting = self._queued_sizes
            if waiting and (len(waiting) >= _MAX_QUEUED or sum(waiting) + size_bytes > _MAX_QUEUED_BYTES):
                return False
            waiting.append(size_bytes)
            return True

    def flush(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until all previously offered embeddings are saved or rejected."""
        wait([self._thread.submit(lambda: None)], timeout_s)

    def close(self) -> None:
        """Finish the current save and drop all queued embeddings."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _save(
        self,
        key: bytes,
        embedding: torch.Tensor | WireTensor,
        ready_event: Any,
        cost_s: float,
        on_end: Callable[[str], None],
    ) -> None:
        outcome, size = "error", 0
        try:
            if isinstance(embedding, WireTensor):
                payload, dtype = memoryview(embedding.data), embedding.dtype
            else:
                if ready_event is not None:
                    # A new thread uses device 0 by default, and would create a CUDA context there.
                    torch.cuda.set_device(embedding.device)
                    ready_event.synchronize()
                payload, dtype = raw_bytes(embedding), dtype_name(embedding.dtype)
            size = payload.nbytes
            outcome = put_payload(
                self._runtime.store,
                NewPayload(
                    payload,
                    PayloadKind.EMBEDDING,
                    key=key,
                    dtype=dtype,
                    shape=tuple(embedding.shape),
                ),
                app=self._runtime.app,
                deadline_s=self._runtime.background_timeout_s,
                cost_s=cost_s,
            )
        except CornplugError as e:
            log.debug("cornplug: an embedding was not saved: %s", e)
            outcome = e.reason
        finally:
            with self._lock:
                self._queued_sizes.remove(_size_bytes(embedding))
            self._report(outcome, size)
            on_end(outcome)


def _size_bytes(embedding: torch.Tensor | WireTensor) -> int:
    return len(embedding.data) if isinstance(embedding, WireTensor) else embedding.nbytes
