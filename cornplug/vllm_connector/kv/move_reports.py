"""Results of a worker's loads and saves, for vLLM and for the scheduler half."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from cornplug.engine_common.rank_pages import RankPages
from cornplug.vllm_connector.kv.metadata import CornplugKVWorkerMetadata, PageLoad, PageSave, PageWrite
from cornplug.vllm_connector.kv_copies.cache_blocks import BlockSizes, Table, kernel_table


@dataclass(eq=False, slots=True)
class OngoingSave:
    """Save in progress."""

    save: PageSave
    left: set[int]
    """Reservation tokens of pages that are not acknowledged yet."""
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class SavedPage:
    """Page of a step's saves."""

    ongoing: OngoingSave
    target: PageWrite
    place: tuple[Table, int]
    """Table of some of the request's blocks, made by `kernel_table`, and the page's position in it."""


def pages_of(saves: Iterable[OngoingSave], rows: int, sizes: BlockSizes) -> Iterator[SavedPage]:
    """Yield the pages of saves, each with only the blocks that hold it, because a request may have thousands
    of blocks."""
    for ongoing in saves:
        save = ongoing.save
        # A page and a block both begin at multiples of this.
        unit = math.lcm(rows, sizes.engine)
        first = min(page.index for page in save.pages) * rows // unit * unit
        last = max(page.index for page in save.pages) * rows + rows
        blocks = save.blocks[first // sizes.engine : -(-last // sizes.engine)]
        table = kernel_table(blocks, sizes)
        for page in save.pages:
            yield SavedPage(ongoing, page, (table, page.index - first // rows))


class MoveReports:
    """Results of one worker. Movers report them, and the engine's thread collects them."""

    def __init__(self, pages: RankPages, block_size: int) -> None:
        self._pages, self._block_size = pages, block_size
        self._lock = threading.Lock()
        self._acks = CornplugKVWorkerMetadata()
        self._unsent: dict[int, str] = {}
        """Name of the save, by reservation token, for pages in `_acks.written`."""
        self._loaded: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._saving: dict[str, OngoingSave] = {}
        """Saves in progress, by name."""

    # -- the engine's thread ----------------------------------------------------------------------

    def unusable(self, reason: str) -> None:
        """Report that this rank's caches cannot be mapped."""
        self._acks.unusable = reason

    def saves_begin(self, saves: Iterable[PageSave]) -> list[OngoingSave]:
        """Record that these saves begin."""
        begun = [OngoingSave(save, {page.token for page in save.pages}) for save in saves]
        with self._lock:
            for ongoing in begun:
                self._saving[ongoing.save.name] = ongoing
        return begun

    def staged(self, pages: int) -> None:
        """Record that `pages` pages were copied through staging memory."""
        with self._lock:
            self._acks.staged_pages += pages

    def stepped(self, number: int) -> None:
        """Acknowledge the end of a timed step with the next acknowledgements."""
        with self._lock:
            self._acks.steps.append(number)

    def give_up_saves(self, names: Collection[str]) -> None:
        """Report pages of these saves that are not acknowledged yet as not written. Does not wait.

        Their blocks now belong to other requests, and may have been overwritten before they were read.
        """
        wanted = set(names)
        with self._lock:
            for name in wanted & self._saving.keys():
                self._saving[name].given_up = True
            late = [token for token, name in self._unsent.items() if name in wanted]
            for token in late:
                del self._unsent[token], self._acks.written[token]
                self._acks.failed_writes[token] = self._pages.segments

    def finished(self) -> set[str]:
        """Return the ids of requests whose load ended since the last call."""
        with self._lock:
            received, self._loaded = self._loaded, set()
        return received

    def bad_blocks(self) -> set[int]:
        """Return the blocks whose load failed, before `finished` returns the request."""
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def acks(self) -> CornplugKVWorkerMetadata | None:
        """Return acknowledgements since the last call, or None if there are none."""
        with self._lock:
            if self._acks.is_empty():
                return None
            acks, self._acks = self._acks, CornplugKVWorkerMetadata()
            self._unsent.clear()
        return acks

    # -- movers -----------------------------------------------------------------------------------

    def load_over(self, load: PageLoad, whole_pages: int, reason: str, seconds: float) -> None:
        """Record the end of a load with `whole_pages` complete pages. `reason` is empty if these are all
        pages."""
        first_bad = min((load.first_page + whole_pages) * self._pages.page.rows, load.end)
        with self._lock:
            if reason:
                self._bad_blocks |= load.blocks_from(max(first_bad, load.start), self._block_size)
                self._acks.failed_loads[load.request_id] = reason
            self._acks.loaded_bytes += whole_pages * self._pages.size_bytes
            self._acks.loading_s += seconds
            self._loaded.add(load.request_id)

    def page_over(self, page: SavedPage, checksums: Mapping[int, int]) -> None:
        """Record that a page is in the store, with the checksums of this rank's segments. Without checksums,
        the page failed."""
        ongoing, token = page.ongoing, page.target.token
        with self._lock:
            if checksums and not ongoing.given_up:
                self._acks.written[token] = dict(checksums)
                self._unsent[token] = ongoing.save.name
            else:
                self._failed([token])
            ongoing.left.discard(token)
            if not ongoing.left:
                self._over(ongoing)

    def saves_over(self, saves: Iterable[OngoingSave]) -> None:
        """Record the end of these saves. Pages without a result have failed."""
        with self._lock:
            for ongoing in saves:
                self._failed(ongoing.left)
                self._over(ongoing)

    def _failed(self, tokens: Collection[int]) -> None:
        if self._pages.held.writes:
            self._acks.failed_writes |= dict.fromkeys(tokens, self._pages.segments)

    def _over(self, ongoing: OngoingSave) -> None:
        """Record that the save's blocks are no longer read."""
        self._saving.pop(ongoing.save.name, None)


def take(pages: Iterator[SavedPage], count: int) -> list[SavedPage]:
    """Take at most `count` of the next pages that are not given up."""
    return list(itertools.islice((page for page in pages if not page.ongoing.given_up), count))
