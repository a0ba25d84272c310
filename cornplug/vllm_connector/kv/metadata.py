"""Messages between the KV connector's scheduler half and worker halves, one per step and direction, sent over
vLLM's own channel."""

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
    """Location in the store to which the worker halves write one page, with the token of its reservation."""

    index: int
    token: int
    location: PayloadLocation


@dataclass(frozen=True, slots=True)
class PageLoad:
    """Instruction to load tokens [start, end) of a request from stored pages. `blocks` has the ids of all of
    the request's blocks, in order."""

    request_id: str
    start: int
    end: int
    first_page: int
    """Index in the request of the first page in `pages`."""
    pages: Leases
    blocks: array[int]
    """Block ids of the request. An array instead of a tuple is serialized as one byte string."""
    deadline_s: float = 30.0
    """Time limit in seconds after the worker received the message. Pages whose copy has not begun by then are
    computed instead."""
    group: int = 0
    """Index of the cache group of these blocks. The load of one request has one message per group."""

    def blocks_from(self, first_token: int, block_size: int) -> set[int]:
        """Return the ids of the blocks that contain tokens [first_token, end)."""
        return set(self.blocks[first_token // block_size : -(-self.end // block_size)])


class PageSave(msgspec.Struct, frozen=True):
    """Instruction to copy complete pages from the request's blocks to the store, after this step's forward
    pass has computed them."""

    name: str
    """Unique name of the save. A request id is not sufficient, because a later request may reuse it."""
    pages: tuple[PageWrite, ...]
    blocks: tuple[int, ...]
    group: int = 0
    """Index of the cache group of these blocks."""


@dataclass(slots=True)
class CornplugKVMetadata(KVConnectorMetadata):
    """Message from the scheduler half to the worker halves: the loads and saves of one step."""

    loads: list[PageLoad] = field(default_factory=list)
    saves: list[PageSave] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    """Names of saves to give up, because their blocks were reused and may have been overwritten."""
    timed: int = 0
    """Sequence number of this step if the workers should report its end, else 0."""
    computes: bool = True
    """Whether this step computes tokens."""

    @property
    def begins(self) -> bool:
        """Whether the message contains loads, saves or saves to give up."""
        return bool(self.loads or self.saves or self.given_up)


@dataclass(slots=True)
class CornplugKVWorkerMetadata(KVConnectorWorkerMetadata):
    """Message from the worker halves to the scheduler half with the results of loads and saves. vLLM merges
    the messages of all ranks with `aggregate`."""

    written: dict[int, dict[int, int]] = field(default_factory=dict)
    """Checksums of the written segments of each page, by reservation token and segment number. Complete when
    every rank has added the checksums of its segments."""
    failed_writes: dict[int, int] = field(default_factory=dict)
    """Number of segments that were not written, by reservation token. Each rank adds the number of its own
    segments."""
    failed_loads: dict[str, str] = field(default_factory=dict)
    """Reason why a request's load failed, by request id."""
    loaded_bytes: int = 0
    loading_s: float = 0.0
    """Seconds that the mover spent on loads, without the time that loads waited in its queue."""
    staged_pages: int = 0
    """Number of pages that a GPU could not copy directly, and that were copied through staging memory."""
    steps: list[int] = field(default_factory=list)
    """Sequence numbers of timed steps that have ended."""
    unusable: str = ""
    """Reason why this worker's KV caches cannot be mapped to pages, or "" if they can."""

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
