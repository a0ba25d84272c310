"""A worker's side of the row memory (`row_memory`): copies to its device alongside the engine's work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import torch
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

from cornplug.vllm_connector.ec.row_memory import RowPlace, mapped
from cornplug.vllm_connector.kv_copies.registered_memory import RegisteredMemory

_ARENA: Final = b"rows"


class RowCopies(Protocol):
    """Destination of row copies."""

    def copy(self, runs: list[torch.Tensor], size_bytes: int) -> tuple[torch.Tensor, Any]:
        """Copy `runs` into one tensor on the device, which the engine's later work can use. Returns the
        tensor and the end event."""

    def done(self, end: Any) -> bool:
        """Return whether `end` has completed, so `runs` are no longer read."""

    def wait(self, end: Any) -> None:
        """Wait for `end`."""


class CpuCopies:
    """Synchronous copies to host memory."""

    def copy(self, runs: list[torch.Tensor], size_bytes: int) -> tuple[torch.Tensor, None]:
        return torch.cat(runs), None

    def done(self, end: None) -> bool:
        return True

    def wait(self, end: None) -> None:
        """Do nothing, because copies are synchronous."""


class CudaCopies:
    """Copies on a separate stream. The engine's kernels wait for the rows, but the engine's thread does
    not."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def copy(self, runs: list[torch.Tensor], size_bytes: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        engine = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            # The memory belongs to this stream, so no kernel of the engine still uses it.
            there = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            at = 0
            for run in runs:
                there[at : at + len(run)].copy_(run, non_blocking=True)
                at += len(run)
        end = torch.cuda.Event()
        end.record(self._stream)
        engine.wait_event(end)
        there.record_stream(engine)
        return there, end

    def done(self, end: torch.cuda.Event) -> bool:
        return end.query()

    def wait(self, end: torch.cuda.Event) -> None:
        end.synchronize()


class MappedRows:
    """Mapped rows of one rank. Used by the engine's thread.

    Args:
        register, unregister: see `RegisteredMemory`. None if nothing is registered.
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
        self._ongoing: deque[tuple[int, Any]] = deque()
        """(offset, end) of copies, in order."""
        if self._registered is not None:
            self._registered.join(self._is_idle)

    def map(self, address: str) -> bool:
        """Map the memory at this address, and return whether it is accessible."""
        if self._bytes is None and (found := mapped(address)) is not None:
            self._memory = memoryview(found)
            self._bytes = torch.from_numpy(np.frombuffer(found, np.uint8))
        return self._bytes is not None

    def mapped(self, arena_id: bytes) -> memoryview | None:
        """The whole memory, for `RegisteredMemory`."""
        return self._memory

    def rows(self, place: RowPlace) -> torch.Tensor:
        """Copy a place to the device, shape (bytes,). `copied` returns the place when it is free."""
        assert self._bytes is not None, "the scheduler was notified that this rank has mapped its memory"
        there, end = self._copies.copy(self._runs(self._bytes, place), place.size_bytes)
        self._ongoing.append((place.offset, end))
        return there

    def copied(self) -> list[int]:
        """Offsets of places that are no longer read, each once."""
        found = []
        while self._ongoing and self._copies.done(self._ongoing[0][1]):
            found.append(self._ongoing.popleft()[0])
        return found

    def close(self) -> None:
        """Wait for the copies, and unregister the memory."""
        while self._ongoing:
            self._copies.wait(self._ongoing.popleft()[1])
        if self._registered is not None:
            self._registered.leave(self._is_idle)

    def _is_idle(self) -> bool:
        return not self._ongoing

    def _runs(self, memory: torch.Tensor, place: RowPlace) -> list[torch.Tensor]:
        """Split a place, because no copy may cross two registered ranges or the end of the last one."""
        at, end = place.offset, place.offset + place.size_bytes
        if self._registered is None:
            return [memory[at:end]]
        if not self._registered.reaches(_ARENA, end):
            return [memory[at:end].clone()]
        runs = []
        for _, size_bytes in self._registered.runs(_ARENA, at, end - at):
            runs.append(memory[at : at + size_bytes])
            at += size_bytes
        return runs


def mapped_rows(device: torch.device) -> MappedRows:
    """Create a worker's side for its device."""
    if device.type != "cuda":
        return MappedRows(CpuCopies())
    return MappedRows(
        CudaCopies(device), host_register, host_unregister, lambda: torch.cuda.set_device(device)
    )
