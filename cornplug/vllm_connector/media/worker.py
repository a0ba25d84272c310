"""Worker half of the encoder-cache connector. It loads embeddings into the engine's encoder cache, and saves
embeddings to the store.

`MappedRows` copies embedding rows from the row memory to the rank's device, in parallel with the engine's
work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import torch
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

from cornplug.engine_common.embeddings import EmbeddingPublisher, TowerTimer
from cornplug.engine_common.load_policy import EwmaRate
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.vllm_connector.kv_copies.registered_memory import RegisteredMemory
from cornplug.vllm_connector.media.metadata import (
    CornplugECMetadata,
    CornplugECWorkerMetadata,
    RowLocation,
    map_row_memory,
)
from cornplug.vllm_connector.media.mm_identifiers import key_of

_ARENA: Final = b"rows"


class RowCopies(Protocol):
    """Interface for copies of embedding rows to a device's memory."""

    def copy(self, chunks: list[torch.Tensor], size_bytes: int) -> tuple[torch.Tensor, Any]:
        """Concatenate `chunks` in one tensor on the device. Operations that the engine starts later can use
        the tensor. Returns (tensor, event for the end of the copy)."""

    def is_done(self, end: Any) -> bool:
        """Return whether the copy with the event `end` has completed. Its chunks are then no longer read."""

    def wait(self, end: Any) -> None:
        """Wait for the copy with the event `end`."""


class CpuCopies:
    """Copies embedding rows to host memory synchronously."""

    def copy(self, chunks: list[torch.Tensor], size_bytes: int) -> tuple[torch.Tensor, None]:
        return torch.cat(chunks), None

    def is_done(self, end: None) -> bool:
        return True

    def wait(self, end: None) -> None:
        """Do nothing, because copies are synchronous."""


class CudaCopies:
    """Copies embedding rows to a GPU on a separate stream. The engine's kernels wait for the rows, but the
    engine's thread does not."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def copy(self, chunks: list[torch.Tensor], size_bytes: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        engine = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            # The memory is allocated on this stream, so none of the engine's kernels still use it.
            there = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            at = 0
            for run in chunks:
                there[at : at + len(run)].copy_(run, non_blocking=True)
                at += len(run)
        end = torch.cuda.Event()
        end.record(self._stream)
        engine.wait_event(end)
        there.record_stream(engine)
        return there, end

    def is_done(self, end: torch.cuda.Event) -> bool:
        return end.query()

    def wait(self, end: torch.cuda.Event) -> None:
        end.synchronize()


class MappedRows:
    """Copies embedding rows from the row memory, which this process maps, to one rank's device. Used by the
    engine's thread.

    Args:
        register, unregister: same as for `RegisteredMemory`. If `register` is None, no memory is registered.
    """

    def __init__(
        self,
        copies: RowCopies,
        register: Callable[[int, int], bool] | None = None,
        unregister: Callable[[int], None] = lambda address: None,
        enter_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._copies = copies
        self._bytes: torch.Tensor | None = None
        self._memory: memoryview | None = None
        self._registered = (
            RegisteredMemory(self, register, unregister, enter_thread) if register is not None else None
        )
        self._open_copies: deque[tuple[int, Any]] = deque()
        """(offset in the row memory, end event) of each copy in flight, in order."""
        if self._registered is not None:
            self._registered.add_user(self._is_idle)

    def map_memory(self, address: str) -> bool:
        """Map the row memory at this address, and return whether this process can access it."""
        if self._bytes is None and (found := map_row_memory(address)) is not None:
            self._memory = memoryview(found)
            self._bytes = torch.from_numpy(np.frombuffer(found, np.uint8))
        return self._bytes is not None

    def arena_memory(self, arena_id: bytes) -> memoryview | None:
        """Return the complete row memory, for `RegisteredMemory`."""
        return self._memory

    def copy_rows(self, location: RowLocation) -> torch.Tensor:
        """Start to copy the bytes at a location in the row memory to the device. Return them as a tensor of
        shape (bytes,). `take_copied` returns the location's offset after the copy."""
        assert self._bytes is not None, "this rank has reported to the scheduler that it mapped the memory"
        there, end = self._copies.copy(self._split_location(self._bytes, location), location.size_bytes)
        self._open_copies.append((location.offset, end))
        return there

    def take_copied(self) -> list[int]:
        """Return the offsets of the locations whose copies have completed since the last call."""
        found = []
        while self._open_copies and self._copies.is_done(self._open_copies[0][1]):
            found.append(self._open_copies.popleft()[0])
        return found

    def close(self) -> None:
        """Wait for copies in flight, and unregister the row memory."""
        while self._open_copies:
            self._copies.wait(self._open_copies.popleft()[1])
        if self._registered is not None:
            self._registered.remove_user(self._is_idle)

    def _is_idle(self) -> bool:
        return not self._open_copies

    def _split_location(self, memory: torch.Tensor, location: RowLocation) -> list[torch.Tensor]:
        """Split a location in the row memory into tensors at the boundaries of registered ranges. A single
        copy must not cross such a boundary."""
        at, end = location.offset, location.offset + location.size_bytes
        if self._registered is None:
            return [memory[at:end]]
        if not self._registered.can_access(_ARENA, end):
            return [memory[at:end].clone()]
        runs = []
        for _, size_bytes in self._registered.byte_ranges(_ARENA, at, end - at):
            runs.append(memory[at : at + size_bytes])
            at += size_bytes
        return runs


def create_mapped_rows(device: torch.device) -> MappedRows:
    """Create a worker's `MappedRows` for its device."""
    if device.type != "cuda":
        return MappedRows(CpuCopies())
    return MappedRows(
        CudaCopies(device), host_register, host_unregister, lambda: torch.cuda.set_device(device)
    )


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
        self._device = torch.device(device)
        self._rank = rank
        self._rows: MappedRows | None = None
        """Row memory that this worker has mapped. None until the scheduler has sent the memory's address."""
        self._mapped_ranks: list[int] = []
        """This rank's number as the only item, if the rank has mapped the row memory since the last
        acknowledgements, else empty."""
        self._publisher = EmbeddingPublisher(runtime, self._record_save)
        self._lock = threading.Lock()
        self._saves: list[tuple[str, int]] = []
        self._copy_times: list[tuple[int, float]] = []
        self._tower_timer = TowerTimer(self._device)
        self._encode_rate = EwmaRate()
        """Measured seconds per row for the tower in earlier steps. The current step's time is not measured in
        time for its own embeddings."""

    def load(self, cache: dict[str, torch.Tensor], metadata: CornplugECMetadata) -> None:
        """Copy the embeddings that have arrived, each of shape (rows, hidden), to the engine's encoder
        cache."""
        if metadata.row_memory_address and self._rows is None:
            self._map_rows(metadata.row_memory_address)
        began, size = time.perf_counter(), 0
        for item in metadata.arrived:
            rows = self._copy_to_device(item.data)
            cache[item.identifier] = rows.view(getattr(torch, item.dtype)).view(item.shape)
            size += rows.numel()
        if self._publishes:
            if metadata.arrived:
                self._copy_times.append((size, time.perf_counter() - began))
            self._tower_timer.begin_step()

    def _map_rows(self, address: str) -> None:
        rows = create_mapped_rows(self._device)
        if rows.map_memory(address):
            self._rows, self._mapped_ranks = rows, [self._rank]

    def _copy_to_device(self, data: bytearray | RowLocation) -> torch.Tensor:
        """Return an embedding's bytes on the device, as a tensor of shape (bytes,)."""
        if not isinstance(data, RowLocation):
            return torch.frombuffer(data, dtype=torch.uint8).to(self._device, non_blocking=True)
        assert self._rows is not None, "this rank has reported to the scheduler that it mapped the memory"
        return self._rows.copy_rows(data)

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
        copied, self._copy_times = self._copy_times, []
        encoded = self._tower_timer.take_measurements()
        for rows, seconds in encoded:
            self._encode_rate.add_sample(rows, seconds)
        mapped, self._mapped_ranks = self._mapped_ranks, []
        copied_rows = (
            [] if self._rows is None else [(self._rank, offset) for offset in self._rows.take_copied()]
        )
        if not (saves or encoded or copied or mapped or copied_rows):
            return None
        return CornplugECWorkerMetadata(saves, encoded, copied, mapped, copied_rows)

    def close(self) -> None:
        """Finish the current save, and wait for the copies of received embeddings."""
        self._publisher.close()
        if self._rows is not None:
            self._rows.close()

    def _record_save(self, outcome: str, size: int) -> None:
        with self._lock:
            self._saves.append((outcome, size))
