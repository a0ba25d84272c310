"""Messages between the KV connector's two halves, one per step, sent over vLLM's own channel."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from cornplug.store.base import Leases, PayloadLocation


class PageWrite(msgspec.Struct, frozen=True):
    """Reserved page, identified by its reservation's token."""

    index: int
    token: int
    location: PayloadLocation


@dataclass(frozen=True, slots=True)
class PageLoad:
    """Request to load tokens [start, end) of a request from pages. `blocks` are all of the request's blocks,
    in order."""

    request_id: str
    start: int
    end: int
    first_page: int
    """Index in the request of the first of `pages`."""
    pages: Leases
    blocks: array[int]
    """An array instead of a tuple, so that it is serialized as one byte string."""
    deadline_s: float = 30.0
    """Deadline in seconds since the worker received the message. Pages not begun by then are computed."""
    group: int = 0
    """Cache group of these blocks. A request's load has one message per group."""

    def blocks_from(self, first_token: int, block_size: int) -> set[int]:
        """Return the blocks that hold tokens [first_token, end)."""
        return set(self.blocks[first_token // block_size : -(-self.end // block_size)])


class PageSave(msgspec.Struct, frozen=True):
    """Request to copy whole pages to the store after this step's forward pass has computed them."""

    name: str
    """Unique name. A request id is not sufficient, because a later request may reuse it."""
    pages: tuple[PageWrite, ...]
    blocks: tuple[int, ...]
    group: int = 0
    """Cache group of these blocks."""


@dataclass(slots=True)
class CornplugKVMetadata(KVConnectorMetadata):
    """Message from the scheduler half to the worker halves: the loads and saves of one step."""

    loads: list[PageLoad] = field(default_factory=list)
    saves: list[PageSave] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    """Names of saves whose blocks were reused, and may have been overwritten."""
    timed: int = 0
    """Number of this step if its end should be acknowledged, else 0."""
    computes: bool = True
    """Whether the step computes tokens."""

    @property
    def begins(self) -> bool:
        """Whether the worker halves have something new to do."""
        return bool(self.loads or self.saves or self.given_up)


@dataclass(slots=True)
class CornplugKVWorkerMetadata(KVConnectorWorkerMetadata):
    """Message from the worker halves to the scheduler half."""

    written: dict[int, dict[int, int]] = field(default_factory=dict)
    """Checksums by segment, by reservation token. Complete when every rank has added its segments."""
    failed_writes: dict[int, int] = field(default_factory=dict)
    """Number of missing segments, by reservation token. Each rank adds its own."""
    failed_loads: dict[str, str] = field(default_factory=dict)
    """Reason, by request."""
    loaded_bytes: int = 0
    loading_s: float = 0.0
    """Seconds that the mover spent on them, without the time in its queue."""
    staged_pages: int = 0
    """Number of pages that a GPU could not copy directly."""
    steps: list[int] = field(default_factory=list)
    """Numbers of timed steps that have ended."""
    unusable: str = ""
    """Reason why this worker's cache cannot be mapped to pages, or ""."""

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
