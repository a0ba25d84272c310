"""Reads of a request's pages from disk or far stores, while vLLM continues with other requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import StoreUnavailable
from cornplug.store.base import FarReads, Tier, TieredReads
from cornplug.vllm_connector.kv.costs import LoadCosts

if TYPE_CHECKING:
    from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest

_LOOK_S: Final = 1e-3
"""Interval between checks of the table. vLLM polls once per step, and idle steps are short."""
_AGAIN_S: Final = 0.05
"""Interval between repeated recalls of missing pages. The store reads only a part of a long prompt at a
time."""


_WAITED_S: Final = 0.05
"""Time after which a waiting request that did not poll again counts as aborted."""


@dataclass(slots=True)
class PageRecall:
    """Recall of a request's pages. A request has at most one."""

    keys: Sequence[bytes]
    """Keys of pages on disk."""
    began_s: float
    end_s: float
    """Time after which the rest is computed."""
    left: int
    """Number of pages that have not arrived."""
    over: bool = False
    came_s: float = 0.0
    """Time when `left` last decreased."""
    asked_s: float = 0.0
    looked_s: float = 0.0


@dataclass(slots=True)
class FarQuestion:
    """Query of a request to far stores for its absent pages. A request has at most one."""

    ticket: int
    end_s: float
    """Time after which the request continues without all replies."""


class PageRecalls:
    """Recalls of one scheduler half. Used by the engine's thread. Only recalls send messages."""

    def __init__(self, runtime: EngineRuntime, costs: LoadCosts) -> None:
        self._run, self._costs = runtime, costs
        self._waited_s = -1.0
        """Time when a request last had to wait."""
        self.tiered = runtime.store if isinstance(runtime.store, TieredReads) else None
        self.far = runtime.store if isinstance(runtime.store, FarReads) else None

    @property
    def has_disk(self) -> bool:
        """Whether pages can be on disk only."""
        return self.tiered is not None and self.tiered.has_disk

    @property
    def waited_for(self) -> bool:
        """Whether a request waits for pages. vLLM polls this in every step."""
        return time.monotonic() - self._waited_s < _WAITED_S

    @property
    def far_answers(self) -> bool:
        """Whether a far store can be queried for absent pages."""
        return self.far is not None and self.far.far_answers

    def seek(self, keys: Sequence[bytes], *, tokens: int) -> FarQuestion | None:
        """Query far stores for these absent pages, the first of `tokens` absent tokens. Returns None
        if a recent reply exists or if no far store replies. Raises StoreUnavailable."""
        ticket = 0 if self.far is None else self.far.seek(keys)
        if not ticket:
            return None
        now_s = self._waited_s = time.monotonic()
        return FarQuestion(ticket, now_s + self._costs.far_wait_s(tokens))

    def awaits(self, question: FarQuestion) -> bool:
        """Return whether a reply may still arrive in time. A far store is queried for a few pages of a long
        prompt at a time, so finding the first pages does not end the wait. Sends no message."""
        now_s = time.monotonic()
        if now_s >= question.end_s or self.far is None or self.far.answered(question.ticket):
            return False
        self._waited_s = now_s
        return True

    def there(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        """Return a nonzero byte for each key that the store has in memory or on disk. Raises
        StoreUnavailable."""
        if self.tiered is None:
            return self._run.store.contains(keys, deadline_s=deadline_s)
        return self.tiered.tiers(keys, deadline_s=deadline_s)

    def on_disk(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that are only on disk. Raises StoreUnavailable."""
        tiers = self.there(keys, deadline_s=self._run.config.store.deadline_s)
        return [key for key, tier in zip(keys, tiers, strict=True) if tier == Tier.DISK]

    def begin(self, tracked: TrackedRequest, keys: Sequence[bytes], *, tokens: int, pages: int) -> bool:
        """Recall these pages, which are the part of `pages` on disk with `tokens` tokens, if that is faster
        than computing them. A request has at most one recall. Raises StoreUnavailable."""
        now_s = time.monotonic()
        pays = self._costs.recall_pays(tokens=tokens, pages=pages, on_disk=len(keys))
        end_s = now_s + self._costs.deadline_s(tokens)
        tracked.recall = recall = PageRecall(keys, now_s, end_s, len(keys), over=not pays, came_s=now_s)
        if pays:
            self._ask(recall, keys, now_s)
        return pays

    def _ask(self, recall: PageRecall, keys: Sequence[bytes], now_s: float) -> None:
        assert self.tiered is not None
        recall.asked_s = now_s
        self.tiered.recall(keys)

    def late(self, recall: PageRecall) -> int | None:
        """Return the number of missing pages of a finished recall, or None while it is in progress.

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
        # If no page arrived, a single page takes at least that long.
        self._costs.recalled(max(1, len(recall.keys) - len(missing)), now_s - recall.began_s)
        return len(missing)
