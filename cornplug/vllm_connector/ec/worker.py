"""The worker half of the encoder-cache connector: into the engine's cache, and out of it."""

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
    """One per rank; only one rank of the engine publishes.

    In an engine that runs its encoder only, a step ends when its embeddings are in the store: the request's
    answer says so, and a consumer may look for them at once.
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
        """Since the last acknowledgements."""
        self._device = torch.device(device)
        self._rank = rank
        self._rows: MappedRows | None = None
        """Once the scheduler has said where they are."""
        self._mapped: list[int] = []
        """This rank, from then on until the next acknowledgements."""
        self._publisher = EmbeddingPublisher(runtime, self._note)
        self._lock = threading.Lock()
        self._saves: list[tuple[str, int]] = []
        self._copied: list[tuple[int, float]] = []
        self._tower = TowerClock(self._device)
        self._encoding = FadedRate()
        """Seconds of the tower by rows: of this step they are known too late for the step's embeddings."""

    def load(self, cache: dict[str, torch.Tensor], moves: CornplugECMetadata) -> None:
        """Put arrived embeddings, of shape (rows, hidden), into the engine's encoder cache."""
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
        """Shape (bytes,)."""
        if not isinstance(data, RowPlace):
            return torch.frombuffer(data, dtype=torch.uint8).to(self._device, non_blocking=True)
        assert self._rows is not None, "the scheduler was notified that this rank has mapped its memory"
        return self._rows.rows(data)

    def save(self, identifier: str, embedding: torch.Tensor, moves: CornplugECMetadata) -> None:
        """Offer an embedding that this engine had to compute. Returns at once: a thread publishes it."""
        if self._publishes and embedding.ndim == 2:
            self._tower.ran(len(embedding))
        self._offer(identifier, embedding, moves)

    def save_again(self, cache: dict[str, torch.Tensor], moves: CornplugECMetadata) -> None:
        """Offer embeddings of earlier steps that the store lacks."""
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
        """Offer nothing more. What the scheduler half has promised is loaded still."""
        self._publishes = False

    def acks(self) -> CornplugECWorkerMetadata | None:
        """Outcomes of earlier offers and new measurements; None where there are none."""
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
        """Finish the embeddings that are being published, and the copies of those that came."""
        self._publisher.close()
        if self._rows is not None:
            self._rows.close()

    def _note(self, outcome: str, size: int) -> None:
        with self._lock:
            self._saves.append((outcome, size))
