"""Copies of embedding rows from the store's memory to a rank's device.

    store's memory ──copied and verified──> host memory ──> device

The host memory of a GPU is pinned, so the GPU copies the rows while the CPU and the engine's kernels
continue. torch keeps a freed range of pinned memory until the GPU's copies from it have ended. On a CPU, the
host memory is the result."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import torch

from cornplug.codec import PayloadHeader
from cornplug.errors import CodecError, StoreUnavailable
from cornplug.store.base import PayloadLocation, Store
from cornplug.store.payload import copy_leased, lease_payload


class RowCopies:
    """Copies embedding rows to one device. `read` can be called by any thread. `send` must be called by the
    thread that starts the engine's work on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device: Final = device
        self._pinned: Final = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device, priority=-1) if self._pinned else None

    def read(self, store: Store, location: PayloadLocation, checksums: Sequence[int]) -> torch.Tensor:
        """Copy a leased payload to host memory and verify the copy. Return it as a tensor of shape (bytes,).

        Raises CodecError("corrupt"), or StoreUnavailable("stale_location") if this process cannot access the
        location.
        """
        rows = self._allocate(location.size)
        copy_leased(store, location, checksums, memoryview(rows.numpy()))
        return rows

    def fetch(
        self, store: Store, key: bytes, *, deadline_s: float
    ) -> tuple[PayloadHeader, torch.Tensor] | None:
        """Return the header and a verified copy of a stored payload in host memory, or None if the store does
        not have it in memory.

        Raises StoreUnavailable if the store does not reply. Raises CodecError if the entry does not match its
        header. The entry is then deleted from the store.
        """
        found = lease_payload(store, key, deadline_s=deadline_s)
        if found is None:
            return None
        lease, header = found
        try:
            return header, self.read(store, lease.location, header.checksums)
        except CodecError:
            with suppress(StoreUnavailable):
                store.delete([key], deadline_s=deadline_s)
            raise
        finally:
            # If the store has ended, the lease has ended too.
            with suppress(StoreUnavailable):
                store.release([lease.token], deadline_s=deadline_s)

    def from_bytes(self, data: bytes | bytearray) -> torch.Tensor:
        """Copy bytes to host memory. Return them as a tensor of shape (bytes,)."""
        rows = self._allocate(len(data))
        memoryview(rows.numpy())[:] = data
        return rows

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows from `read` or `from_bytes` on the device. Operations that the engine starts later can
        use them. Does not wait for a GPU's copy."""
        if self._stream is None:
            return rows
        engine = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            # The memory is allocated on this stream, so none of the engine's kernels still use it.
            there = torch.empty(len(rows), dtype=torch.uint8, device=self._device)
            there.copy_(rows, non_blocking=True)
        engine.wait_event(self._stream.record_event())
        there.record_stream(engine)
        return there

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._pinned)
