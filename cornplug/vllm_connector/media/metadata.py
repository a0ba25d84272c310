"""Messages between the encoder-cache connector's scheduler half and worker halves, and the row memory: shared
memory through which they pass embedding rows.

    store ──copied and verified──> row memory ──location in a step's metadata──> workers ──one copy──> device
                                      ^───────free once every rank has copied the rows─┘

vLLM pickles the metadata of a step for each worker process. If the metadata contained the rows of a large
image, the engine's thread would copy the rows once more per rank. Only this engine's processes can access the
row memory, so verified rows do not change.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from cornplug.store.arena import ArenaAllocator, align_up, create_sealed_memory
from cornplug.vllm_connector import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig


CAPACITY_BYTES: Final = 1 << 30
"""Maximum size in bytes of the row memory. Memory pages are allocated on first use, and not freed."""
_GROWTH_BYTES: Final = 64 << 20


class RowLocation(NamedTuple):
    """Range of bytes in the row memory for one embedding."""

    offset: int
    size_bytes: int


class RowMemory:
    """Scheduler's interface to the row memory, in which the scheduler passes embedding rows to the workers.
    Used by the engine's thread.

    `allocate` allocates space only after each of the `ranks` workers has mapped the memory. Workers on other
    hosts cannot map it.
    """

    def __init__(self, ranks: int, *, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._ranks: Final = frozenset(range(ranks))
        self._unmapped = set(self._ranks)
        self._capacity_bytes = capacity_bytes
        self._allocator = ArenaAllocator()
        self._sent: dict[int, tuple[RowLocation, set[int]]] = {}
        """(location, ranks that have not copied its rows yet) for each location that was sent to the workers,
        by offset."""
        self._fd, memory = create_sealed_memory("cornplug-rows", capacity_bytes, others_write=True)
        self._bytes = memoryview(memory)
        self._address = f"{os.getpid()}:{self._fd}:{os.fstat(self._fd).st_ino}"

    @property
    def address(self) -> str:
        """Address of the row memory, which workers pass to `map_row_memory`. "" if all ranks have already
        mapped the memory."""
        return self._address if self._unmapped else ""

    def record_mapped(self, rank: int) -> None:
        """Record that a rank has mapped the row memory."""
        self._unmapped.discard(rank)

    def allocate(self, size_bytes: int) -> RowLocation | None:
        """Allocate `size_bytes` bytes in the row memory. Returns None if the memory is full or a rank has not
        mapped it yet."""
        if self._unmapped or not size_bytes:
            return None
        room_bytes = align_up(size_bytes)
        offset = self._allocator.allocate(room_bytes)
        if offset is None:
            left = self._capacity_bytes - self._allocator.end_bytes
            if left < room_bytes:
                return None
            self._allocator.extend(min(left, max(_GROWTH_BYTES, room_bytes)))
            offset = self._allocator.allocate(room_bytes)
        return None if offset is None else RowLocation(offset, size_bytes)

    def view(self, location: RowLocation) -> memoryview:
        """Return a writable view of the bytes at a location."""
        return self._bytes[location.offset : location.offset + location.size_bytes]

    def free(self, location: RowLocation) -> None:
        """Free a location that was not sent to the workers."""
        self._allocator.free(location.offset, align_up(location.size_bytes))

    def mark_sent(self, location: RowLocation) -> None:
        """Record that a location is sent to every rank in this step. It becomes free when all ranks have
        copied it."""
        self._sent[location.offset] = location, set(self._ranks)

    def record_copied(self, rank: int, offset: int) -> None:
        """Record that a rank has copied the rows at `offset`."""
        location, ranks = self._sent.get(offset, (None, set()))
        ranks.discard(rank)
        if location is not None and not ranks:
            del self._sent[offset]
            self.free(location)

    def close(self) -> None:
        """Close the memory's file descriptor. The memory is freed when the last process that maps it ends."""
        os.close(self._fd)


def create_row_memory(config: VllmConfig) -> RowMemory | None:
    """Create the row memory for this engine core's embeddings. Return None if the metadata of a step can
    carry the rows without a copy, or if the memory cannot be created."""
    parallel = config.parallel_config
    if parallel.distributed_executor_backend == "uni" and config.device_config.device_type == "cpu":
        return None  # With one process and no device, the worker uses the received bytes directly.
    try:
        # Only the first pipeline stage has the encoder.
        return RowMemory(parallel.tensor_parallel_size * parallel.prefill_context_parallel_size)
    except OSError as e:
        compat.logger.debug(
            "cornplug: cannot create row memory, so step metadata contains the embeddings: %s",
            e,
        )
        return None


def map_row_memory(address: str) -> mmap.mmap | None:
    """Map the row memory at this `RowMemory.address`, or return None if this process cannot access it."""
    pid, fd, inode = map(int, address.split(":"))
    try:
        with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
            found = os.fstat(file.fileno())
            # In another PID namespace or on another host, this path is a different file or does not exist.
            return mmap.mmap(file.fileno(), found.st_size) if found.st_ino == inode else None
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class ArrivedEmbedding:
    """Verified embedding that the scheduler half has received, including its bytes. It reaches the worker
    even if the store and the service fail in the meantime."""

    identifier: str
    dtype: str
    shape: tuple[int, ...]
    data: bytearray | RowLocation
    """Bytes of the rows, or their location in the row memory that scheduler and workers map."""


@dataclass(slots=True)
class CornplugECMetadata(ECConnectorMetadata):
    """Message from the scheduler half to the worker halves of the encoder-cache connector for one step."""

    arrived: list[ArrivedEmbedding] = field(default_factory=list)
    publish: bool = True
    """Whether embeddings computed in this step may be saved."""
    save_again: list[str] = field(default_factory=list)
    """Identifiers of embeddings that are in the engine's own cache but not in the store. They are saved
    again."""
    epoch: int = 0
    """Epoch of the weights in this step, a counter of weight updates (`engine_common.weights_guard`)."""
    row_memory_address: str = ""
    """Address of the row memory, or "" if every rank has already mapped it."""


@dataclass(slots=True)
class CornplugECWorkerMetadata(ECConnectorWorkerMetadata):
    """Message from a worker half to the scheduler half of the encoder-cache connector."""

    saves: list[tuple[str, int]] = field(default_factory=list)
    """(outcome, number of payload bytes) for each finished save of an embedding."""
    encode_times: list[tuple[int, float]] = field(default_factory=list)
    """(number of rows, seconds) for each step in which the tower ran."""
    copy_times: list[tuple[int, float]] = field(default_factory=list)
    """(number of bytes, seconds) for each time that embeddings were copied into the engine's cache."""
    mapped_ranks: list[int] = field(default_factory=list)
    """Ranks that have mapped the row memory since the last message."""
    copied_rows: list[tuple[int, int]] = field(default_factory=list)
    """(rank, offset in the row memory) for each location whose rows the rank has copied."""

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        assert isinstance(other, CornplugECWorkerMetadata)
        self.saves += other.saves
        self.encode_times += other.encode_times
        self.copy_times += other.copy_times
        self.mapped_ranks += other.mapped_ranks
        self.copied_rows += other.copied_rows
        return self
