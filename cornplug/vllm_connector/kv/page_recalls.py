"""Reading of a request's pages from disk or from far stores, while vLLM continues with other requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import StoreUnavailable
from cornplug.store.base import Tier
from cornplug.vllm_connector.kv.costs import LoadCosts

if TYPE_CHECKING:
    from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest

_LOOK_S: Final = 1e-3
"""Minimum seconds between two checks for newly arrived pages of a recall. vLLM polls once per step, and idle
steps are short."""
_AGAIN_S: Final = 0.05
"""Seconds after which pages that have not arrived are requested again. The store reads only a part of a long
prompt at a time."""


_WAITED_S: Final = 0.05
"""Seconds after which a waiting request that was not polled again is assumed to be aborted."""


@dataclass(slots=True)
class PageRecall:
    """Progress of reading a request's pages from disk. A request has at most one recall."""

    keys: Sequence[bytes]
    """Keys of the request's pages that are read from disk."""
    began_s: float
    end_s: float
    """Time after which pages that have not arrived are computed instead."""
    left: int
    """Number of the recall's pages that have not arrived yet."""
    over: bool = False
    came_s: float = 0.0
    """Time of the last check that found a newly arrived page."""
    asked_s: float = 0.0
    looked_s: float = 0.0


@dataclass(slots=True)
class FarQuestion:
    """Pending query to far stores for a request's absent pages. A request has at most one such query."""

    ticket: int
    end_s: float
    """Time after which the request continues even if some replies are missing."""


class PageRecalls:
    """Reads pages from disk and queries far stores for one scheduler half. Used by the engine's thread."""

    def __init__(self, runtime: EngineRuntime, costs: LoadCosts) -> None:
        self._run, self._costs = runtime, costs
        self._waited_s = -1.0
        """Time when a request last had to wait for pages. Negative before the first wait."""

    @property
    def waited_for(self) -> bool:
        """Whether any request waits for pages from disk or far stores. vLLM polls this in every step."""
        return time.monotonic() - self._waited_s < _WAITED_S

    def seek(self, keys: Sequence[bytes], *, tokens: int) -> FarQuestion | None:
        """Query far stores for the pages with these keys, which contain the first of `tokens` absent tokens.
        Returns None if a recent lookup of these pages is complete, or if no far store responds. Raises
        StoreUnavailable."""
        ticket = self._run.store.seek(keys)
        if not ticket:
            return None
        now_s = self._waited_s = time.monotonic()
        return FarQuestion(ticket, now_s + self._costs.far_wait_s(tokens))

    def awaits(self, question: FarQuestion) -> bool:
        """Return whether the request should still wait for far stores' replies to a query. Far stores are
        queried for a few pages of a long prompt at a time, so the arrival of the first pages does not end the
        wait. Sends no message."""
        now_s = time.monotonic()
        if now_s >= question.end_s or self._run.store.answered(question.ticket):
            return False
        self._waited_s = now_s
        return True

    def on_disk(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those of the keys whose pages are only on disk. Raises StoreUnavailable."""
        tiers = self._run.store.tiers(keys, deadline_s=self._run.config.store.deadline_s)
        return [key for key, tier in zip(keys, tiers, strict=True) if tier == Tier.DISK]

    def begin(self, tracked: TrackedRequest, keys: Sequence[bytes], *, tokens: int, pages: int) -> bool:
        """Start to read the pages of `keys` from disk for a request, if that is faster than computing them,
        and return whether it is. The pages belong to a hit of `pages` pages and `tokens` tokens. Call it at
        most once per request. Raises StoreUnavailable."""
        now_s = time.monotonic()
        pays = self._costs.recall_pays(tokens=tokens, pages=pages, on_disk=len(keys))
        end_s = now_s + self._costs.deadline_s(tokens)
        tracked.recall = recall = PageRecall(keys, now_s, end_s, len(keys), over=not pays, came_s=now_s)
        if pays:
            self._ask(recall, keys, now_s)
        return pays

    def _ask(self, recall: PageRecall, keys: Sequence[bytes], now_s: float) -> None:
        recall.asked_s = now_s
        self._run.store.recall(keys)

    def late(self, recall: PageRecall) -> int | None:
        """Return the number of pages that had not arrived when the recall ended, or None while it is in
        progress.

        Raises StoreUnavailable, which also ends the recall.
        """
        now_s = self._waited_s = time.monotonic()
        if now_s - max(recall.asked_s, recall.looked_s) < _LOOK_S:
            return None
        recall.looked_s = now_s
        try:
            missing = self.on_disk(recall.keys)
            if len(missing) < recall.left:
                recall.left, recall.came_s = len(missing), now_s
            patience_s = self._run.config.store.background_timeout_s
            if missing and now_s < min(recall.end_s, recall.came_s + patience_s):
                if now_s - recall.asked_s > _AGAIN_S:
                    self._ask(recall, missing, now_s)
                return None
        except StoreUnavailable:
            recall.over = True
            raise
        recall.over = True
        # If no page arrived, record that one page takes at least the time that has passed.
        self._costs.recalled(max(1, len(recall.keys) - len(missing)), now_s - recall.began_s)
        return len(missing)
