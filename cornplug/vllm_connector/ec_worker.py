"""The worker half of the encoder-cache connector: into the engine's cache, and out of it."""

from __future__ import annotations

import threading
import time
from typing import Any

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
        self._copied: list[tuple[int, float]] = []
        self._tower = _TowerClock(self._device)

    def load(self, cache: dict[str, torch.Tensor], moves: ECMoves) -> None:
        """Put what arrived into the engine's encoder cache; shape (rows, hidden)."""
        began = time.perf_counter()
        for item in moves.arrived:
            tensor = torch.frombuffer(item.data, dtype=getattr(torch, item.dtype)).view(item.shape)
            cache[item.identifier] = tensor.to(self._device, non_blocking=True)
        if self._publishes:
            if moves.arrived:
                size = sum(len(item.data) for item in moves.arrived)
                self._copied.append((size, time.perf_counter() - began))
            self._tower.begin()

    def save(self, identifier: str, embedding: torch.Tensor, moves: ECMoves) -> None:
        """Offer an embedding that this engine had to compute; nobody waits for it."""
        if self._publishes and embedding.ndim == 2:
            self._tower.ran(len(embedding))
        key = key_of(identifier)
        if key is None or not self._publishes or not moves.publish or embedding.ndim != 2:
            return
        self._publisher.offer(key, embedding)

    def acks(self) -> ECAcks | None:
        """What became of earlier offers, None when nothing is new."""
        with self._lock:
            saves, self._saves = self._saves, []
        copied, self._copied = self._copied, []
        encoded = self._tower.measured()
        return ECAcks(saves, encoded, copied) if saves or encoded or copied else None

    def close(self) -> None:
        """Finish what is being published."""
        self._publisher.close()

    def _note(self, outcome: str, size: int) -> None:
        with self._lock:
            self._saves.append((outcome, size))


class _TowerClock:
    """How long the tower takes in a step, as its device sees it: a GPU has not begun when Python has
    gone on. Used by the engine's thread."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began: Any = None
        self._ended: Any = None
        self._rows = 0
        self._open: list[tuple[int, Any, Any]] = []

    def begin(self) -> None:
        """A step begins: what comes next on this thread is the tower, if it runs at all."""
        self._began, self._ended, self._rows = self._now(), None, 0

    def ran(self, rows: int) -> None:
        """The tower has made these too."""
        self._ended = self._now()
        self._rows += rows

    def measured(self) -> list[tuple[int, float]]:
        """(rows, seconds) of steps whose end the device has reached."""
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
