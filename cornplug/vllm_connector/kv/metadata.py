"""Messages between the KV connector's two halves, one per step, over vLLM's own channel."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from cornplug.store.base import PayloadLocation
from cornplug.store.leases import Leases


class PageWrite(msgspec.Struct, frozen=True):
    """A reserved page, named by its reservation's token."""

    index: int
    token: int
    location: PayloadLocation


@dataclass(frozen=True, slots=True)
class PageLoad:
    """Fill tokens [start, end) of a request from pages; `blocks` are all its blocks, in order."""

    request_id: str
    start: int
    end: int
    first_page: int
    """The place in the request of the first of `pages`."""
    pages: Leases
    blocks: array[int]
    """An array, not a tuple: it travels to the workers as one run of bytes."""
    deadline_s: float = 30.0
    """From the worker's hearing of it; the pages not begun by then are computed."""
    group: int = 0
    """Cache group of these blocks; a request's load is one of each."""

    def blocks_from(self, first_token: int, block_size: int) -> set[int]:
        """The blocks that hold tokens [first_token, end)."""
        return set(self.blocks[first_token // block_size : -(-self.end // block_size)])


class PageSave(msgspec.Struct, frozen=True):
    """Copy whole pages of a request out, once this step's forward has computed them."""

    name: str
    """Unique: a later request may have the id of an earlier request."""
    pages: tuple[PageWrite, ...]
    blocks: tuple[int, ...]
    group: int = 0
    """Cache group of these blocks."""


@dataclass(slots=True)
class CornplugKVMetadata(KVConnectorMetadata):
    """Scheduler half -> worker halves: the moves of one step."""

    loads: list[PageLoad] = field(default_factory=list)
    saves: list[PageSave] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    """Names of saves whose blocks were given away, and may have been overwritten."""
    timed: int = 0
    """Number of this step where its end is to be told, else 0."""
    computes: bool = True
    """Whether the step computes tokens."""

    @property
    def begins(self) -> bool:
        """Whether the worker halves have something new to do."""
        return bool(self.loads or self.saves or self.given_up)


@dataclass(slots=True)
class CornplugKVWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker halves -> scheduler half."""

    written: dict[int, dict[int, int]] = field(default_factory=dict)
    """Reservation token -> segment -> checksum. Whole once every rank has added its share."""
    failed_writes: dict[int, int] = field(default_factory=dict)
    """Reservation token -> how many segments are missing: each rank adds its own."""
    failed_loads: dict[str, str] = field(default_factory=dict)
    """Request -> reason."""
    loaded_bytes: int = 0
    loading_s: float = 0.0
    """Seconds that the mover spent on them, its queue not counted."""
    staged_pages: int = 0
    """Pages that a GPU could not copy by itself."""
    steps: list[int] = field(default_factory=list)
    """Timed steps that have ended."""
    unusable: str = ""
    """Why this worker's cache cannot be mapped to pages; "" when it can."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, CornplugKVWorkerMetadata)
        for token, sums in other.written.items():
            self.written.setdefault(token, {}).update(sums)
        for token, segments in other.failed_writes.items():
            self.failed_writes[token] = self.failed_writes.get(token, 0) + segments
        self.failed_loads |= other.failed_loads
        self.loaded_bytes += other.loaded_bytes
        self.loading_s = max(self.loading_s, other.loading_s)
        self.staged_pages = max(self.staged_pages, other.staged_pages)
        self.steps += other.steps
        self.unusable = self.unusable or other.unusable
        return self

    def is_empty(self) -> bool:
        return not (
            self.written
            or self.failed_writes
            or self.failed_loads
            or self.unusable
            or self.loaded_bytes
            or self.staged_pages
            or self.steps
        )
