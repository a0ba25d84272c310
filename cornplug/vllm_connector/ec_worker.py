"""The worker half of the encoder-cache connector: into the engine's cache, and out of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from cornplug.codec import Kind
from cornplug.engine_side.model import dtype_name
from cornplug.engine_side.runtime import Runtime
from cornplug.errors import CornplugError
from cornplug.store import entry
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.ec_moves import ECAcks, ECMoves
from cornplug.vllm_connector.identifiers import key_of

_MAX_WAITING = 64
"""Embeddings kept alive for publishing: with a slow store the engine's memory comes first."""


class ECWorker:
    """One per rank; only one rank of the engine publishes."""

    def __init__(self, runtime: Runtime, *, publishes: bool, device: str) -> None:
        self._run = runtime
        self._publishes = publishes
        self._device = torch.device(device)
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="cornplug-publish")
        self._room = threading.BoundedSemaphore(_MAX_WAITING)
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
        if not self._room.acquire(blocking=False):
            with self._lock:
                self._saves.append(("busy", 0))
            return
        mark = None
        if embedding.is_cuda:
            mark = torch.cuda.Event()
            mark.record()
        self._publisher.submit(self._publish, key, embedding, mark)

    def acks(self) -> ECAcks | None:
        """What became of earlier offers, None when nothing is new."""
        with self._lock:
            saves, self._saves = self._saves, []
        return ECAcks(saves) if saves else None

    def close(self) -> None:
        """Finish what is being published."""
        self._publisher.shutdown(wait=True, cancel_futures=True)

    def _publish(self, key: bytes, embedding: torch.Tensor, mark: Any) -> None:
        outcome, size = "error", 0
        try:
            if mark is not None:
                mark.synchronize()
            host = embedding.detach().cpu().contiguous()
            payload = memoryview(host.view(-1).view(torch.uint8).numpy())
            size = payload.nbytes
            outcome = entry.put(
                self._run.store,
                payload,
                kind=Kind.EMBEDDING,
                key=key,
                dtype=dtype_name(host.dtype),
                shape=tuple(host.shape),
                app=self._run.app,
                deadline_s=self._run.patience_s,
            )
        except CornplugError as e:
            compat.logger.debug("cornplug: embedding not published: %s", e)
            outcome = e.reason
        finally:
            self._room.release()
            with self._lock:
                self._saves.append((outcome, size))
