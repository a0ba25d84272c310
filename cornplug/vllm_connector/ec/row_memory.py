"""Verified rows of embeddings, on their way from the scheduler to the workers in memory that both map.

    scheduler   room ──copied and verified──> place ──in a step's metadata──> workers, one copy to each device
                  <──────────────free once every rank has them─────────────────┘

The metadata of a step is pickled for each worker process: with the rows in it, those of a large image passed
the engine's thread once more for each rank. Only this engine's processes reach this memory, so rows that
were verified stay what they were.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from cornplug.store.daemon.allocator import ArenaAllocator, align_up
from cornplug.store.sealed_memory import sealed_memory
from cornplug.vllm_connector import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CAPACITY_BYTES: Final = 1 << 30
"""Pages are made as they are first used, and kept."""
_GROWTH_BYTES: Final = 64 << 20


class RowPlace(NamedTuple):
    """Bytes in the memory of rows."""

    offset: int
    size_bytes: int


class RowMemory:
    """The scheduler's end; used by the engine's thread.

    It offers room once each of `ranks` workers has mapped it: those of another host cannot."""

    def __init__(self, ranks: int, *, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._ranks: Final = frozenset(range(ranks))
        self._unmapped = set(self._ranks)
        self._capacity_bytes = capacity_bytes
        self._extents = ArenaAllocator()
        self._sent: dict[int, tuple[RowPlace, set[int]]] = {}
        """Offset -> the place, and the ranks that have not copied it."""
        self._fd, memory = sealed_memory("cornplug-rows", capacity_bytes, others_write=True)
        self._bytes = memoryview(memory)
        self._address = f"{os.getpid()}:{self._fd}:{os.fstat(self._fd).st_ino}"

    @property
    def address(self) -> str:
        """Where `mapped` finds it; "" once all ranks have."""
        return self._address if self._unmapped else ""

    def note_mapped(self, rank: int) -> None:
        """This rank reads places."""
        self._unmapped.discard(rank)

    def room(self, size_bytes: int) -> RowPlace | None:
        """A place for so many bytes; None where there is none, or not every rank would reach it."""
        if self._unmapped or not size_bytes:
            return None
        room_bytes = align_up(size_bytes)
        offset = self._extents.allocate(room_bytes)
        if offset is None:
            left = self._capacity_bytes - self._extents.end_bytes
            if left < room_bytes:
                return None
            self._extents.extend(min(left, max(_GROWTH_BYTES, room_bytes)))
            offset = self._extents.allocate(room_bytes)
        return None if offset is None else RowPlace(offset, size_bytes)

    def view(self, place: RowPlace) -> memoryview:
        """The bytes of a place, writable."""
        return self._bytes[place.offset : place.offset + place.size_bytes]

    def free(self, place: RowPlace) -> None:
        """Take back a place that no worker was told of."""
        self._extents.free(place.offset, align_up(place.size_bytes))

    def send(self, place: RowPlace) -> None:
        """Every rank is told of a place in this step: it is free once all have copied it."""
        self._sent[place.offset] = place, set(self._ranks)

    def note_copied(self, rank: int, offset: int) -> None:
        """This rank has the rows of the place at `offset`."""
        place, ranks = self._sent.get(offset, (None, set()))
        ranks.discard(rank)
        if place is not None and not ranks:
            del self._sent[offset]
            self.free(place)

    def close(self) -> None:
        """Close the descriptor: the memory ends with the last process that maps it."""
        os.close(self._fd)


def row_memory(config: VllmConfig) -> RowMemory | None:
    """Memory for this engine core's embeddings; None where its metadata carries them at no cost."""
    parallel = config.parallel_config
    if parallel.distributed_executor_backend == "uni" and config.device_config.device_type == "cpu":
        return None  # One process, and no device: the worker takes the very bytes that arrived.
    try:
        # The first stage has the encoder; others are told of nothing.
        return RowMemory(parallel.tensor_parallel_size * parallel.prefill_context_parallel_size)
    except OSError as e:
        compat.logger.debug("cornplug: embeddings are sent in the steps' metadata: %s", e)
        return None


def mapped(address: str) -> mmap.mmap | None:
    """The memory at a `RowMemory`'s address; None where this process cannot reach it."""
    pid, fd, inode = map(int, address.split(":"))
    try:
        with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
            found = os.fstat(file.fileno())
            # In another PID namespace, or on another host, it is another file, if any.
            return mmap.mmap(file.fileno(), found.st_size) if found.st_ino == inode else None
    except (OSError, ValueError):
        return None
