"""Pages of a request that are on disk or far: they are recalled while vLLM goes on with other requests."""

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
"""Between looks into the table. vLLM asks once a step, and idle steps are short."""
_AGAIN_S: Final = 0.05
"""Between recalls of pages that have not come: the store takes a part of a long prompt at once."""


_WAITED_S: Final = 0.05
"""After a request was told to wait: it waits still, unless it was aborted."""


@dataclass(slots=True)
class PageRecall:
    """The one recall of a request."""

    keys: Sequence[bytes]
    """Of pages on disk."""
    began_s: float
    end_s: float
    """When the rest is computed."""
    left: int
    """Pages that have not come."""
    over: bool = False
    came_s: float = 0.0
    """When `left` last fell."""
    asked_s: float = 0.0
    looked_s: float = 0.0


@dataclass(slots=True)
class FarQuestion:
    """The one question of a request to far stores: which of its absent pages they have."""

    ticket: int
    end_s: float
    """When the request goes on without all answers."""


class PageRecalls:
    """One per scheduler half; used by the engine's thread. Its calls cost no message but the recalls."""

    def __init__(self, runtime: EngineRuntime, costs: LoadCosts) -> None:
        self._run, self._costs = runtime, costs
        self._waited_s = -1.0
        """When a request was last told to wait."""
        self.tiered = runtime.store if isinstance(runtime.store, TieredReads) else None
        self.far = runtime.store if isinstance(runtime.store, FarReads) else None

    @property
    def has_disk(self) -> bool:
        """Whether pages can be on disk only."""
        return self.tiered is not None and self.tiered.has_disk

    @property
    def waited_for(self) -> bool:
        """Whether a request waits for pages: vLLM asks for it in every step."""
        return time.monotonic() - self._waited_s < _WAITED_S

    @property
    def far_answers(self) -> bool:
        """Whether a far store can be asked for absent pages."""
        return self.far is not None and self.far.far_answers

    def seek(self, keys: Sequence[bytes], *, tokens: int) -> FarQuestion | None:
        """Have far stores asked for these absent pages, the first of so many tokens. Returns None if the
        answer came a moment ago, or if no far store answers. Raises StoreUnavailable."""
        ticket = 0 if self.far is None else self.far.seek(keys)
        if not ticket:
            return None
        now_s = self._waited_s = time.monotonic()
        return FarQuestion(ticket, now_s + self._costs.far_wait_s(tokens))

    def awaits(self, question: FarQuestion) -> bool:
        """Whether an answer may still come in time. Of a long prompt a far store is asked for some pages at a
        time, so the first ones that were found do not end the wait. Costs no message."""
        now_s = time.monotonic()
        if now_s >= question.end_s or self.far is None or self.far.answered(question.ticket):
            return False
        self._waited_s = now_s
        return True

    def there(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        """Not 0 for each key that the store has, on disk or in memory. Raises StoreUnavailable."""
        if self.tiered is None:
            return self._run.store.contains(keys, deadline_s=deadline_s)
        return self.tiered.tiers(keys, deadline_s=deadline_s)

    def on_disk(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that are on disk only. Raises StoreUnavailable."""
        tiers = self.there(keys, deadline_s=self._run.config.store.deadline_s)
        return [key for key, tier in zip(keys, tiers, strict=True) if tier == Tier.DISK]

    def begin(self, tracked: TrackedRequest, keys: Sequence[bytes], *, tokens: int, pages: int) -> bool:
        """Recall these pages, the part on disk of `pages` with so many tokens, if that is quicker than to
        compute them. A request has one recall. Raises StoreUnavailable."""
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
        """How many pages of an ended recall have not come; None while it is under way.

        Raises StoreUnavailable: then it has ended.
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
        # Where nothing came, that took as long as one page does at least.
        self._costs.recalled(max(1, len(recall.keys) - len(missing)), now_s - recall.began_s)
        return len(missing)
