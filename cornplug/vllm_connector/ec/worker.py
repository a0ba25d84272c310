"""Worker half of the encoder-cache connector: loads embeddings into the engine's cache, and saves them."""

from __future__ import annotations

import threading
import time

import torch

from cornplug.engine_common.embedding_publisher import EmbeddingPublisher
from cornplug.engine_common.load_policy import FadedRate
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.engine_common.tower_clock import TowerClock
from cornplug.vllm_connector.ec.mapped_rows import MappedRows, mapped_rows
from cornplug.vllm_connector.ec.metadata import CornplugECMetadata, CornplugECWorkerMetadata
from cornplug.vllm_connector.ec.mm_identifiers import key_of
from cornplug.vllm_connector.ec.row_memory import RowPlace


class ECWorker:
    """Worker half of one rank. Only one rank of the engine saves.

    In an engine that runs only its encoder, a step ends when its embeddings are in the store, because a
    consumer may look them up as soon as the request has finished.
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
        self._patience_s = runtime.background_timeout_s if encoder_only else 0.0
        self._offered = False
        """Whether something was offered since the last acknowledgements."""
        self._device = torch.device(device)
        self._rank = rank
        self._rows: MappedRows | None = None
        """Set when the scheduler has sent the memory's address."""
        self._mapped: list[int] = []
        """This rank, after it has mapped the memory and until the next acknowledgements."""
        self._publisher = EmbeddingPublisher(runtime, self._note)
        self._lock = threading.Lock()
        self._saves: list[tuple[str, int]] = []
        self._copied: list[tuple[int, float]] = []
        self._tower = TowerClock(self._device)
        self._encoding = FadedRate()
        """Seconds of the tower by rows. The time of the current step is known too late for its own
        embeddings."""

    def load(self, cache: dict[str, torch.Tensor], moves: CornplugECMetadata) -> None:
        """Copy arrived embeddings, of shape (rows, hidden), into the engine's encoder cache."""
        if moves.row_memory and self._rows is None:
            self._map(moves.row_memory)
        began, size = time.perf_counter(), 0
        for item in moves.arrived:
            rows = self._on_device(item.data)
            cache[item.identifier] = rows.view(getattr(torch, item.dtype)).view(item.shape)
            size += rows.numel()
        if self._publishes:
            if moves.arrived:
                self._copied.append((size, time.perf_counter() - began))
            self._tower.begin()

    def _map(self, address: str) -> None:
        rows = mapped_rows(self._device)
        if rows.map(address):
            self._rows, self._mapped = rows, [self._rank]

    def _on_device(self, data: bytearray | RowPlace) -> torch.Tensor:
        """Return the bytes on the device, shape (bytes,)."""
        if not isinstance(data, RowPlace):
            return torch.frombuffer(data, dtype=torch.uint8).to(self._device, non_blocking=True)
        assert self._rows is not None, "the scheduler was notified that this rank has mapped its memory"
        return self._rows.rows(data)

    def save(self, identifier: str, embedding: torch.Tensor, moves: CornplugECMetadata) -> None:
        """Save an embedding that this engine had to compute. Returns immediately, because a thread saves
        it."""
        if self._publishes and embedding.ndim == 2:
            self._tower.ran(len(embedding))
        self._offer(identifier, embedding, moves)

    def save_again(self, cache: dict[str, torch.Tensor], moves: CornplugECMetadata) -> None:
        """Save embeddings of earlier steps that the store lacks."""
        for identifier in moves.again:
            if (embedding := cache.get(identifier)) is not None:
                self._offer(identifier, embedding, moves)

    def _offer(self, identifier: str, embedding: torch.Tensor, moves: CornplugECMetadata) -> None:
        key = key_of(identifier, moves.epoch)
        if key is None or not self._publishes or not moves.publish or embedding.ndim != 2:
            return
        cost_s = self._encoding.seconds(len(embedding)) or 0.0
        self._publisher.offer(key, embedding, cost_s=cost_s, patience_s=self._patience_s)
        self._offered = True

    def stop_publishing(self) -> None:
        """Stop saving. Embeddings that the scheduler half has promised are still loaded."""
        self._publishes = False

    def acks(self) -> CornplugECWorkerMetadata | None:
        """Outcomes of earlier saves and new measurements, or None if there are none."""
        if self._offered and self._patience_s:
            self._publisher.flush(self._patience_s)
        self._offered = False
        with self._lock:
            saves, self._saves = self._saves, []
        copied, self._copied = self._copied, []
        encoded = self._tower.measured()
        for rows, seconds in encoded:
            self._encoding.note(rows, seconds)
        mapped, self._mapped = self._mapped, []
        places = [] if self._rows is None else [(self._rank, offset) for offset in self._rows.copied()]
        if not (saves or encoded or copied or mapped or places):
            return None
        return CornplugECWorkerMetadata(saves, encoded, copied, mapped, places)

    def close(self) -> None:
        """Finish pending saves, and the copies of received embeddings."""
        self._publisher.close()
        if self._rows is not None:
            self._rows.close()

    def _note(self, outcome: str, size: int) -> None:
        with self._lock:
            self._saves.append((outcome, size))
