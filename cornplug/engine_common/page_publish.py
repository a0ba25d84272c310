"""Reserves, commits and releases KV pages in the store. The outcome of each page is counted once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from cornplug.engine_common.rank_pages import page_headers, page_part
from cornplug.engine_common.runtime import KV_PAGE, EngineRuntime
from cornplug.errors import CornplugError
from cornplug.kv_page import PageGeometry, PageSize
from cornplug.metrics import Tally
from cornplug.store.base import Answered, Posted, Reservation, ReserveRefusal, ReserveTerms, WriterPart
from cornplug.store.daemon.allocator import align_up
from cornplug.store.messages import MAX_COST_S

T = TypeVar("T")
R = TypeVar("R")

RoomAnswer = Reservation | ReserveRefusal | None
"""The store's reply to the reservation of one page, or None if the store did not reply."""


@dataclass(slots=True)
class PageCost:
    """Measured seconds that this engine needs to compute the tokens of one page, or 0 if not measured.

    The engine's thread updates the cost once per measured step. Every `reserve` call sends it to the store.
    A full store uses it to choose among namespaces of equal priority.
    """

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EntryCost:
    """Cost of one store entry, as a fraction of a page's cost. The fraction is less than 1 if a page
    is stored as several entries."""

    page: PageCost
    share: float = 1.0

    def capped_s(self) -> float:
        """Return the entry's cost in seconds, limited to the maximum that the store accepts."""
        return min(self.page.seconds * self.share, MAX_COST_S)


def free_pages(runtime: EngineRuntime, page: PageSize) -> int | None:
    """Return the number of pages that fit into the store without an eviction, or None if the store does not
    reply.
    """
    try:
        stat = runtime.store.stat(deadline_s=runtime.deadline_s)
    except CornplugError:
        return None
    return (stat.capacity_bytes - stat.used_bytes) // align_up(page.page_bytes)


class PagePublisher:
    """Saves one engine's KV pages to the store. If the store fails, methods do not raise, but count the
    failure as the pages' outcome.

    Args:
        deadline_s: deadline in seconds for each call to the store.
        part: this process's part of pages that several connections write together. The process with the first
            part counts the outcomes. None if this process writes complete pages.
        only_seen: reserve only pages that an earlier request used, on any engine of the store. `reserve` also
            records a use of each page, so the caller must pass each page of a request only once.
        cost: cost of computing an entry, or None if it is unknown.
    """

    def __init__(
        self,
        runtime: EngineRuntime,
        page: PageGeometry,
        tally: Tally,
        *,
        deadline_s: float,
        part: WriterPart | None = None,
        only_seen: bool = False,
        cost: EntryCost | None = None,
    ) -> None:
        self._run, self._page, self._tally = runtime, page, tally
        self._cost = cost or EntryCost(PageCost())
        self._deadline_s, self._part = deadline_s, part
        self._only_seen = only_seen

    def reserve(self, keys: Sequence[bytes], *, deadline_s: float | None = None) -> list[RoomAnswer]:
        """Reserve space for pages with these keys. Returns the store's reply for each key, or None for all
        keys if the store did not reply.

        Refusals are counted as outcomes, except GROWING, because the caller offers such a page again or
        counts the outcome itself.
        """
        try:
            answers = self._run.store.reserve(
                self._entries(keys),
                self._terms(),
                deadline_s=deadline_s or self._deadline_s,
            )
        except CornplugError as e:
            return self._no_room(e, len(keys))
        return self._refusals_counted(answers)

    def post_reserve(self, keys: Sequence[bytes]) -> Posted[list[RoomAnswer]]:
        """Send a reservation like `reserve`, but without waiting for the reply if the store supports that.
        `take` on the result does not raise."""
        try:
            posted = self._run.store.post_reserve(
                self._entries(keys),
                self._terms(),
                deadline_s=self._deadline_s,
            )
        except CornplugError as e:
            return Answered(self._no_room(e, len(keys)))
        if isinstance(posted, Answered):
            return Answered(self._refusals_counted(posted.take()))
        return _Counted(posted, self._refusals_counted, lambda e: self._no_room(e, len(keys)))

    def commit(self, written: Sequence[tuple[Reservation, Mapping[int, int]]]) -> None:
        """Commit written pages, each given as (reservation, checksums by segment index)."""
        if not written:
            return
        try:
            done = self._run.store.commit(self._pages(written), deadline_s=self._deadline_s)
        except CornplugError as e:
            self._not_done(e, len(written))
            return
        self._done_counted(done)

    def post_commit(self, written: Sequence[tuple[Reservation, Mapping[int, int]]]) -> Posted[bool]:
        """Send a commit like `commit`, but without waiting for the reply if the store supports that. `take`
        on the result does not raise."""
        try:
            posted = self._run.store.post_commit(self._pages(written), deadline_s=self._deadline_s)
        except CornplugError as e:
            return Answered(self._not_done(e, len(written)))
        if isinstance(posted, Answered):
            return Answered(self._done_counted(posted.take()))
        return _Counted(posted, self._done_counted, lambda e: self._not_done(e, len(written)))

    def _terms(self) -> ReserveTerms:
        return ReserveTerms(self._run.app, self._part, self._only_seen, self._cost.capped_s())

    def _entries(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        size = self._page.page_bytes
        return [(key, size) for key in keys]

    def _pages(
        self, written: Sequence[tuple[Reservation, Mapping[int, int]]]
    ) -> list[tuple[Reservation, bytes]]:
        if self._part is not None:
            return [(room, page_part(room.key, self._page, sums)) for room, sums in written]
        headers = page_headers([(room.key, sums) for room, sums in written], self._page)
        return [(room, header) for (room, _), header in zip(written, headers, strict=True)]

    def _refusals_counted(self, answers: Sequence[Reservation | ReserveRefusal]) -> list[RoomAnswer]:
        for answer in answers:
            if isinstance(answer, ReserveRefusal) and answer is not ReserveRefusal.GROWING:
                self.count_outcome(answer.value)
        return list(answers)

    def _done_counted(self, done: Sequence[bool]) -> bool:
        stored = sum(done)
        self.count_outcome("stored", stored)
        self.count_outcome("reservation_ended", len(done) - stored)
        return True

    def _not_done(self, error: CornplugError, pages: int) -> bool:
        self.count_outcome(error.reason, pages)
        return False

    def _no_room(self, error: CornplugError, pages: int) -> list[RoomAnswer]:
        """Count the store's failure as the outcome of `pages` pages."""
        self._not_done(error, pages)
        return [None] * pages

    def give_up(self, reserved: Sequence[Reservation], outcome: str) -> None:
        """Release the reservations of pages that could not be written, and count their outcome. If the store
        has exited, the reservations are already released."""
        self.count_outcome(outcome, len(reserved))
        with suppress(CornplugError):
            if reserved:
                self._run.store.release([r.token for r in reserved], deadline_s=self._deadline_s)

    def count_outcome(self, outcome: str, pages: int = 1) -> None:
        """Count `pages` saves with this outcome, and also the stored bytes if the pages were stored."""
        if not pages or (self._part is not None and self._part.index != 0):
            return
        self._tally.count("cornplug_saves_total", self._run.app, KV_PAGE, outcome, by=pages)
        if outcome == "stored":
            size = pages * self._page.page_bytes
            self._tally.count("cornplug_bytes_total", self._run.app, KV_PAGE, "save", by=size)


class _Counted(Generic[T, R]):
    """Request to the store that was sent without waiting. Its reply or failure is counted when the caller
    reads the reply."""

    def __init__(
        self, posted: Posted[T], answered: Callable[[T], R], failed: Callable[[CornplugError], R]
    ) -> None:
        self._posted, self._answered, self._failed = posted, answered, failed

    def take(self) -> R | None:
        try:
            answer = self._posted.take()
        except CornplugError as e:
            return self._failed(e)
        return None if answer is None else self._answered(answer)
