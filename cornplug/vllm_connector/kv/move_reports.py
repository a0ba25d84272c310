"""What became of a worker's loads and saves, for vLLM and for the scheduler half."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from cornplug.engine_common.rank_pages import RankPages
from cornplug.vllm_connector.kv.metadata import CornplugKVWorkerMetadata, PageLoad, PageSave, PageWrite
from cornplug.vllm_connector.kv_copies.cache_blocks import Table, kernel_table


@dataclass(eq=False, slots=True)
class OngoingSave:
    """A save that is under way."""

    save: PageSave
    left: set[int]
    """Reservation tokens of the pages that are not acknowledged yet."""
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class SavedPage:
    """A page of a step's saves."""

    ongoing: OngoingSave
    target: PageWrite
    place: tuple[Table, int]
    """Some of its request's blocks through `kernel_table`, and the page's place in them."""


def pages_of(saves: Iterable[OngoingSave], rows: int, block_size: int, slots: int) -> Iterator[SavedPage]:
    """The pages of saves, with only those blocks that hold them: a request may have thousands."""
    for ongoing in saves:
        save = ongoing.save
        # A page and a block both begin at a multiple of it.
        unit = math.lcm(rows, block_size)
        first = min(page.index for page in save.pages) * rows // unit * unit
        last = max(page.index for page in save.pages) * rows + rows
        blocks = save.blocks[first // block_size : -(-last // block_size)]
        table = kernel_table(blocks, block_size, slots)
        for page in save.pages:
            yield SavedPage(ongoing, page, (table, page.index - first // rows))


class MoveReports:
    """One per worker. Movers report, the engine's thread collects."""

    def __init__(self, pages: RankPages, block_size: int) -> None:
        self._pages, self._block_size = pages, block_size
        self._lock = threading.Lock()
        self._acks = CornplugKVWorkerMetadata()
        self._unsent: dict[int, str] = {}
        """Reservation token -> name of its save, of the pages in `_acks.written`."""
        self._loaded: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._saving: dict[str, OngoingSave] = {}
        """By name."""

    # -- the engine's thread ----------------------------------------------------------------------

    def unusable(self, reason: str) -> None:
        """Tell that this rank's caches cannot be mapped."""
        self._acks.unusable = reason

    def saves_begin(self, saves: Iterable[PageSave]) -> list[OngoingSave]:
        """These saves begin."""
        begun = [OngoingSave(save, {page.token for page in save.pages}) for save in saves]
        with self._lock:
            for ongoing in begun:
                self._saving[ongoing.save.name] = ongoing
        return begun

    def staged(self, pages: int) -> None:
        """So many pages pass staging memory on their way from or to a GPU."""
        with self._lock:
            self._acks.staged_pages += pages

    def stepped(self, number: int) -> None:
        """Acknowledge the end of a timed step, with the next acknowledgements."""
        with self._lock:
            self._acks.steps.append(number)

    def give_up_saves(self, names: Collection[str]) -> None:
        """Count pages of these saves that are not acknowledged yet as not written. Does not wait.

        Their blocks belong to other requests now, and may have done so before they were read.
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
        """Ids of the requests whose load ended since the last call."""
        with self._lock:
            received, self._loaded = self._loaded, set()
        return received

    def bad_blocks(self) -> set[int]:
        """Blocks whose load failed; a request is never `finished` before its bad blocks are here."""
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def acks(self) -> CornplugKVWorkerMetadata | None:
        """The acknowledgements since the last call; None where there are none."""
        with self._lock:
            if self._acks.is_empty():
                return None
            acks, self._acks = self._acks, CornplugKVWorkerMetadata()
            self._unsent.clear()
        return acks

    # -- movers -----------------------------------------------------------------------------------

    def load_over(self, load: PageLoad, whole_pages: int, reason: str, seconds: float) -> None:
        """A load has ended with so many whole pages, which took so long; `reason` is empty where these are
        all."""
        first_bad = min((load.first_page + whole_pages) * self._pages.page.rows, load.end)
        with self._lock:
            if reason:
                self._bad_blocks |= load.blocks_from(max(first_bad, load.start), self._block_size)
                self._acks.failed_loads[load.request_id] = reason
            self._acks.loaded_bytes += whole_pages * self._pages.size_bytes
            self._acks.loading_s += seconds
            self._loaded.add(load.request_id)

    def page_over(self, page: SavedPage, checksums: Mapping[int, int]) -> None:
        """A page is in the store, with these checksums of this rank's segments; without any it failed."""
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
        """These saves have ended; the pages that are not over have failed."""
        with self._lock:
            for ongoing in saves:
                self._failed(ongoing.left)
                self._over(ongoing)

    def _failed(self, tokens: Collection[int]) -> None:
        if self._pages.held.writes:
            self._acks.failed_writes |= dict.fromkeys(tokens, self._pages.segments)

    def _over(self, ongoing: OngoingSave) -> None:
        """Its blocks are not read any more."""
        self._saving.pop(ongoing.save.name, None)


def take(pages: Iterator[SavedPage], count: int) -> list[SavedPage]:
    """The next pages that are not given up, at most so many."""
    return list(itertools.islice((page for page in pages if not page.ongoing.given_up), count))
