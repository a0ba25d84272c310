"""Keys that one far store is to be asked for, one question at a time, and the callers that wait for that."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

MOST_ASKED: Final = 8192
"""Keys that wait for a question; of more the newest are not asked for."""
_MOST_TOLD: Final = 8192
"""Callers that are told; of more the oldest are not, and wait out their time."""


class FarQuestions:
    """Used by the daemon's loop alone. Keys are asked for in the order in which they came."""

    def __init__(self) -> None:
        self._wanted: OrderedDict[bytes, None] = OrderedDict()
        self._in_question: set[bytes] = set()
        """Keys of the question under way."""
        self._added = self._taken = self._over = 0
        """Keys so far: that came, that are in a question, that no answer will come for any more."""
        self._callers: deque[tuple[int, Callable[[], None]]] = deque()
        """Each with the keys that came until its own last one."""

    def __len__(self) -> int:
        """Keys that are in no question yet."""
        return len(self._wanted)

    def __contains__(self, key: bytes) -> bool:
        """Whether this key waits for a question, or is in the one under way."""
        return key in self._wanted or key in self._in_question

    def add(self, key: bytes) -> bool:
        """Whether there is room for this key, which is not here yet."""
        if len(self._wanted) >= MOST_ASKED:
            return False
        self._wanted[key] = None
        self._added += 1
        return True

    def tell(self, over: Callable[[], None]) -> None:
        """Call `over` once all keys that came until now are answered or given up; at once where they are."""
        self._callers.append((self._added, over))
        if len(self._callers) > _MOST_TOLD:
            self._callers.popleft()
        self._tell_callers()

    def take(self, most: int) -> list[bytes]:
        """The keys of the next question: it is asked once the one before is over."""
        keys = taken(self._wanted, most)
        self._taken += len(keys)
        self._in_question.update(keys)
        return keys

    def end(self) -> None:
        """The last question is answered, or has failed."""
        self._over = self._taken
        self._in_question.clear()
        self._tell_callers()

    def clear(self) -> None:
        """Give up all keys, those of a question under way too."""
        self._wanted.clear()
        self._in_question.clear()
        self._over = self._taken = self._added
        self._tell_callers()

    def _tell_callers(self) -> None:
        while self._callers and self._callers[0][0] <= self._over:
            self._callers.popleft()[1]()


def taken(keys: OrderedDict[bytes, None], most: int) -> list[bytes]:
    """The first ones, which are then no longer in `keys`."""
    return [keys.popitem(last=False)[0] for _ in range(min(len(keys), most))]
