"""Messages between the encoder-cache connector's two halves, and the memory that they share for rows.

    scheduler   room ──copied and verified──> place ──in a step's metadata──> workers, one copy to each device
                  <──────────────free once every rank has them─────────────────┘

The metadata of a step is pickled for each worker process. If it contained the rows, the rows of a large image
would be copied on the engine's thread once more per rank. Only this engine's processes can access this
memory, so verified rows do not change.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from cornplug.store.arena import sealed_memory
from cornplug.store.daemon.allocator import ArenaAllocator, align_up
from cornplug.vllm_connector import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig


CAPACITY_BYTES: Final = 1 << 30
"""Maximum size. Pages are allocated on first use, and kept."""
_GROWTH_BYTES: Final = 64 << 20


class RowPlace(NamedTuple):
    """Range of bytes in the row memory."""

    offset: int
    size_bytes: int


class RowMemory:
    """The scheduler's side. Used by the engine's thread.

    It offers memory once each of `ranks` workers has mapped it. Workers on other hosts cannot map it.
    """

    def __init__(self, ranks: int, *, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._ranks: Final = frozenset(range(ranks))
        self._unmapped = set(self._ranks)
        self._capacity_bytes = capacity_bytes
        self._extents = ArenaAllocator()
        self._sent: dict[int, tuple[RowPlace, set[int]]] = {}
        """Offset -> (place, ranks that have not copied it)."""
        self._fd, memory = sealed_memory("cornplug-rows", capacity_bytes, others_write=True)
        self._bytes = memoryview(memory)
        self._address = f"{os.getpid()}:{self._fd}:{os.fstat(self._fd).st_ino}"

    @property
    def address(self) -> str:
        """Address for `mapped`, or "" once all ranks have mapped the memory."""
        return self._address if self._unmapped else ""

    def note_mapped(self, rank: int) -> None:
        """Record that this rank has mapped the memory."""
        self._unmapped.discard(rank)

    def room(self, size_bytes: int) -> RowPlace | None:
        """Allocate a place of `size_bytes`, or return None if the memory is full or a rank has not mapped
        it."""
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
        """Return the bytes of a place, writable."""
        return self._bytes[place.offset : place.offset + place.size_bytes]

    def free(self, place: RowPlace) -> None:
        """Free a place of which no worker was notified."""
        self._extents.free(place.offset, align_up(place.size_bytes))

    def send(self, place: RowPlace) -> None:
        """Record that every rank is notified of a place in this step. It becomes free when all have copied
        it."""
        self._sent[place.offset] = place, set(self._ranks)

    def note_copied(self, rank: int, offset: int) -> None:
        """Record that this rank has copied the place at `offset`."""
        place, ranks = self._sent.get(offset, (None, set()))
        ranks.discard(rank)
        if place is not None and not ranks:
            del self._sent[offset]
            self.free(place)

    def close(self) -> None:
        """Close the descriptor. The memory is freed with the last process that maps it."""
        os.close(self._fd)


def row_memory(config: VllmConfig) -> RowMemory | None:
    """Create memory for this engine core's embeddings, or return None if its metadata carries them without a
    copy."""
    parallel = config.parallel_config
    if parallel.distributed_executor_backend == "uni" and config.device_config.device_type == "cpu":
        return None  # There is one process and no device, so the worker uses the received bytes directly.
    try:
        # Only the first stage has the encoder.
        return RowMemory(parallel.tensor_parallel_size * parallel.prefill_context_parallel_size)
    except OSError as e:
        compat.logger.debug("cornplug: embeddings are sent in the steps' metadata: %s", e)
        return None


def mapped(address: str) -> mmap.mmap | None:
    """Map the memory at a `RowMemory`'s address, or return None if this process cannot access it."""
    pid, fd, inode = map(int, address.split(":"))
    try:
        with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
            found = os.fstat(file.fileno())
            # In another PID namespace, or on another host, the path is another file or does not exist.
            return mmap.mmap(file.fileno(), found.st_size) if found.st_ino == inode else None
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class ArrivedEmbedding:
    """A verified embedding with its bytes. An embedding that the scheduler half has promised reaches the
    worker even if the store and the service die in between."""

    identifier: str
    dtype: str
    shape: tuple[int, ...]
    data: bytearray | RowPlace
    """The rows, or their place in the memory that scheduler and workers map."""


@dataclass(slots=True)
class CornplugECMetadata(ECConnectorMetadata):
    """Message from the scheduler half to the worker halves for one step."""

    arrived: list[ArrivedEmbedding] = field(default_factory=list)
    publish: bool = True
    """Whether embeddings computed in this step may be saved."""
    again: list[str] = field(default_factory=list)
    """Identifiers in the engine's own cache that the store lacks, to be saved again."""
    epoch: int = 0
    """Epoch of the weights that compute this step (`engine_common.weights_guard`)."""
    row_memory: str = ""
    """Address of the memory of `RowPlace`s, until every rank has mapped it."""


@dataclass(slots=True)
class CornplugECWorkerMetadata(ECConnectorWorkerMetadata):
    """Message from a worker half to the scheduler half."""

    saves: list[tuple[str, int]] = field(default_factory=list)
    """(outcome, payload bytes) of saved embeddings."""
    encoded: list[tuple[int, float]] = field(default_factory=list)
    """(rows, seconds) of each step of the tower."""
    copied: list[tuple[int, float]] = field(default_factory=list)
    """(bytes, seconds) of embeddings copied into the engine's cache."""
    mapped: list[int] = field(default_factory=list)
    """Ranks that have mapped the scheduler's row memory."""
    copied_rows: list[tuple[int, int]] = field(default_factory=list)
    """(rank, offset) of places that the rank has copied."""

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        assert isinstance(other, CornplugECWorkerMetadata)
        self.saves += other.saves
        self.encoded += other.encoded
        self.copied += other.copied
        self.mapped += other.mapped
        self.copied_rows += other.copied_rows
        return self
