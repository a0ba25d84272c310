"""Reserves, commits and releases KV pages in the store. The outcome of each page is counted once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from cornplug.engine_common.rank_pages import page_headers, partial_page_header
from cornplug.engine_common.runtime import KV_PAGE, EngineRuntime
from cornplug.errors import CornplugError
from cornplug.kv_page import PageGeometry, PageSize
from cornplug.metrics import Tally
from cornplug.store.arena import align_up
from cornplug.store.base import (
    CompletedRequest,
    PostedRequest,
    Reservation,
    ReserveRefusal,
    ReserveTerms,
    WriterPart,
)
from cornplug.store.messages import MAX_COST_S

T = TypeVar("T")
R = TypeVar("R")

ReserveReply = Reservation | ReserveRefusal | None
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


def count_free_pages(runtime: EngineRuntime, page: PageSize) -> int | None:
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
        writer_part: this process's part of pages that several connections write together. The process with
            the first part counts the outcomes. None if this process writes complete pages.
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
        writer_part: WriterPart | None = None,
        only_seen: bool = False,
        cost: EntryCost | None = None,
    ) -> None:
        self._runtime, self._page, self._tally = runtime, page, tally
        self._cost = cost or EntryCost(PageCost())
        self._deadline_s, self._writer_part = deadline_s, writer_part
        self._only_seen = only_seen

    def reserve(self, keys: Sequence[bytes], *, deadline_s: float | None = None) -> list[ReserveReply]:
        """Reserve space for pages with these keys. Returns the store's reply for each key, or None for all
        keys if the store did not reply.

        Refusals are counted as outcomes, except GROWING, because the caller offers such a page again or
        counts the outcome itself.
        """
        try:
            replies = self._runtime.store.reserve(
                self._reserve_entries(keys),
                self._reserve_terms(),
                deadline_s=deadline_s or self._deadline_s,
            )
        except CornplugError as e:
            return self._count_reserve_failure(e, len(keys))
        return self._count_refusals(replies)

    def post_reserve(self, keys: Sequence[bytes]) -> PostedRequest[list[ReserveReply]]:
        """Send a reservation like `reserve`, but without waiting for the reply if the store supports that.
        `poll` on the result does not raise."""
        try:
            posted = self._runtime.store.post_reserve(
                self._reserve_entries(keys),
                self._reserve_terms(),
                deadline_s=self._deadline_s,
            )
        except CornplugError as e:
            return CompletedRequest(self._count_reserve_failure(e, len(keys)))
        if isinstance(posted, CompletedRequest):
            return CompletedRequest(self._count_refusals(posted.poll()))
        return _CountedRequest(
            posted, self._count_refusals, lambda e: self._count_reserve_failure(e, len(keys))
        )

    def commit(self, written: Sequence[tuple[Reservation, Mapping[int, int]]]) -> None:
        """Commit written pages, each given as (reservation, checksums by segment index)."""
        if not written:
            return
        try:
            done = self._runtime.store.commit(self._commit_entries(written), deadline_s=self._deadline_s)
        except CornplugError as e:
            self._count_failure(e, len(written))
            return
        self._count_commits(done)

    def post_commit(self, written: Sequence[tuple[Reservation, Mapping[int, int]]]) -> PostedRequest[bool]:
        """Send a commit like `commit`, but without waiting for the reply if the store supports that. `poll`
        on the result does not raise."""
        try:
            posted = self._runtime.store.post_commit(
                self._commit_entries(written), deadline_s=self._deadline_s
            )
        except CornplugError as e:
            return CompletedRequest(self._count_failure(e, len(written)))
        if isinstance(posted, CompletedRequest):
            return CompletedRequest(self._count_commits(posted.poll()))
        return _CountedRequest(posted, self._count_commits, lambda e: self._count_failure(e, len(written)))

    def _reserve_terms(self) -> ReserveTerms:
        return ReserveTerms(self._runtime.app, self._writer_part, self._only_seen, self._cost.capped_s())

    def _reserve_entries(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        size = self._page.page_bytes
        return [(key, size) for key in keys]

    def _commit_entries(
        self, written: Sequence[tuple[Reservation, Mapping[int, int]]]
    ) -> list[tuple[Reservation, bytes]]:
        if self._writer_part is not None:
            return [
                (reservation, partial_page_header(reservation.key, self._page, sums))
                for reservation, sums in written
            ]
        headers = page_headers([(reservation.key, sums) for reservation, sums in written], self._page)
        return [(reservation, header) for (reservation, _), header in zip(written, headers, strict=True)]

    def _count_refusals(self, replies: Sequence[Reservation | ReserveRefusal]) -> list[ReserveReply]:
        for reply in replies:
            if isinstance(reply, ReserveRefusal) and reply is not ReserveRefusal.GROWING:
                self.count_outcome(reply.value)
        return list(replies)

    def _count_commits(self, done: Sequence[bool]) -> bool:
        stored = sum(done)
        self.count_outcome("stored", stored)
        self.count_outcome("reservation_ended", len(done) - stored)
        return True

    def _count_failure(self, error: CornplugError, pages: int) -> bool:
        self.count_outcome(error.reason, pages)
        return False

    def _count_reserve_failure(self, error: CornplugError, pages: int) -> list[ReserveReply]:
        """Count the store's failure as the outcome of `pages` pages."""
        self._count_failure(error, pages)
        return [None] * pages

    def release_unwritten(self, reservations: Sequence[Reservation], outcome: str) -> None:
        """Release the reservations of pages that could not be written, and count their outcome. If the store
        has exited, the reservations are already released."""
        self.count_outcome(outcome, len(reservations))
        with suppress(CornplugError):
            if reservations:
                self._runtime.store.release([r.token for r in reservations], deadline_s=self._deadline_s)

    def count_outcome(self, outcome: str, pages: int = 1) -> None:
        """Count `pages` saves with this outcome, and also the stored bytes if the pages were stored."""
        if not pages or (self._writer_part is not None and self._writer_part.index != 0):
            return
        self._tally.count("cornplug_saves_total", self._runtime.app, KV_PAGE, outcome, amount=pages)
        if outcome == "stored":
            size = pages * self._page.page_bytes
            self._tally.count("cornplug_bytes_total", self._runtime.app, KV_PAGE, "save", amount=size)


class _CountedRequest(Generic[T, R]):
    """Request to the store that was sent without waiting. Its reply or failure is counted when the caller
    reads the reply."""

    def __init__(
        self, posted: PostedRequest[T], on_reply: Callable[[T], R], on_error: Callable[[CornplugError], R]
    ) -> None:
        self._posted, self._on_reply, self._on_error = posted, on_reply, on_error

    def poll(self) -> R | None:
        try:
            reply = self._posted.poll()
        except CornplugError as e:
            return self._on_error(e)
        return None if reply is None else self._on_reply(reply)
