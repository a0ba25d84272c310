"""Pages on their way into the store: reserve, commit, give up; each page's outcome is counted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from cornplug.engine_common.page_envelope import page_header, page_part
from cornplug.engine_common.runtime import KV_PAGE, EngineRuntime
from cornplug.errors import CornplugError
from cornplug.kv_page import PageGeometry
from cornplug.metrics import Tally
from cornplug.store.base import Reservation, ReserveRefusal, WriterPart


class PagePublisher:
    """Publishes pages of one engine. No call raises for want of the store: its reason is the pages' outcome.

    Args:
        deadline_s: of each call of the store.
        part: this process's part of pages that several connections write together; the first part counts
            their outcomes. None: pages are committed whole.
        only_seen: `reserve` is a request's sighting of its pages, and names each of them once: it gives room
            for those that an earlier request had, on any engine of the store.
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
    ) -> None:
        self._run, self._page, self._tally = runtime, page, tally
        self._deadline_s, self._part = deadline_s, part
        self._only_seen = only_seen

    def reserve(
        self, keys: Sequence[bytes], *, deadline_s: float | None = None
    ) -> list[Reservation | ReserveRefusal | None]:
        """The store's answer for each key, None if it gives none.

        Counts refusals other than GROWING: the caller offers such a page again, or counts it.
        """
        entries = [(key, self._page.page_bytes) for key in keys]
        try:
            answers = self._run.store.reserve(
                entries,
                app=self._run.app,
                deadline_s=deadline_s or self._deadline_s,
                part=self._part,
                only_seen=self._only_seen,
            )
        except CornplugError as e:
            self.count_outcome(e.reason, len(keys))
            return [None] * len(keys)
        for answer in answers:
            if isinstance(answer, ReserveRefusal) and answer is not ReserveRefusal.GROWING:
                self.count_outcome(answer.value)
        return list(answers)

    def commit(self, written: Sequence[tuple[Reservation, Mapping[int, int]]]) -> None:
        """Publish pages. Each comes with the checksums of the segments that this process collected."""
        if not written:
            return
        envelope = page_header if self._part is None else page_part
        pages = [(reserved, envelope(reserved.key, self._page, sums)) for reserved, sums in written]
        try:
            stored = sum(self._run.store.commit(pages, deadline_s=self._deadline_s))
        except CornplugError as e:
            self.count_outcome(e.reason, len(pages))
            return
        self.count_outcome("stored", stored)
        self.count_outcome("reservation_ended", len(pages) - stored)

    def give_up(self, reserved: Sequence[Reservation], outcome: str) -> None:
        """Give the room of pages back that could not be written. A store that is gone has done so."""
        self.count_outcome(outcome, len(reserved))
        with suppress(CornplugError):
            if reserved:
                self._run.store.release([r.token for r in reserved], deadline_s=self._deadline_s)

    def count_outcome(self, outcome: str, pages: int = 1) -> None:
        """Count pages that had this outcome, and the bytes of stored ones."""
        if not pages or (self._part is not None and self._part.index != 0):
            return
        self._tally.count("cornplug_saves_total", self._run.app, KV_PAGE, outcome, by=pages)
        if outcome == "stored":
            size = pages * self._page.page_bytes
            self._tally.count("cornplug_bytes_total", self._run.app, KV_PAGE, "save", by=size)
