"""Copies pages from SGLang's host pool to the store.

Tensor-parallel ranks and pipeline stages write a page together without exchanging messages. Each rank
reserves its part of the page, writes its own heads and layers, and commits their checksums. The store's
daemon joins the parts. A rank that is late or has exited does not delay other ranks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from cornplug.engine_common import weights_guard
from cornplug.engine_common.page_publish import EntryCost, PageCost, PagePublisher
from cornplug.errors import CheckpointError, CornplugError
from cornplug.kv_page import PageGeometry, tensor_parallel_heads
from cornplug.sglang_hooks.kv_pages.namespace_roots import CallRoots
from cornplug.sglang_hooks.kv_pages.page_copies import PageCopies, PageSlice, Rows
from cornplug.sglang_hooks.kv_pages.page_hash_index import HashedPage
from cornplug.sglang_hooks.kv_pages.reader import PageReader, PoolContext, RankPool
from cornplug.store.base import Reservation, ReserveRefusal, WriterPart

_TAIL_BYTES: Final = 64 << 20
"""Maximum total size in bytes of pages that are kept until their store page is complete."""
_ROUND_BYTES: Final = 64 << 20
"""Number of bytes to reserve in one call. A new store grows by this size within one call, while other calls
wait."""
_SAVE_TIMEOUT_S: Final = 30.0
"""Maximum duration of `save` in seconds. SGLang keeps the pages in its host pool until `save` returns."""
_STOP_GRACE_S: Final = 3.0
"""Seconds for which `save` may continue after SGLang begins to wait for this thread to end. SGLang exits
after 10 s."""
_FIRST_PAUSE_S: Final = 0.01
_MAX_PAUSE_S: Final = 0.1


class _StoredTokens(NamedTuple):
    """Tokens of a new store page that are not in memory. Another page of the store may contain them."""

    store_slice: slice
    page: HashedPage


_PendingPages = Mapping[bytes, Sequence[PageSlice | _StoredTokens]]


def writer_part(
    page: PageGeometry, tp_size: int, tp_rank: int, group: bytes, *, stages: int = 1, stage: int = 0
) -> WriterPart | None:
    """Return a rank's part of the pages that all ranks of `group` write together.

    Returns None if the rank writes complete pages or no pages. Each of the `stages` pipeline stages has
    `tp_size` ranks, which divide the heads. Raises LayoutError if the heads cannot be divided.
    """
    writers = [rank for rank in range(tp_size) if tensor_parallel_heads(page.heads, tp_size, rank)[1]]
    parts = stages * len(writers)
    if parts == 1 or tp_rank not in writers:
        return None
    return WriterPart(group, stage * len(writers) + writers.index(tp_rank), parts)


class PageWriter:
    """Writes one rank's pages. Called on SGLang's backup thread. If the store fails, no call raises an
    exception.

    Args:
        part: this rank's part of a page, or None if the rank writes complete pages or no pages.
    """

    def __init__(
        self, context: PoolContext, reader: PageReader, pool: RankPool, part: WriterPart | None
    ) -> None:
        self._run, self._reader, self._index = context.runtime, reader, context.index
        self._rank_pages, self._copies = (
            pool.rank_pages,
            PageCopies(pool.rank_pages, pool.host, threads=pool.threads),
        )
        self._stop_deadline_s: float | None = None
        self._pace, self._cost = context.pace, PageCost()
        self._publisher = PagePublisher(
            self._run,
            self._rank_pages.page,
            context.tally,
            deadline_s=self._run.background_timeout_s,
            writer_part=part,
            only_seen=context.only_seen,
            cost=EntryCost(self._cost),
        )
        self._tails: OrderedDict[str, Rows] = OrderedDict()
        self._tail_bytes = 0
        self._epoch = weights_guard.epoch()

    def close(self) -> None:
        """Stop the threads that copy pages."""
        self._copies.close()

    def save(self, hashes: Sequence[str], slots: Sequence[int]) -> None:
        """Offer pages to the store. `slots` are the pages' first slots in the host pool."""
        if not self._rank_pages.rank_slice.writes:
            return
        if self._epoch != weights_guard.epoch():
            # Drop pages that the previous weights computed. SGLang's page hashes do not depend on the
            # weights.
            self._tails.clear()
            self._epoch, self._tail_bytes = weights_guard.epoch(), 0
        self._write_all(self._collect_complete(hashes, slots))
        self._keep_tails(hashes, slots)

    # -- complete pages of the store -----------------------------------------------------------

    def _collect_complete(self, hashes: Sequence[str], slots: Sequence[int]) -> _PendingPages:
        """Return the parts of the store pages that these pages complete, by key."""
        at = dict(zip(hashes, slots, strict=True))
        roots = self._reader.roots()
        found: dict[bytes, Sequence[PageSlice | _StoredTokens]] = {}
        for name, page in zip(hashes, self._index.find(hashes), strict=True):
            try:
                if page is None:
                    self._publisher.count_outcome("no_page_key")
                elif self._index.page_size >= self._index.page_tokens:
                    whole = self._copies.host_page(at[name])
                    for part in self._index.overlaps(page):
                        key = self._reader.store_keys(page, part, roots)[0]
                        found[key] = [PageSlice(part.store_slice, whole[:, :, :, part.sglang_slice])]
                elif self._index.ends_store_page(page):
                    if parts := self._gather_store_page(name, at):
                        found[self._store_page_key(page, roots)] = parts
                    else:
                        self._publisher.count_outcome("incomplete")
            except CheckpointError as e:
                self._publisher.count_outcome(e.reason)
        return found

    def _store_page_key(self, page: HashedPage, roots: CallRoots) -> bytes:
        (part,) = self._index.overlaps(page)
        return self._reader.store_keys(page, part._replace(links=(page.link,)), roots)[0]

    def _gather_store_page(
        self, closing: str, at: Mapping[str, int]
    ) -> list[PageSlice | _StoredTokens] | None:
        """Return the SGLang pages that form one store page, or None if one of the pages is not available."""
        found: list[PageSlice | _StoredTokens] = []
        for name, page in self._index.siblings(closing):
            parts = self._index.overlaps(page)
            if not parts:
                return None
            inside = parts[0].store_slice
            if name in at:
                found.append(PageSlice(inside, self._copies.host_page(at[name])))
            elif name in self._tails:
                found.append(PageSlice(inside, self._tails[name]))
            else:
                found.append(_StoredTokens(inside, page))
        complete = len(found) == self._index.page_tokens // self._index.page_size
        return found if complete else None

    def _keep_tails(self, hashes: Sequence[str], slots: Sequence[int]) -> None:
        """Keep copies of the pages after the last complete store page.

        A later call may complete the store page of these pages.
        """
        size, index = self._index.page_size, self._index
        if size >= index.page_tokens:
            return
        pages = index.find(hashes)
        for name, page, slot in reversed(list(zip(hashes, pages, slots, strict=True))):
            if page is None or index.ends_store_page(page):
                break
            if name not in self._tails:
                self._tails[name] = self._copies.host_page(slot).copy()
                self._tail_bytes += self._tails[name].nbytes
        while self._tail_bytes > _TAIL_BYTES:
            self._tail_bytes -= self._tails.popitem(last=False)[1].nbytes

    # -- writing pages --------------------------------------------------------------------------

    def _write_all(self, pending: _PendingPages) -> None:
        """Write pages in small groups, in order, because readers stop at the first missing page.

        SGLang offers each page only once. Therefore pages that the store rejects while it grows are tried
        again during the same call.
        """
        left, step = list(pending), max(1, _ROUND_BYTES // self._rank_pages.page.page_bytes)
        moved_s = time.monotonic()
        end_s, pause_s = moved_s + _SAVE_TIMEOUT_S, _FIRST_PAUSE_S
        while left:
            now_s = time.monotonic()
            if now_s >= end_s or self._must_stop():
                self._publisher.count_outcome("late", len(left))
                return
            if now_s >= moved_s + self._run.background_timeout_s:
                self._publisher.count_outcome(ReserveRefusal.GROWING.value, len(left))
                return
            asked, refused = left[:step], self._write_batch(pending, left[:step], end_s - now_s)
            left[:step] = refused
            if len(refused) < len(asked):
                moved_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _write_batch(self, pending: _PendingPages, keys: Sequence[bytes], left_s: float) -> list[bytes]:
        """Reserve pages, write this rank's part of them, and commit.

        Returns the keys that the store rejected because it is growing.
        """
        reserved, refused = [], []
        self._cost.seconds = self._pace.compute_s(self._rank_pages.page.page_tokens)
        replies = self._publisher.reserve(keys, deadline_s=min(self._run.background_timeout_s, left_s))
        for key, reply in zip(keys, replies, strict=True):
            if isinstance(reply, Reservation):
                reserved.append(reply)
            elif reply is ReserveRefusal.GROWING:
                refused.append(key)
        try:
            self._fill_and_commit(pending, reserved)
        except BaseException:
            self._publisher.release_unwritten(reserved, "error")
            raise
        return refused

    def _fill_and_commit(self, pending: _PendingPages, reserved: Sequence[Reservation]) -> None:
        """Write this rank's part of reserved pages, and commit the pages."""
        pages = [(one, self._load_parts(pending[one.key])) for one in reserved]
        broken = [one for one, parts in pages if parts is None]
        whole = [(one, parts) for one, parts in pages if parts is not None]
        sums = self._copies.write([(parts, one.location) for one, parts in whole], self._must_stop)
        written, late = [], []
        for (one, _), of_page in zip(whole, sums, strict=True):
            if of_page is None:
                late.append(one)
            elif of_page:
                written.append((one, of_page))
            else:
                broken.append(one)
        if self._epoch != weights_guard.epoch() or weights_guard.has_replaced_weights():
            late, broken, written = [], [], []
            self._publisher.release_unwritten(reserved, "weights_updated")
        self._publisher.release_unwritten(late, "late")
        self._publisher.release_unwritten(broken, "write_failed")
        self._publisher.commit(written)

    def _must_stop(self) -> bool:
        """Return whether SGLang has waited for at least `_STOP_GRACE_S` seconds for this thread to end."""
        now_s = time.monotonic()
        if not self._reader.is_stopping():
            self._stop_deadline_s = None
        elif self._stop_deadline_s is None:
            self._stop_deadline_s = now_s + _STOP_GRACE_S
        return self._stop_deadline_s is not None and now_s >= self._stop_deadline_s

    def _load_parts(self, parts: Sequence[PageSlice | _StoredTokens]) -> list[PageSlice] | None:
        """Return the parts in memory. Return None if a part could not be copied from the store."""
        found = []
        try:
            for part in parts:
                if isinstance(part, _StoredTokens):
                    borrowed = self._reader.read_page(part.page)
                    if borrowed is None:
                        return None
                    part = PageSlice(part.store_slice, self._copies.as_rows(borrowed))
                found.append(part)
        except CornplugError:
            return None
        return found
