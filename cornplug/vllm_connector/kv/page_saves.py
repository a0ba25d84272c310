"""Saving of KV pages. Space in the store is reserved when a step completes a page. The page is committed when
all ranks have written it."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from cornplug.engine_common.page_publish import PagePublisher, ReserveReply
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.kv_page import PageGeometry
from cornplug.store.base import CompletedRequest, PostedRequest, Reservation, ReserveRefusal
from cornplug.vllm_connector.kv.metadata import CornplugKVWorkerMetadata, PageSave, PageWrite
from cornplug.vllm_connector.kv.open_saves import DeferredStoreOps, FreedBlocks, OpenSave
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput

    from cornplug.vllm_connector.kv.page_events import PageEvents

MAX_OPEN_SAVES_BYTES: Final = 1 << 30
"""Maximum total size in bytes of pages that are being saved at a time. Further pages are not saved, so that a
slow store never delays the end of a request."""


class PendingPage(msgspec.Struct, eq=False):
    """Computed page whose reservation in the store is pending."""

    tracked: TrackedRequest
    index: int
    key: bytes
    is_cancelled: bool = False
    """Whether the page must not be written, because its blocks were reused or the weights that computed it
    were replaced."""
    blocks: Sequence[KVCacheBlock] = ()
    """vLLM blocks that contain the page. Empty until the blocks are pinned or the request has finished."""
    is_pinned: bool = False
    """Whether this object holds a reference to the blocks, so that vLLM does not reuse them."""


class SavingRequests(Protocol):
    """Interface of the tracked requests whose pages are saved. Implemented by `TrackedRequests`, and by
    `GroupRequests` for one cache group."""

    @property
    def is_sharing(self) -> bool: ...
    def has_unfinished(self) -> bool: ...
    def find_completing(
        self, scheduled_tokens: Mapping[str, int], total: int
    ) -> list[tuple[TrackedRequest, int]]: ...
    def schedule_check(self, tracked: TrackedRequest) -> None: ...
    def state_of(self, tracked: TrackedRequest) -> TrackedRequest: ...
    def find_state(self, tracked: TrackedRequest) -> TrackedRequest | None: ...


def save_name(request_id: str, reservation: Reservation) -> str:
    """Return a unique name for a save, from its request's id and the reservation of its first page."""
    return f"{request_id}#{reservation.token}"


class PageSaves:
    """Saves the pages of one scheduler half's requests, from the reservation to the commit. Used by the
    engine's thread.

    Each page of a request is offered to the store once, including pages from the engine's own prefix cache,
    whose blocks are valid while the request runs. Therefore a prefix that only this engine serves is stored
    too. A finished request releases its blocks immediately (`FreedBlocks`).
    """

    def __init__(
        self,
        runtime: EngineRuntime,
        page: PageGeometry,
        requests: SavingRequests,
        publisher: PagePublisher,
        store_ops: DeferredStoreOps,
        share: float = 1.0,
    ) -> None:
        """Prepare saves for one cache group. `share` is the fraction of `MAX_OPEN_SAVES_BYTES` that the
        group's saves may use."""
        self._page = page
        self._requests = requests
        self._publisher = publisher
        self.store_ops = store_ops
        self._max_open = int(MAX_OPEN_SAVES_BYTES * share) // page.page_bytes
        self._enabled = runtime.config.engine.save != "never"
        self._open: dict[int, OpenSave] = {}
        self._sent_reservations: deque[tuple[list[PendingPage], PostedRequest[list[ReserveReply]]]] = deque()
        """Pages for which a reservation was sent and the store has not replied yet."""
        self._final_pages: list[PendingPage] = []
        """Pages of finished requests, for which reservations will be sent in the next step."""
        self._ready: list[PageSave] = []
        """Saves that the next step will send to the worker halves."""
        self._cancelled_keys: set[bytes] = set()
        """Keys of given-up pages whose reservations have not been released yet."""
        self.freed = FreedBlocks[PendingPage | OpenSave]()
        """Blocks that finished requests have released and from which pages may still be copied."""
        self.events: PageEvents | None = None
        self.manager: KVCacheManager | None = None
        self._block_size = 1
        self.group = 0
        """Index of the cache group whose pages are saved."""

    def __bool__(self) -> bool:
        return bool(self._open or self._sent_reservations or self._final_pages)

    def bind(self, manager: KVCacheManager, block_size: int, group: int) -> None:
        """Set the engine's KV cache manager, which is used to look up a request's blocks in cache group
        `group`."""
        self.manager, self._block_size, self.group = manager, block_size, group

    @property
    def _pool(self) -> BlockPool:
        assert self.manager is not None
        return self.manager.block_pool

    @property
    def has_pinned_blocks(self) -> bool:
        """Whether any blocks are kept only until the worker halves have read them."""
        return False

    def known_block_ids(self, tracked: TrackedRequest, block_ids: Sequence[int]) -> Sequence[int]:
        """Return the ids of a request's blocks, of which the request holds `block_ids`."""
        return block_ids

    def cancel_saves(self, tracked: TrackedRequest) -> list[str]:
        """Handle the preemption of a request. Its pages that no worker has acknowledged are not written, and
        are offered again after they are computed again. Returns the names of the request's open saves."""
        tracked.unsaved_keys.clear()
        names = []
        for asked in tracked.pending_pages:
            asked.is_cancelled = True
            self._cancelled_keys.add(asked.key)
            tracked.save_again_from(asked.index)
        for token in tracked.open_saves:
            save = self._open[token]
            save.is_cancelled = True
            self._cancelled_keys.add(save.reservation.key)
            tracked.save_again_from(save.index)
            names.append(save.name)
        self._requests.schedule_check(tracked)
        return names

    def release_blocks(self, tracked: TrackedRequest) -> None:
        """Handle the end of a request, whose blocks the engine frees now. Unsaved pages can be copied from
        these blocks until the engine reuses them."""
        readers: list[PendingPage | OpenSave] = [*tracked.pending_pages]
        readers += [self._open[token] for token in tracked.open_saves]
        assert self.manager is not None
        table = self.manager.get_blocks(tracked.request.request_id).blocks[self.group] if readers else ()
        for reader in readers:
            if not reader.is_pinned:
                start, end = self._block_range(reader.index, reader.index)
                reader.blocks = table[start:end]
                if len(reader.blocks) < end - start or any(block.is_null for block in reader.blocks):
                    # The request was preempted since the last step, or its window has moved past the page.
                    self.freed.mark_lost(reader)
                if reader.is_cancelled:
                    reader.blocks = ()
                    continue
                self._pool.touch(reader.blocks)
            reader.is_pinned = False
            self.freed.release(self._pool, reader)

    def abandon(self) -> None:
        """Release all blocks that are pinned for saves, because sharing has stopped."""

    def take_lost_saves(self) -> list[str]:
        """Return the names of saves whose blocks vLLM has reused since the last call."""
        names = []
        for reader in self.freed.take_lost():
            if isinstance(reader, PendingPage):
                self._cancelled_keys.add(reader.key)
            else:
                names.append(reader.name)
        return names

    def drop_pending(self, tracked: Iterable[TrackedRequest]) -> None:
        """Drop the pending saves of these requests and of finished requests, because the weights that
        computed their KV are being replaced. Pages that worker halves are already writing are complete, and
        keep their keys."""
        for one in tracked:
            one.keys = None
            one.retry_pages.clear()
            one.unsaved_keys.clear()
        for asked in itertools.chain(self._final_pages, *(pages for pages, _ in self._sent_reservations)):
            asked.is_cancelled = True
            self._cancelled_keys.add(asked.key)

    def saves_for_step(self, output: SchedulerOutput) -> list[PageSave]:
        """Return the saves for the worker halves to carry out in this step. The tokens of their pages were
        computed in this step or earlier. A step sends reservations without waiting for the store's replies,
        which the next step reads."""
        wanted = self._new_pages(output)
        if self._final_pages:
            wanted = self._take_final_pages() + wanted
        if wanted and self._send_reservations(wanted):
            self.process_replies()
        saves, self._ready = self._ready, []
        return saves

    def process_replies(self) -> None:
        """Process the store's replies to reservations. Call this before the reservations of preempted pages
        are released."""
        if self._sent_reservations:
            self._ready += self._read_replies()

    def offer_remaining(self, tracked: TrackedRequest, end: int) -> None:
        """Offer the remaining pages of a finished request, which has `end` computed tokens, to the store."""
        if self._enabled and self._requests.is_sharing:
            pages = self._pages_to_reserve(tracked, end)
            tracked.pending_pages += pages
            self._final_pages += pages

    def _take_final_pages(self) -> list[PendingPage]:
        last, self._final_pages = self._final_pages, []
        for page in last:
            page.tracked.pending_pages.remove(page)
        sharing, wanted = self._requests.is_sharing, []
        for page in last:
            if sharing and not page.is_cancelled:
                wanted.append(page)
            else:
                self._cancelled_keys.discard(page.key)
                self._unwatch(page)
        return wanted

    def _new_pages(self, output: SchedulerOutput) -> list[PendingPage]:
        """Return the pages that running requests have completed by the end of this step and for which space
        should be reserved."""
        if not self._enabled:
            return []
        found: list[PendingPage] = []
        ends = self._requests.find_completing(output.num_scheduled_tokens, output.total_num_scheduled_tokens)
        if ends and self._requests.is_sharing:
            for tracked, end in ends:
                found += self._pages_to_reserve(tracked, end)
        return found

    def _pages_to_reserve(self, tracked: TrackedRequest, end: int) -> list[PendingPage]:
        """Return the pages within a request's first `end` tokens for which space should be reserved now."""
        found = []
        for index, key in tracked.pages_to_save(end, self._page.page_tokens):
            if key in self._cancelled_keys:
                # The store would reply that the page is already being written.
                self._offer_again(tracked, index, key)
            elif index not in tracked.unseen_pages:
                found.append(PendingPage(tracked, index, key))
        return found

    def _send_reservations(self, wanted: list[PendingPage]) -> bool:
        """Send reservations for these pages to the store. Returns whether the reply has already arrived."""
        free_slots = max(
            0, self._max_open - len(self._open) - sum(len(pages) for pages, _ in self._sent_reservations)
        )
        if len(wanted) > free_slots:
            self._publisher.count_outcome("busy", len(wanted) - free_slots)
            for page in wanted[free_slots:]:
                page.tracked.unsaved_keys[page.index] = page.key
                self._unwatch(page)
            wanted = wanted[:free_slots]
            if not wanted:
                return False
        for page in wanted:
            page.tracked.pending_pages.append(page)
        posted = self._publisher.post_reserve([page.key for page in wanted])
        self._sent_reservations.append((wanted, posted))
        return isinstance(posted, CompletedRequest)

    def _unwatch(self, page: PendingPage) -> None:
        """Stop watching the blocks of a page that will not be saved."""
        if page.blocks:
            self.freed.forget(page)

    def _read_replies(self) -> list[PageSave]:
        """Read the store's replies, and return saves for the pages for which space is now reserved."""
        given: dict[int, list[tuple[PendingPage, Reservation]]] = {}
        while self._sent_reservations:
            pages, posted = self._sent_reservations[0]
            replies = posted.poll()
            if replies is None:
                break
            self._sent_reservations.popleft()
            for page, reply in zip(pages, replies, strict=True):
                if self._handle_reply(page, reply) and isinstance(reply, Reservation):
                    given.setdefault(id(page.tracked), []).append((page, reply))
        saves = []
        for found in given.values():
            # Pages of a finished request have their own blocks, because the request has no block table any
            # more.
            saves += [self._create_save(found)] if not found[0][0].blocks else self._create_page_saves(found)
        return saves

    def _handle_reply(self, page: PendingPage, reply: ReserveReply) -> bool:
        """Process the store's reply for one page. Returns whether to write the page to the reservation in the
        reply."""
        tracked, index = page.tracked, page.index
        tracked.pending_pages.remove(page)
        if page.is_cancelled:
            self._cancelled_keys.discard(page.key)
            if isinstance(reply, Reservation):
                self.store_ops.release([reply.token])
                self._publisher.count_outcome("preempted")
        elif isinstance(reply, Reservation):
            save = self.begin_save(reply, index, tracked)
            if page.blocks:
                self._hand_over(page, save)
            tracked.open_saves.add(reply.token)
            return True
        elif reply is ReserveRefusal.GROWING:
            self._publisher.count_outcome(reply.value)
            self._offer_again(tracked, index, page.key)
        elif reply is ReserveRefusal.FIRST_SIGHT:
            tracked.unseen_pages.add(index)
            tracked.unsaved_keys[index] = page.key
        elif self.events is not None and reply is ReserveRefusal.PRESENT:
            self.events.register_stored_page(tracked, index)
        self._unwatch(page)
        return False

    def _hand_over(self, page: PendingPage, save: OpenSave) -> None:
        save.blocks, save.is_pinned, page.is_pinned = page.blocks, page.is_pinned, False
        if not save.is_pinned:
            self.freed.replace(page, save)

    def _offer_again(self, tracked: TrackedRequest, index: int, key: bytes) -> None:
        """Offer this page to the store again in the next step."""
        tracked.retry_pages.add(index)
        tracked.unsaved_keys[index] = key
        self._requests.schedule_check(tracked)

    def _create_save(self, pages: list[tuple[PendingPage, Reservation]]) -> PageSave:
        """Create a save of these pages of one request. The save has only the blocks that contain these pages,
        because a request may have thousands of blocks."""
        assert self.manager is not None
        request_id, first, last = pages[0][0].tracked.request.request_id, pages[0][0].index, 0
        for page, _ in pages:
            first, last = min(first, page.index), max(last, page.index)
        start, end = self._block_range(first, last)
        table = self.manager.get_blocks(request_id).blocks[self.group]
        blocks, writes = [], []
        name = save_name(request_id, pages[0][1])
        first_page = start * self._block_size // self._page.page_tokens
        # Most saves have one page. A comprehension would add a Python call.
        for block in table[start:end]:
            blocks.append(block.block_id)
        for page, reservation in pages:
            writes.append(PageWrite(page.index - first_page, reservation.token, reservation.location))
            self._open[reservation.token].name = name
        return PageSave(name, tuple(writes), tuple(blocks), self.group)

    def _create_page_saves(self, pages: list[tuple[PendingPage, Reservation]]) -> list[PageSave]:
        """Create a separate save for each page, because the pages' blocks may be reused independently."""
        saves = []
        for page, reservation in pages:
            start, _ = self._block_range(page.index, page.index)
            name = self._open[reservation.token].name = save_name(
                page.tracked.request.request_id, reservation
            )
            index = page.index - start * self._block_size // self._page.page_tokens
            write = PageWrite(index, reservation.token, reservation.location)
            blocks = tuple([block.block_id for block in page.blocks])
            saves.append(PageSave(name, (write,), blocks, self.group))
        return saves

    def _block_range(self, first: int, last: int) -> tuple[int, int]:
        """Return the range (start, end) of indices of the blocks that contain pages `first` to `last` of a
        request. A page begins at the start of the first block."""
        size = self._page.page_tokens
        # A page and a block both begin at each multiple of this number of tokens.
        unit = math.lcm(size, self._block_size)
        return first * size // unit * unit // self._block_size, -(-(last + 1) * size // self._block_size)

    def begin_save(self, reservation: Reservation, index: int, tracked: TrackedRequest | None) -> OpenSave:
        """Record that the worker halves begin to write a page. `tracked` is the page's request, or None if
        the request has finished."""
        save = self._open[reservation.token] = OpenSave(reservation, "", index, tracked)
        return save

    def is_open(self, token: int) -> bool:
        """Return whether the worker halves are still writing to the reservation with this token."""
        return token in self._open

    def handle_acks(self, acks: CornplugKVWorkerMetadata) -> None:
        """Commit the pages that every rank has written, and release the reservations of pages that a rank
        could not write."""
        if not (acks.written or acks.failed_writes):
            return
        for token, sums in acks.written.items():
            if token in self._open:
                self._open[token].checksums |= sums
        for token, segments in acks.failed_writes.items():
            if token in self._open:
                self._open[token].failed_segments += segments
        # Commit in page order, so that prefixes are complete at any time.
        written, segments = [], self._page.segments
        for token in sorted(acks.written.keys() | acks.failed_writes.keys()):
            save = self._open.get(token)
            # Until every rank has acknowledged its part of the page, another rank may still be writing to the
            # reservation.
            if save is not None and len(save.checksums) + save.failed_segments >= segments:
                self._close(token, save)
                if not save.failed_segments:
                    written.append(save)
        if written:
            self.store_ops.commit(written)
            if self.events is not None:
                for save in written:
                    if save.tracked is not None:
                        self.events.register_pages(save.tracked, range(save.index, save.index + 1))
                    elif save.event_span is not None:
                        self.events.register_span(save.event_span)

    def _close(self, token: int, save: OpenSave) -> None:
        """Remove a save that every rank has acknowledged. If a rank could not write the page, release its
        reservation."""
        del self._open[token]
        self._cancelled_keys.discard(save.reservation.key)
        if save.failed_segments:
            self.store_ops.release([token])
            self._publisher.count_outcome("preempted" if save.is_cancelled else "write_failed")
        if save.tracked is not None:
            save.tracked.open_saves.discard(token)
        if save.blocks:
            self.freed.forget(save)
