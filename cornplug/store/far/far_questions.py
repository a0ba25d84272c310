"""Keys to look up in one far store, one lookup at a time, and the callers that wait for the results."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

MOST_ASKED: Final = 8192
"""Maximum number of keys that wait for a lookup. If there are more, new keys are dropped."""
_MOST_TOLD: Final = 8192
"""Maximum number of callers that wait for a notification. If there are more, the oldest callers are not
notified, and wait until their time limit."""


class FarQuestions:
    """Queue of keys to look up, in the order of arrival. Used only by the daemon's loop."""

    def __init__(self) -> None:
        self._wanted: OrderedDict[bytes, None] = OrderedDict()
        self._in_question: set[bytes] = set()
        """Keys of the lookup in progress."""
        self._added = self._taken = self._over = 0
        """Total number of keys that were added, that were taken for a lookup, and whose lookup is complete,
        respectively."""
        self._callers: deque[tuple[int, Callable[[], None]]] = deque()
        """Functions to call, each with the value of `_added` when the function was registered."""

    def __len__(self) -> int:
        """Return the number of keys that wait for a lookup."""
        return len(self._wanted)

    def __contains__(self, key: bytes) -> bool:
        """Return whether this key waits for a lookup, or is part of the lookup in progress."""
        return key in self._wanted or key in self._in_question

    def add(self, key: bytes) -> bool:
        """Add a new key. Return False if the queue is full."""
        if len(self._wanted) >= MOST_ASKED:
            return False
        self._wanted[key] = None
        self._added += 1
        return True

    def tell(self, over: Callable[[], None]) -> None:
        """Call `over` when all keys added so far have been looked up or abandoned, or immediately if
        this is already the case."""
        self._callers.append((self._added, over))
        if len(self._callers) > _MOST_TOLD:
            self._callers.popleft()
        self._tell_callers()

    def take(self, most: int) -> list[bytes]:
        """Remove and return at most `most` keys for the next lookup. Call this when no lookup is in
        progress."""
        keys = taken(self._wanted, most)
        self._taken += len(keys)
        self._in_question.update(keys)
        return keys

    def end(self) -> None:
        """Mark the last lookup as complete or failed."""
        self._over = self._taken
        self._in_question.clear()
        self._tell_callers()

    def clear(self) -> None:
        """Abandon all keys, including those of a lookup in progress."""
        self._wanted.clear()
        self._in_question.clear()
        self._over = self._taken = self._added
        self._tell_callers()

    def _tell_callers(self) -> None:
        while self._callers and self._callers[0][0] <= self._over:
            self._callers.popleft()[1]()


def taken(keys: OrderedDict[bytes, None], most: int) -> list[bytes]:
    """Remove and return the first `most` keys."""
    return [keys.popitem(last=False)[0] for _ in range(min(len(keys), most))]
