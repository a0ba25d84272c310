"""Pages from SGLang's host pool into the store.

Tensor-parallel ranks write one page together without messages between them: each reserves its part
of the same room, writes its heads and commits their checksums, and the daemon joins the parts to a
page. A rank that is late, gone or stopped in the middle delays no other rank.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from cornplug.engine_common.page_publish import PagePublisher
from cornplug.engine_common.rank_pages import RankPages
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import CheckpointError, CornplugError
from cornplug.kv_page import PageGeometry, tensor_parallel_heads
from cornplug.metrics import Tally
from cornplug.sglang_hooks.kv.layout import HostPages
from cornplug.sglang_hooks.kv.namespace_roots import RootsOfCall
from cornplug.sglang_hooks.kv.page_hash_index import HashedPage, PageHashIndex
from cornplug.sglang_hooks.kv.reader import PageReader
from cornplug.store.base import PayloadLocation, Reservation, ReserveRefusal, WriterPart

_TAIL_BYTES: Final = 64 << 20
"""Small pages kept until the store's page that they begin is complete."""
_ROUND_BYTES: Final = 64 << 20
"""Bytes reserved by one call: a young store grows by so much in one answer, for which others wait."""
_SAVE_S: Final = 4.0
"""Longest for one call: SGLang ends its server where this thread does not stop within 10 s."""
_FIRST_PAUSE_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens `inside` of a store page, and where they are: in memory, or in another page of the store."""

    inside: slice
    source: torch.Tensor | HashedPage


_Wanted = Mapping[bytes, list[_Piece]]


def part_of(page: PageGeometry, tp_size: int, tp_rank: int, group: bytes) -> WriterPart | None:
    """A rank's part of pages that all ranks of `group` write; None where it writes whole pages, or none.

    Raises LayoutError where the heads do not split.
    """
    writers = [rank for rank in range(tp_size) if tensor_parallel_heads(page.heads, tp_size, rank)[1]]
    if len(writers) == 1 or tp_rank not in writers:
        return None
    return WriterPart(group, writers.index(tp_rank), len(writers))


class PageWriter:
    """One a rank. Called from SGLang's backup thread; no call raises for want of the store.

    Args:
        part: this rank's, None where it writes pages whole, or none.
        only_seen: as `PagePublisher`'s.
    """

    def __init__(
        self,
        runtime: EngineRuntime,
        reader: PageReader,
        index: PageHashIndex,
        mine: RankPages,
        host: HostPages,
        part: WriterPart | None,
        tally: Tally,
        *,
        only_seen: bool = False,
    ) -> None:
        self._run, self._reader, self._index = runtime, reader, index
        self._mine, self._host = mine, host
        self._publisher = PagePublisher(
            runtime,
            mine.page,
            tally,
            deadline_s=runtime.background_timeout_s,
            part=part,
            only_seen=only_seen,
        )
        self._memory = mine.memory()
        self._tails: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._tail_bytes = 0

    def save(self, hashes: Sequence[str], slots: Sequence[int]) -> None:
        """Offer pages to the store. `slots` are their first slots in the host pool."""
        if not self._mine.held.writes:
            return
        began = time.monotonic()
        refused = self._offer(self._wanted(hashes, slots), began + _SAVE_S)
        pause_s = _FIRST_PAUSE_S
        # A young store grows during the pause; SGLang offers no page twice.
        while refused and time.monotonic() + pause_s < began + self._run.background_timeout_s:
            time.sleep(pause_s)
            pause_s *= 2
            refused = self._offer(refused, began + _SAVE_S)
        self._publisher.count_outcome(ReserveRefusal.GROWING.value, len(refused))
        self._keep_tails(hashes, slots)

    # -- complete pages of the store -----------------------------------------------------------

    def _wanted(self, hashes: Sequence[str], slots: Sequence[int]) -> dict[bytes, list[_Piece]]:
        """Key -> pieces, of the store's pages that these pages complete."""
        at = dict(zip(hashes, slots, strict=True))
        roots = self._reader.roots()
        found: dict[bytes, list[_Piece]] = {}
        for name, page in zip(hashes, self._index.find(hashes), strict=True):
            try:
                if page is None:
                    self._publisher.count_outcome("no_page_key")
                elif self._index.page_size >= self._index.page_tokens:
                    whole = self._host.page(at[name])
                    for part in self._index.overlaps(page):
                        key = self._reader.keys(page, part, roots)[0]
                        found[key] = [_Piece(part.inside, whole[..., part.page, :])]
                elif self._index.is_closing(page):
                    if pieces := self._gathered(name, at):
                        found[self._closing_key(page, roots)] = pieces
                    else:
                        self._publisher.count_outcome("incomplete")
            except CheckpointError as e:
                self._publisher.count_outcome(e.reason)
        return found

    def _closing_key(self, page: HashedPage, roots: RootsOfCall) -> bytes:
        (part,) = self._index.overlaps(page)
        return self._reader.keys(page, part._replace(links=(page.link,)), roots)[0]

    def _gathered(self, closing: str, at: Mapping[str, int]) -> list[_Piece] | None:
        """The small pages of one store page; None where one of them is lost."""
        pieces = []
        for name, page in self._index.siblings(closing):
            parts = self._index.overlaps(page)
            if not parts:
                return None
            source: torch.Tensor | HashedPage = page
            if name in at:
                source = self._host.page(at[name])
            elif name in self._tails:
                source = self._tails[name]
            pieces.append(_Piece(parts[0].inside, source))
        complete = len(pieces) == self._index.page_tokens // self._index.page_size
        return pieces if complete else None

    def _keep_tails(self, hashes: Sequence[str], slots: Sequence[int]) -> None:
        """Keep copies of the pages after the last complete store page: the rest of it may come later."""
        size, index = self._index.page_size, self._index
        if size >= index.page_tokens:
            return
        pages = index.find(hashes)
        for name, page, slot in reversed(list(zip(hashes, pages, slots, strict=True))):
            if page is None or index.is_closing(page):
                break
            if name not in self._tails:
                self._tails[name] = self._host.page(slot).clone(memory_format=torch.contiguous_format)
                self._tail_bytes += self._tails[name].nbytes
        while self._tail_bytes > _TAIL_BYTES:
            self._tail_bytes -= self._tails.popitem(last=False)[1].nbytes

    # -- writing them ---------------------------------------------------------------------------

    def _offer(self, wanted: _Wanted, end_s: float) -> dict[bytes, list[_Piece]]:
        """Write pages, some at a time. Returns those that a growing store refused."""
        refused: dict[bytes, list[_Piece]] = {}
        for keys in self._rounds(list(wanted)):
            deadline_s = min(self._run.background_timeout_s, end_s - time.monotonic())
            if deadline_s <= 0:
                self._publisher.count_outcome("late", len(keys))
                continue
            reserved = []
            for key, answer in zip(keys, self._publisher.reserve(keys, deadline_s=deadline_s), strict=True):
                if isinstance(answer, Reservation):
                    reserved.append(answer)
                elif answer is ReserveRefusal.GROWING:
                    refused[key] = wanted[key]
            self._fill(wanted, reserved)
        return refused

    def _rounds(self, keys: list[bytes]) -> Iterator[list[bytes]]:
        step = max(1, _ROUND_BYTES // self._mine.page.page_bytes)
        for start in range(0, len(keys), step):
            yield keys[start : start + step]

    def _fill(self, wanted: _Wanted, reserved: Sequence[Reservation]) -> None:
        """Write this rank's heads of the reserved pages, and commit them."""
        written, broken = [], []
        for reservation in reserved:
            sums = self._written(wanted[reservation.key], reservation.location)
            if sums is None:
                broken.append(reservation)
            else:
                written.append((reservation, sums))
        self._publisher.give_up(broken, "write_failed")
        self._publisher.commit(written)

    def _written(self, pieces: list[_Piece], location: PayloadLocation) -> Mapping[int, int] | None:
        """Segment -> checksum of this rank's part, None where it could not be written."""
        try:
            for piece in pieces:
                source = piece.source
                if isinstance(source, HashedPage):
                    borrowed = self._reader.borrow(source)
                    if borrowed is None:
                        return None
                    source = borrowed
                self._memory[..., piece.inside, :].copy_(source)
            return self._mine.write(self._memory, location)
        except CornplugError:
            return None
