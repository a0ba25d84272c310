"""The worker half of the encoder-cache connector: into the engine's cache, and out of it."""

from __future__ import annotations

import threading

import torch

from cornplug.engine_side.publisher import EmbeddingPublisher
from cornplug.engine_side.runtime import Runtime
from cornplug.vllm_connector.ec_moves import ECAcks, ECMoves
from cornplug.vllm_connector.identifiers import key_of


class ECWorker:
    """One per rank; only one rank of the engine publishes."""

    def __init__(self, runtime: Runtime, *, publishes: bool, device: str) -> None:
        self._publishes = publishes
        self._device = torch.device(device)
        self._publisher = EmbeddingPublisher(runtime, self._note)
        self._lock = threading.Lock()
        self._saves: list[tuple[str, int]] = []

    def load(self, cache: dict[str, torch.Tensor], moves: ECMoves) -> None:
        """Put what arrived into the engine's encoder cache; shape (rows, hidden)."""
        for item in moves.arrived:
            tensor = torch.frombuffer(item.data, dtype=getattr(torch, item.dtype)).view(item.shape)
            cache[item.identifier] = tensor.to(self._device, non_blocking=True)

    def save(self, identifier: str, embedding: torch.Tensor, moves: ECMoves) -> None:
        """Offer an embedding that this engine had to compute; nobody waits for it."""
        key = key_of(identifier)
        if key is None or not self._publishes or not moves.publish or embedding.ndim != 2:
            return
        self._publisher.offer(key, embedding)

    def acks(self) -> ECAcks | None:
        """What became of earlier offers, None when nothing is new."""
        with self._lock:
            saves, self._saves = self._saves, []
        return ECAcks(saves) if saves else None

    def close(self) -> None:
        """Finish what is being published."""
        self._publisher.close()

    def _note(self, outcome: str, size: int) -> None:
        with self._lock:
            self._saves.append((outcome, size))
