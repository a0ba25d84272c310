"""A GPU that copies the store's memory by itself, played on CPU tensors with real bytes that arrive late."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cornplug.engine_common.rank_pages import RankPages
from cornplug.vllm_connector.kv.arena_moves import ArenaTransfers, Fallback, SharedDevice
from cornplug.vllm_connector.kv.metadata import TransferReports
from cornplug.vllm_connector.kv_copies import arena_copies
from cornplug.vllm_connector.kv_copies.arena_copies import BLOCK_BYTES, STATE_WORDS, ArenaCopies
from cornplug.vllm_connector.kv_copies.cache_blocks import BlockSizes, CacheBlocks
from cornplug.vllm_connector.kv_copies.mover import ByteBudget, PolledMover
from cornplug.vllm_connector.kv_copies.registered_memory import RegisteredMemory

from .late_device import LateDevice

STALE_BYTE = 0xAA
BYTES_PER_S = 50e9
"""Bandwidth of this GPU's bus."""


class NumpyChecksums:
    """`DeviceChecksums` without Triton, whose interpreter takes milliseconds a KiB."""

    def begin(self, data: torch.Tensor, segment_bytes: int) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            words = data.flatten().view(torch.int64).numpy().view(np.uint64)
        blocks = words.reshape(-1, segment_bytes // BLOCK_BYTES, 16, 8)
        keys = arena_copies._key_table().view(np.uint64)
        acc = np.broadcast_to(keys[256:264], (len(blocks), STATE_WORDS)).copy()
        low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
        for i in range(blocks.shape[1]):
            last = i == blocks.shape[1] - 1
            mixed = blocks[:, i] ^ keys[128 * last : 128 * last + 128].reshape(16, 8)
            beside = blocks[:, i].reshape(-1, 16, 4, 2)[..., ::-1].reshape(mixed.shape)
            acc += (beside + (mixed & low) * (mixed >> half)).sum(axis=1, dtype=np.uint64)
            if not last:
                acc = (acc ^ (acc >> np.uint64(47)) ^ keys[264:272]) * keys[272:280]
        with torch.utils._python_dispatch._disable_current_modes():
            return torch.from_numpy(acc.view(np.int64))


class HostRanges:
    """Memory that was registered with the device."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.gone: list[int] = []

    def register(self, address: int, size: int) -> bool:
        self.ranges[address] = size
        return True

    def unregister(self, address: int) -> None:
        del self.ranges[address]
        self.gone.append(address)

    def hold(self, address: int, size: int) -> bool:
        """Whether one registration has all of these bytes."""
        return any(start <= address and address + size <= start + n for start, n in self.ranges.items())


class EagerMemory(RegisteredMemory):
    """Registers in no time."""

    def can_access(self, arena_id: bytes, end: int) -> bool:
        super().can_access(arena_id, end)
        self._thread.submit(lambda: None).result()
        return super().can_access(arena_id, end)


class BatchCopies:
    """`swap_blocks_batch`: a copy to registered memory arrives with its slab's end, and leaves stale bytes
    there until then; one from there must find the same bytes then."""

    def __init__(self, device: LateDevice, ranges: HostRanges) -> None:
        self._device, self._ranges = device, ranges
        self.calls: list[list[int]] = []
        """Sizes of each call's copies."""
        self.error: Exception | None = None
        """Raised by every call, if set."""

    def __call__(
        self,
        sources: torch.Tensor,
        targets: torch.Tensor,
        sizes: torch.Tensor,
        is_src_access_order_any: bool = False,
    ) -> None:
        if self.error is not None:
            raise self.error
        columns = [one.tolist() for one in (sources, targets, sizes)]
        assert {one.dtype for one in (sources, targets, sizes)} == {torch.int64}
        assert all(one.is_contiguous() for one in (sources, targets, sizes))
        self.calls.append(columns[2])
        for source, target, size in zip(*columns, strict=True):
            data = ctypes.string_at(source, size)
            if self._at_host(target, size):
                assert not is_src_access_order_any, "another stream writes into the blocks"
                ctypes.memset(target, STALE_BYTE, size)
                self._device.later(lambda at=target, data=data: ctypes.memmove(at, data, len(data)))
            else:
                assert self._at_host(source, size), "a copy across two registrations, or of other memory"
                ctypes.memmove(target, data, size)
                self._device.later(lambda at=source, data=data: _unchanged(at, data))

    def _at_host(self, address: int, size: int) -> bool:
        hosts = [(one.data_ptr(), one.nbytes) for one in self._device.hosts]
        pinned = any(start <= address and address + size <= start + n for start, n in hosts)
        return pinned or self._ranges.hold(address, size)


def _unchanged(address: int, data: bytes) -> None:
    assert ctypes.string_at(address, len(data)) == data, "the store's memory was changed while it was read"


@dataclass(frozen=True)
class LateArena:
    """The copies of a rank, and what they are made of."""

    moves: ArenaTransfers
    ranges: HostRanges
    out: ArenaCopies
    into: ArenaCopies
    out_batch: BatchCopies
    into_batch: BatchCopies
    out_device: LateDevice
    rank: tuple[RankPages, TransferReports, CacheBlocks]
    """Arguments of `open_arena` that the rank's worker passed."""


def late_arena(
    pages: RankPages,
    reports: TransferReports,
    blocks: CacheBlocks,
    *,
    sizes: BlockSizes,
    fallback: Fallback,
    ranges: HostRanges,
) -> LateArena:
    """`open_arena` for caches on the CPU."""
    blocks.device = torch.device("cpu")  # The rig told the worker that they are on a GPU.
    devices = LateDevice(), LateDevice()
    out_batch, into_batch = (BatchCopies(device, ranges) for device in devices)
    sums: Any = NumpyChecksums()
    out, into = (
        ArenaCopies(blocks, device, sums, batch)
        for device, batch in zip(devices, (out_batch, into_batch), strict=True)
    )
    memory = EagerMemory(
        pages.store, ranges.register, ranges.unregister, lambda: None,
        min_bytes=mmap.PAGESIZE, max_bytes=5 * mmap.PAGESIZE,
    )  # fmt: skip
    shared = SharedDevice(memory, PolledMover(ByteBudget(BYTES_PER_S)))
    moves = ArenaTransfers(pages, reports, shared, (out, into), sizes=sizes, fallback=fallback)
    return LateArena(moves, ranges, out, into, out_batch, into_batch, devices[0], (pages, reports, blocks))
