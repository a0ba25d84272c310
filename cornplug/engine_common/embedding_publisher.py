"""Saving of embeddings that an engine had to compute, in the background, and measurement of the tower's run
time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final

import torch

from cornplug.codec import PayloadKind
from cornplug.encoder_service.wire.tensors import dtype_name, raw_bytes
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import CornplugError
from cornplug.store.payload import NewPayload, put_payload
from cornplug.store.validation import MAX_COST_S

if TYPE_CHECKING:
    import torch


_MAX_WAITING: Final = 64
_MAX_WAITING_BYTES: Final = 256 << 20
"""Maximum total size in bytes of embeddings that wait to be saved, so that a slow store cannot exhaust the
engine's memory. A larger embedding is accepted if no other embedding waits."""
log = logging.getLogger(__name__)


class TowerClock:
    """Measures the tower's run time in each step. On a GPU, which runs asynchronously, it uses device events.
    Used by the engine's thread."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began: Any = None
        self._ended: Any = None
        self._rows = 0
        self._open: list[tuple[int, Any, Any]] = []

    def begin(self) -> None:
        """Start to time a step. If the tower runs in this step, its run must be this thread's next work."""
        self._began, self._ended, self._rows = self._now(), None, 0

    def ran(self, rows: int) -> None:
        """Record that the tower has computed `rows` more rows in this step."""
        self._ended = self._now()
        self._rows += rows

    def measured(self) -> list[tuple[int, float]]:
        """Return (number of rows, seconds) for each step in which the tower ran and that the device has
        finished since the last call."""
        if self._rows and self._began is not None:
            self._open.append((self._rows, self._began, self._ended))
            self._began, self._rows = None, 0
        done = [one for one in self._open if not self._cuda or one[2].query()]
        self._open = [one for one in self._open if one not in done]
        return [(rows, self._between(began, ended)) for rows, began, ended in done]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) / 1e3 if self._cuda else float(ended - began)


class EmbeddingPublisher:
    """Saves embeddings to the store on a background thread. Calls `report(outcome, bytes)` once per offered
    embedding, from any thread."""

    def __init__(self, runtime: EngineRuntime, report: Callable[[str, int], None]) -> None:
        self._run = runtime
        self._report = report
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cornplug-publish")
        self._lock = threading.Lock()
        self._waiting: list[int] = []
        """Size in bytes of each embedding that waits to be saved."""

    def offer(
        self, key: bytes, embedding: torch.Tensor, *, cost_s: float = 0.0, patience_s: float = 0.0
    ) -> None:
        """Save an embedding of shape (rows, hidden), which may be on any device. Returns without waiting for
        the save, after at most `patience_s`.

        Args:
            cost_s: Seconds that this engine's tower takes to compute the embedding, or 0 if not measured.
            patience_s: Maximum seconds to wait if too many embeddings are already waiting to be saved.
        """
        import torch

        if not self._has_room(embedding.nbytes):
            if patience_s:
                self.flush(patience_s)
            if not patience_s or not self._has_room(embedding.nbytes):
                self._report("busy", 0)
                return
        mark = None
        if embedding.is_cuda:
            mark = torch.cuda.Event()
            mark.record()
        self._thread.submit(self._publish, key, embedding, mark, min(cost_s, MAX_COST_S))

    def _has_room(self, size: int) -> bool:
        with self._lock:
            waiting = self._waiting
            if waiting and (len(waiting) >= _MAX_WAITING or sum(waiting) + size > _MAX_WAITING_BYTES):
                return False
            waiting.append(size)
            return True

    def flush(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until all embeddings offered before have been saved or rejected."""
        wait([self._thread.submit(lambda: None)], timeout_s)

    def close(self) -> None:
        """Finish the current save and drop all embeddings that are still waiting."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _publish(self, key: bytes, embedding: torch.Tensor, mark: Any, cost_s: float) -> None:
        outcome, size = "error", 0
        try:
            if mark is not None:
                import torch

                # A new thread uses device 0 by default, and would create a CUDA context there.
                torch.cuda.set_device(embedding.device)
                mark.synchronize()
            payload = raw_bytes(embedding)
            size = payload.nbytes
            outcome = put_payload(
                self._run.store,
                NewPayload(
                    payload,
                    PayloadKind.EMBEDDING,
                    key=key,
                    dtype=dtype_name(embedding.dtype),
                    shape=tuple(embedding.shape),
                ),
                app=self._run.app,
                deadline_s=self._run.background_timeout_s,
                cost_s=cost_s,
            )
        except CornplugError as e:
            log.debug("embedding not saved: %s", e)
            outcome = e.reason
        finally:
            with self._lock:
                self._waiting.remove(embedding.nbytes)
            self._report(outcome, size)
