"""Worker half of the encoder-cache connector. It loads embeddings into the engine's encoder cache, and saves
embeddings to the store.

The rows of a leased embedding are copied from the store's memory. If the copy does not match its checksums,
the engine's tower encodes the item in the same step (`late_misses.py`).
"""

from __future__ import annotations

import threading
import time

import torch

from cornplug.engine_common.embeddings import EmbeddingPublisher, TowerTimer
from cornplug.engine_common.load_policy import EwmaRate
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.engine_common.stored_rows import RowCopies
from cornplug.errors import CornplugError
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.media.late_misses import find_common
from cornplug.vllm_connector.media.metadata import (
    ArrivedEmbedding,
    CornplugECMetadata,
    CornplugECWorkerMetadata,
    LeasedRows,
)
from cornplug.vllm_connector.media.mm_identifiers import key_of


class ECWorker:
    """Worker half of the encoder-cache connector on one rank. Only one rank of an engine saves embeddings.

    In an engine that runs only its encoder, a step waits until its embeddings are in the store. A consumer
    may look them up as soon as the request has finished.
    """

    def __init__(
        self,
        runtime: EngineRuntime,
        *,
        publishes: bool,
        device: str,
        rank: int = 0,
        encoder_only: bool = False,
    ) -> None:
        self._publishes = publishes
        self._save_wait_s = runtime.background_timeout_s if encoder_only else 0.0
        self._has_new_saves = False
        """Whether an embedding was offered to the publisher since the last acknowledgements."""
        self._store = runtime.store
        self._device = torch.device(device)
        self._rank = rank
        self._copies = RowCopies(self._device)
        self._copied: list[tuple[int, int]] = []
        self._lost: list[tuple[int, str]] = []
        """`_copied` and `_lost` are the fields of the next acknowledgements."""
        self._lost_inputs: list[tuple[str, int]] = []
        """(request id, index of the media item) for each item that the tower must encode in this step."""
        self._publisher = EmbeddingPublisher(runtime, self._record_save)
        self._lock = threading.Lock()
        self._saves: list[tuple[str, int]] = []
        self._load_times: list[tuple[int, float]] = []
        self._tower_timer = TowerTimer(self._device)
        self._encode_rate = EwmaRate()
        """Measured seconds per row for the tower in earlier steps. The current step's time is not measured in
        time for its own embeddings."""

    def load(self, cache: dict[str, torch.Tensor], metadata: CornplugECMetadata) -> None:
        """Copy the embeddings that have arrived, each of shape (rows, hidden), to the engine's encoder cache.
        Embeddings that a rank cannot load are left out, and `take_lost_inputs` returns them."""
        began, size = time.perf_counter(), 0
        self._lost_inputs = []
        rows = [self._read(item) for item in metadata.arrived]
        loaded = [one is not None for one in rows]
        if any(isinstance(item.data, LeasedRows) for item in metadata.arrived):
            loaded = find_common(loaded)
        for item, one, is_loaded in zip(metadata.arrived, rows, loaded, strict=True):
            if one is not None and is_loaded:
                there = self._copies.send(one)
                cache[item.identifier] = there.view(getattr(torch, item.dtype)).view(item.shape)
                size += one.numel()
            else:
                self._lost_inputs.append((item.request_id, item.input_id))
        if self._publishes:
            if size:
                self._load_times.append((size, time.perf_counter() - began))
            self._tower_timer.begin_step()

    def _read(self, item: ArrivedEmbedding) -> torch.Tensor | None:
        """Return an embedding's bytes in host memory, as a tensor of shape (bytes,). Return None if this rank
        cannot read its leased rows."""
        if not isinstance(item.data, LeasedRows):
            return self._copies.from_bytes(item.data)
        token, location, checksums = item.data
        reason = "error"
        try:
            return self._copies.read(self._store, location, checksums)
        except CornplugError as e:
            reason = e.reason
        except Exception:  # noqa: BLE001 - any error: the tower encodes the item
            compat.logger.exception("cornplug: an embedding was not loaded, so this engine encodes it")
        finally:
            self._copied.append((self._rank, token))
        self._lost.append((token, reason))
        return None

    def take_lost_inputs(self) -> list[tuple[str, int]]:
        """Return (request id, index of the media item) for each item that the tower must encode in this step,
        because a rank could not load its embedding. Each item is returned once."""
        lost, self._lost_inputs = self._lost_inputs, []
        return lost

    def save(self, identifier: str, embedding: torch.Tensor, metadata: CornplugECMetadata) -> None:
        """Save an embedding that this engine computed. Returns immediately, because another thread copies the
        embedding to the store."""
        if self._publishes and embedding.ndim == 2:
            self._tower_timer.record_rows(len(embedding))
        self._enqueue_save(identifier, embedding, metadata)

    def save_again(self, cache: dict[str, torch.Tensor], metadata: CornplugECMetadata) -> None:
        """Save again those embeddings in the engine's encoder cache that the scheduler half did not find in
        the store."""
        for identifier in metadata.save_again:
            if (embedding := cache.get(identifier)) is not None:
                self._enqueue_save(identifier, embedding, metadata)

    def _enqueue_save(self, identifier: str, embedding: torch.Tensor, metadata: CornplugECMetadata) -> None:
        key = key_of(identifier, metadata.epoch)
        if key is None or not self._publishes or not metadata.publish or embedding.ndim != 2:
            return
        cost_s = self._encode_rate.estimate_s(len(embedding)) or 0.0
        self._publisher.enqueue(key, embedding, cost_s=cost_s, wait_s=self._save_wait_s)
        self._has_new_saves = True

    def stop_publishing(self) -> None:
        """Stop saving embeddings. Embeddings that the engine expects are still loaded."""
        self._publishes = False

    def take_acks(self) -> CornplugECWorkerMetadata | None:
        """Return the acknowledgements for the scheduler half: outcomes of earlier saves and new measurements.
        Return None if there are no acknowledgements."""
        if self._has_new_saves and self._save_wait_s:
            self._publisher.flush(self._save_wait_s)
        self._has_new_saves = False
        with self._lock:
            saves, self._saves = self._saves, []
        loads, self._load_times = self._load_times, []
        encoded = self._tower_timer.take_measurements()
        for rows, seconds in encoded:
            self._encode_rate.add_sample(rows, seconds)
        copied, self._copied = self._copied, []
        lost, self._lost = self._lost, []
        if not (saves or encoded or loads or copied or lost):
            return None
        return CornplugECWorkerMetadata(saves, encoded, loads, copied, lost)

    def close(self) -> None:
        """Finish the current save."""
        self._publisher.close()

    def _record_save(self, outcome: str, size: int) -> None:
        with self._lock:
            self._saves.append((outcome, size))
