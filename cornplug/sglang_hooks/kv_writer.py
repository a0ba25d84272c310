"""Pages from SGLang's host pool into the store, written by all ranks together."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import torch

from cornplug.engine_side.page_header import page_header
from cornplug.engine_side.runtime import Runtime
from cornplug.errors import CheckpointError, CornplugError, StoreUnavailable
from cornplug.kv_page import tensor_parallel_heads
from cornplug.metrics import Tally
from cornplug.sglang_hooks.kv_book import Book, Page
from cornplug.sglang_hooks.kv_layout import HostPages
from cornplug.sglang_hooks.kv_pages import RankPages
from cornplug.sglang_hooks.kv_ranks import Ranks, RanksApart, Sums
from cornplug.sglang_hooks.kv_reader import WHAT, Reader
from cornplug.store.base import Location, Refusal, Reservation

_TAIL_BYTES: Final = 64 << 20
"""Small pages kept until the store's page that they begin is complete."""

_Places = list[tuple[bytes, Location]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens `inside` of a store page, and where they are: in memory, or in another page of the store."""

    inside: slice
    source: torch.Tensor | Page


class Writer:
    """One a rank. Called from SGLang's backup thread; no call raises for want of the store."""

    def __init__(
        self,
        runtime: Runtime,
        reader: Reader,
        book: Book,
        mine: RankPages,
        host: HostPages,
        ranks: Ranks,
        tally: Tally,
    ) -> None:
        self._run, self._reader, self._book = runtime, reader, book
        self._mine, self._host, self._ranks, self._tally = mine, host, ranks, tally
        self._memory = mine.memory()
        self._tails: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._tail_bytes = 0

    def save(self, hashes: Sequence[str], slots: Sequence[int], *, willing: bool = True) -> None:
        """Offer pages to the store. `slots` are their first slots in the host pool.

        Every rank must call it for the same pages in the same order; one that is not
        `willing` takes part all the same, so that the others need not wait for it.
        """
        outcomes: Counter[str] = Counter()
        wanted = self._wanted(hashes, slots, outcomes) if willing else {}
        reserved = self._reserve(list(wanted), outcomes) if self._ranks.rank == 0 else []
        try:
            self._fill(wanted, reserved, outcomes)
        except RanksApart as e:
            self._give_up(reserved)
            outcomes[e.reason] += len(reserved)
        if willing:
            self._keep_tails(hashes, slots)
        self._count(outcomes)

    # -- which of the store's pages are complete -----------------------------------------------

    def _wanted(
        self, hashes: Sequence[str], slots: Sequence[int], outcomes: Counter[str]
    ) -> dict[bytes, list[_Piece]]:
        """Key -> pieces, of the store's pages that these pages complete."""
        at = dict(zip(hashes, slots, strict=True))
        found: dict[bytes, list[_Piece]] = {}
        for name, page in zip(hashes, self._book.find(hashes), strict=True):
            try:
                if page is None:
                    outcomes["unnamed"] += 1
                elif self._book.page_size >= self._book.page_tokens:
                    whole = self._host.page(at[name])
                    for part in self._book.parts(page):
                        key = self._reader.keys(page, part)[0]
                        found[key] = [_Piece(part.inside, whole[..., part.page, :])]
                elif self._book.is_closing(page):
                    if pieces := self._gathered(name, at):
                        found[self._closing_key(page)] = pieces
                    else:
                        outcomes["incomplete"] += 1
            except CheckpointError as e:
                outcomes[e.reason] += 1
        return found

    def _closing_key(self, page: Page) -> bytes:
        (part,) = self._book.parts(page)
        return self._reader.keys(page, part._replace(links=(page.link,)))[0]

    def _gathered(self, closing: str, at: Mapping[str, int]) -> list[_Piece] | None:
        """The small pages of one store page; None where one of them is nowhere any more."""
        pieces = []
        for name, page in self._book.siblings(closing):
            parts = self._book.parts(page)
            if not parts:
                return None
            source: torch.Tensor | Page = page
            if name in at:
                source = self._host.page(at[name])
            elif name in self._tails:
                source = self._tails[name]
            pieces.append(_Piece(parts[0].inside, source))
        complete = len(pieces) == self._book.page_tokens // self._book.page_size
        return pieces if complete else None

    def _keep_tails(self, hashes: Sequence[str], slots: Sequence[int]) -> None:
        """Copy the pages after the last complete store page: what follows them may come later."""
        size, book = self._book.page_size, self._book
        if size >= book.page_tokens:
            return
        pages = book.find(hashes)
        for name, page, slot in reversed(list(zip(hashes, pages, slots, strict=True))):
            if page is None or book.is_closing(page):
                break
            if name not in self._tails:
                self._tails[name] = self._host.page(slot).clone(memory_format=torch.contiguous_format)
                self._tail_bytes += self._tails[name].nbytes
        while self._tail_bytes > _TAIL_BYTES:
            self._tail_bytes -= self._tails.popitem(last=False)[1].nbytes

    # -- writing them ---------------------------------------------------------------------------

    def _reserve(self, keys: list[bytes], outcomes: Counter[str]) -> list[Reservation]:
        if not keys or self._ranks.apart:
            return []
        size = self._mine.page.page_bytes
        try:
            answers = self._run.store.reserve(
                [(key, size) for key in keys], app=self._run.app, deadline_s=self._run.patience_s
            )
        except StoreUnavailable as e:
            outcomes[e.reason] += len(keys)
            return []
        outcomes.update(answer.value for answer in answers if isinstance(answer, Refusal))
        return [answer for answer in answers if not isinstance(answer, Refusal)]

    def _fill(
        self, wanted: Mapping[bytes, list[_Piece]], reserved: list[Reservation], outcomes: Counter[str]
    ) -> None:
        """Every rank writes its heads of what rank 0 reserved; rank 0 publishes. Raises RanksApart."""
        places: _Places = [(reservation.key, reservation.location) for reservation in reserved]
        message = self._ranks.announce(msgspec.msgpack.encode(places) if places else b"")
        if not message:
            return
        places = msgspec.msgpack.decode(message, type=_Places)
        # A row a page: whether this rank has done its part, then the checksums of its segments.
        mine: Sums = np.zeros((len(places), 1 + len(self._mine.segments)), np.uint64)
        for row, (key, location) in zip(mine, places, strict=True):
            sums = self._written(wanted.get(key), location) if self._mine.writes else {}
            if sums is not None:
                row[0] = 1
                row[1:] = list(sums.values()) or 0
        rows = self._ranks.gather(mine)
        if self._ranks.rank == 0:
            self._publish(reserved, rows, outcomes)

    def _written(self, pieces: list[_Piece] | None, location: Location) -> Mapping[int, int] | None:
        """Segment -> checksum of this rank's part, None where it could not be written."""
        if pieces is None:
            return None
        try:
            for piece in pieces:
                source = piece.source
                if isinstance(source, Page):
                    borrowed = self._reader.borrow(source)
                    if borrowed is None:
                        return None
                    source = borrowed
                self._memory[..., piece.inside, :].copy_(source)
            return self._mine.write(self._memory, location)
        except CornplugError:
            return None

    def _publish(self, reserved: list[Reservation], rows: list[Sums], outcomes: Counter[str]) -> None:
        page, writers = self._mine.page, self._writers()
        whole, broken = [], []
        for i, reservation in enumerate(reserved):
            sums: dict[int, int] = {}
            for rank, segments in writers.items():
                if rows[rank][i, 0]:
                    sums |= dict(zip(segments, rows[rank][i, 1:].tolist(), strict=True))
            if len(sums) == page.segments:
                whole.append((reservation, page_header(reservation.key, page, sums)))
            else:
                broken.append(reservation)
        outcomes["write_failed"] += len(broken)
        self._give_up(broken)
        try:
            stored = self._run.store.commit(whole, deadline_s=self._run.patience_s) if whole else []
        except StoreUnavailable as e:
            outcomes[e.reason] += len(whole)
            return
        outcomes["stored"] += sum(stored)
        outcomes["reservation_ended"] += len(stored) - sum(stored)

    def _writers(self) -> dict[int, list[int]]:
        """Rank -> the segments that it writes."""
        page, found = self._mine.page, {}
        for rank in range(self._ranks.size):
            heads, writes = tensor_parallel_heads(page.heads, self._ranks.size, rank)
            if writes:
                found[rank] = page.segments_of(heads)
        return found

    def _give_up(self, reserved: list[Reservation]) -> None:
        with suppress(StoreUnavailable):
            if reserved:
                self._run.store.release([r.token for r in reserved], deadline_s=self._run.patience_s)

    def _count(self, outcomes: Counter[str]) -> None:
        if self._ranks.rank != 0:
            return
        for outcome, by in outcomes.items():
            if by:
                self._tally.count("cornplug_saves_total", self._run.app, WHAT, outcome, by=by)
        if outcomes["stored"]:
            moved = outcomes["stored"] * self._mine.page.page_bytes
            self._tally.count("cornplug_bytes_total", self._run.app, WHAT, "save", by=moved)
