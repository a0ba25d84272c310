"""Keys to look up in one far store, one lookup at a time, the callers that wait for the results, and keys
that were absent recently."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Final

MAX_PENDING_KEYS: Final = 8192
"""Maximum number of keys that wait for a lookup. If there are more, new keys are dropped."""
_MAX_CALLERS: Final = 8192
"""Maximum number of callers that wait for a notification. If there are more, the oldest callers are not
notified, and wait until their time limit."""


class FarLookupQueue:
    """Queue of keys to look up, in the order of arrival. Used only by the daemon's loop."""

    def __init__(self) -> None:
        self._pending: OrderedDict[bytes, None] = OrderedDict()
        self._in_progress: set[bytes] = set()
        """Keys of the lookup in progress."""
        self._added = self._started = self._completed = 0
        """Total number of keys that were added, that were taken for a lookup, and whose lookup is complete,
        respectively."""
        self._callers: deque[tuple[int, Callable[[], None]]] = deque()
        """Functions to call, each with the value of `_added` when the function was registered."""

    def __len__(self) -> int:
        """Return the number of keys that wait for a lookup."""
        return len(self._pending)

    def __contains__(self, key: bytes) -> bool:
        """Return whether this key waits for a lookup, or is part of the lookup in progress."""
        return key in self._pending or key in self._in_progress

    def add(self, key: bytes) -> bool:
        """Add a new key. Return False if the queue is full."""
        if len(self._pending) >= MAX_PENDING_KEYS:
            return False
        self._pending[key] = None
        self._added += 1
        return True

    def notify_when_done(self, on_done: Callable[[], None]) -> None:
        """Call `on_done` when all keys added so far have been looked up or abandoned, or immediately if
        this is already the case."""
        self._callers.append((self._added, on_done))
        if len(self._callers) > _MAX_CALLERS:
            self._callers.popleft()
        self._notify_callers()

    def take_batch(self, max_keys: int) -> list[bytes]:
        """Remove and return at most `max_keys` keys for the next lookup. Call this when no lookup is in
        progress."""
        keys = pop_first(self._pending, max_keys)
        self._started += len(keys)
        self._in_progress.update(keys)
        return keys

    def finish_batch(self) -> None:
        """Mark the last lookup as complete or failed."""
        self._completed = self._started
        self._in_progress.clear()
        self._notify_callers()

    def clear(self) -> None:
        """Drop all queued keys, and abandon the lookup in progress."""
        self._pending.clear()
        self._in_progress.clear()
        self._completed = self._started = self._added
        self._notify_callers()

    def _notify_callers(self) -> None:
        while self._callers and self._callers[0][0] <= self._completed:
            self._callers.popleft()[1]()


class RecentKeys:
    """Set of the `max_keys` newest keys, each of which is remembered for `ttl_s`. Not thread-safe."""

    def __init__(self, *, ttl_s: float, max_keys: int) -> None:
        self._ttl_s, self._max_keys = ttl_s, max_keys
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def is_recent(self, key: bytes, now_s: float) -> bool:
        """Return whether a key is recent."""
        return self._until_s.get(key, now_s) > now_s

    def add(self, keys: Iterable[bytes], now_s: float) -> None:
        """Mark these keys as recent."""
        for key in keys:
            self._until_s[key] = now_s + self._ttl_s
            self._until_s.move_to_end(key)
        while self._until_s and (
            len(self._until_s) > self._max_keys or next(iter(self._until_s.values())) <= now_s
        ):
            self._until_s.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """Remove a key."""
        self._until_s.pop(key, None)


def pop_first(keys: OrderedDict[bytes, None], max_keys: int) -> list[bytes]:
    """Remove and return the first `max_keys` keys."""
    return [keys.popitem(last=False)[0] for _ in range(min(len(keys), max_keys))]
