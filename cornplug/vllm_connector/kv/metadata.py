"""Messages between the KV connector's scheduler half and worker halves, one per step and direction. vLLM's
own channel carries them. `TransferReports` collects the results of one worker's loads and saves for these
messages."""

from __future__ import annotations

import math
import threading
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from cornplug.engine_common.rank_pages import RankPages
from cornplug.store.base import Leases, PayloadLocation
from cornplug.vllm_connector.kv_copies.cache_blocks import BlockSizes, Table, kernel_table


class PageWrite(msgspec.Struct, frozen=True):
    """Location in the store to which the worker halves write one page, and the token of the reservation."""

    index: int
    token: int
    location: PayloadLocation


@dataclass(frozen=True, slots=True)
class PageLoad:
    """Instruction to load tokens [start, end) of a request from stored pages. `blocks` has the ids of all the
    request's blocks, in order."""

    request_id: str
    start: int
    end: int
    first_page: int
    """Index in the request of the first page in `pages`."""
    pages: Leases
    blocks: array[int]
    """Block ids of the request. An array is serialized as one byte string, a tuple is not."""
    deadline_s: float = 30.0
    """Time limit in seconds from the receipt of the message. Pages whose copy has not begun by then are
    computed instead."""
    group: int = 0
    """Index of the cache group of these blocks. A request's load has one message per group."""

    def part(self, start: int, stop: int, rows: int) -> PageLoad:
        """Return the load of `pages[start:stop]` only. `rows` is the number of tokens in a page."""
        first = self.first_page + start
        tokens = max(self.start, first * rows), min(self.end, (self.first_page + stop) * rows)
        return replace(self, start=tokens[0], end=tokens[1], first_page=first, pages=self.pages[start:stop])

    def blocks_from(self, first_token: int, block_size: int) -> set[int]:
        """Return the ids of the blocks that contain tokens [first_token, end)."""
        return set(self.blocks[first_token // block_size : -(-self.end // block_size)])


class PageSave(msgspec.Struct, frozen=True):
    """Instruction to copy complete pages from the request's blocks to the store, after this step's forward
    pass."""

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
    cancelled_saves: list[str] = field(default_factory=list)
    """Names of saves to cancel, because vLLM reused their blocks and may have overwritten them."""
    timed_step: int = 0
    """Sequence number of this step if the workers must report its end, else 0."""
    computes: bool = True
    """Whether this step computes tokens."""

    @property
    def has_transfers(self) -> bool:
        """Whether the message contains loads, saves or cancelled saves."""
        return bool(self.loads or self.saves or self.cancelled_saves)


@dataclass(slots=True)
class CornplugKVWorkerMetadata(KVConnectorWorkerMetadata):
    """Message from the worker halves to the scheduler half with the results of loads and saves. vLLM merges
    the messages of all ranks with `aggregate`."""

    written: dict[int, dict[int, int]] = field(default_factory=dict)
    """Checksums of the written segments of each page, by reservation token and segment number. Complete when
    every rank has added its checksums."""
    failed_writes: dict[int, int] = field(default_factory=dict)
    """Number of segments that were not written, by reservation token, summed over the ranks."""
    failed_loads: dict[str, str] = field(default_factory=dict)
    """Reason why a request's load failed, by request id."""
    loaded_bytes: int = 0
    loading_s: float = 0.0
    """Seconds spent on copies for loads, without the time that loads waited in the queue."""
    staged_pages: int = 0
    """Number of pages that a GPU could not copy directly, so they were copied through staging memory."""
    timed_steps: list[int] = field(default_factory=list)
    """Sequence numbers of measured steps that have ended."""
    unusable_reason: str = ""
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
        self.timed_steps += other.timed_steps
        self.unusable_reason = self.unusable_reason or other.unusable_reason
        return self

    def is_empty(self) -> bool:
        return not (
            self.written
            or self.failed_writes
            or self.failed_loads
            or self.unusable_reason
            or self.loaded_bytes
            or self.staged_pages
            or self.timed_steps
        )


@dataclass(eq=False, slots=True)
class OngoingSave:
    """Save that a worker is carrying out, and the save's pages that are not written yet."""

    save: PageSave
    pending_tokens: set[int]
    """Reservation tokens of the save's pages that are not acknowledged yet."""
    is_cancelled: bool = False


@dataclass(slots=True)
class SavedPages:
    """Some pages of one save, which a worker writes to the store."""

    ongoing: OngoingSave
    targets: Sequence[PageWrite]
    table: Table
    """Block table that `kernel_table` made from some of the request's blocks."""
    indices: NDArray[np.int64]
    """Index of each page in `table`."""

    def part(self, start: int, stop: int | None) -> SavedPages:
        """Return pages [start, stop)."""
        return SavedPages(self.ongoing, self.targets[start:stop], self.table, self.indices[start:stop])

    def select(self, mask: Sequence[bool], value: bool) -> SavedPages:
        """Return the pages for which `mask` has this value."""
        targets = [target for target, one in zip(self.targets, mask, strict=True) if one is value]
        return SavedPages(self.ongoing, targets, self.table, self.indices[np.asarray(mask) == value])


def saved_pages(ongoing: OngoingSave, rows: int, sizes: BlockSizes) -> SavedPages:
    """Return the pages of a save. `rows` is the number of rows in a page. The block table includes only
    blocks with pages of this save, because a request may have thousands of blocks."""
    save = ongoing.save
    indices = [page.index for page in save.pages]
    # A page and a block begin together at each multiple of this number of rows.
    unit = math.lcm(rows, sizes.engine)
    first = min(indices) * rows // unit * unit
    last = max(indices) * rows + rows
    table = kernel_table(save.blocks[first // sizes.engine : -(-last // sizes.engine)], sizes)
    return SavedPages(ongoing, save.pages, table, np.array(indices, np.int64) - first // rows)


def take_pages(pages: deque[SavedPages], count: int) -> list[SavedPages]:
    """Remove at most `count` pages from the front of `pages`, and return them. Pages of cancelled saves are
    dropped."""
    taken: list[SavedPages] = []
    while pages and count:
        first = pages.popleft()
        if first.ongoing.is_cancelled:
            continue
        pages_left = len(first.targets) - count
        if pages_left > 0:
            pages.appendleft(first.part(count, None))
            first = first.part(0, count)
        count = max(0, -pages_left)
        taken.append(first)
    return taken


class TransferReports:
    """Collects the results of one worker's loads and saves. Movers report the results, and the engine's
    thread reads them."""

    def __init__(self, pages: RankPages, block_size: int) -> None:
        self._pages, self._block_size = pages, block_size
        self._lock = threading.Lock()
        self._acks = CornplugKVWorkerMetadata()
        self._unsent_saves: dict[int, str] = {}
        """Names of the saves whose pages are in `_acks.written`, by reservation token."""
        self._finished_loads: list[str] = []
        self._open_parts: dict[int, int] = {}
        """Number of parts in progress, for loads of several parts. The key is the `id` of the array `blocks`,
        which all parts of a load have in common, because a later request may reuse the request id."""
        self._bad_blocks: set[int] = set()
        self._open_saves: set[OngoingSave] = set()
        """Saves in progress. Two have the same name if some pages of a save are copied directly and others
        through staging memory."""

    # -- the engine's thread ----------------------------------------------------------------------

    def report_unusable(self, reason: str) -> None:
        """Report that this rank's KV caches cannot be mapped to pages."""
        self._acks.unusable_reason = reason

    def begin_saves(self, saves: Iterable[PageSave]) -> list[OngoingSave]:
        """Record that these saves begin, and return a progress record for each save."""
        begun = [OngoingSave(save, {page.token for page in save.pages}) for save in saves]
        with self._lock:
            self._open_saves.update(begun)
        return begun

    def split_load(self, load: PageLoad, parts: int) -> None:
        """Record that `parts` parts replace a load, or a part of it. The load ends when all its parts have
        ended."""
        key = id(load.blocks)
        with self._lock:
            self._open_parts[key] = self._open_parts.get(key, 1) + parts - 1

    def count_staged(self, pages: int) -> None:
        """Count `pages` pages that are copied through staging memory."""
        with self._lock:
            self._acks.staged_pages += pages

    def record_step_end(self, number: int) -> None:
        """Report the end of measured step `number` in the next acknowledgement."""
        with self._lock:
            self._acks.timed_steps.append(number)

    def cancel_saves(self, names: Collection[str]) -> None:
        """Report the pages of these saves as not written, except pages that were already acknowledged.
        Returns immediately.

        The blocks of these saves now belong to other requests, and may have been overwritten before they were
        read.
        """
        wanted = set(names)
        with self._lock:
            for ongoing in self._open_saves:
                if ongoing.save.name in wanted:
                    ongoing.is_cancelled = True
            late = [token for token, name in self._unsent_saves.items() if name in wanted]
            for token in late:
                del self._unsent_saves[token], self._acks.written[token]
                self._acks.failed_writes[token] = self._pages.segments

    def take_finished(self) -> list[str]:
        """Return the request id of each load that has ended since the last call, successfully or not. Two
        loads have the same id if the second request reuses the id of an aborted one."""
        with self._lock:
            received, self._finished_loads = self._finished_loads, []
        return received

    def take_bad_blocks(self) -> set[int]:
        """Return the ids of the blocks whose load has failed since the last call. This method returns a
        request's failed blocks no later than `take_finished` returns the request's id."""
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_acks(self) -> CornplugKVWorkerMetadata | None:
        """Return the acknowledgements for the scheduler half since the last call, or None if there are no
        acknowledgements."""
        with self._lock:
            if self._acks.is_empty():
                return None
            acks, self._acks = self._acks, CornplugKVWorkerMetadata()
            self._unsent_saves.clear()
        return acks

    # -- movers -----------------------------------------------------------------------------------

    def end_load(self, load: PageLoad, complete_pages: int, reason: str, seconds: float) -> None:
        """Record the end of a load, or of a part of one, whose first `complete_pages` pages are loaded.
        `reason` is why the load failed, or "" if all pages are loaded."""
        first_bad = min((load.first_page + complete_pages) * self._pages.page.rows, load.end)
        with self._lock:
            if reason:
                self._bad_blocks |= load.blocks_from(max(first_bad, load.start), self._block_size)
                self._acks.failed_loads[load.request_id] = reason
            self._acks.loaded_bytes += complete_pages * self._pages.size_bytes
            self._acks.loading_s += seconds
            parts = self._open_parts.pop(id(load.blocks), 1) - 1
            if parts:
                self._open_parts[id(load.blocks)] = parts
            else:
                self._finished_loads.append(load.request_id)

    def end_pages(self, pages: SavedPages, checksums: Sequence[dict[int, int]]) -> None:
        """Record the results of writing pages to the store. `checksums` has the checksums of this rank's
        segments of each page, by segment number, or an empty dict for a page whose write failed."""
        ongoing = pages.ongoing
        tokens = [target.token for target in pages.targets]
        with self._lock:
            written = {}
            if not ongoing.is_cancelled:
                written = {token: sums for token, sums in zip(tokens, checksums, strict=True) if sums}
            failed = [token for token in tokens if token not in written]
            self._acks.written |= written
            self._unsent_saves |= dict.fromkeys(written, ongoing.save.name)
            if failed:
                self._fail_pages(failed)
            ongoing.pending_tokens.difference_update(tokens)
            if not ongoing.pending_tokens:
                self._open_saves.discard(ongoing)

    def end_saves(self, saves: Iterable[OngoingSave]) -> None:
        """Record the end of these saves. Pages without a result are reported as failed."""
        with self._lock:
            for ongoing in saves:
                if ongoing.pending_tokens:
                    self._fail_pages(ongoing.pending_tokens)
                    self._open_saves.discard(ongoing)

    def _fail_pages(self, tokens: Collection[int]) -> None:
        if self._pages.rank_slice.writes:
            self._acks.failed_writes |= dict.fromkeys(tokens, self._pages.segments)
