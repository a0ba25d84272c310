"""Items by the time at which they end, in buckets, so that one taken back early leaves nothing behind.

A heap would keep each released lease until its time: at 50,000 leases a second, a million of them.
"""

from __future__ import annotations

import heapq
import math
from typing import Final, Generic, TypeVar

BUCKET_S: Final = 1 / 32
"""How much later than asked an item may end."""

T = TypeVar("T")


class ExpiryBuckets(Generic[T]):
    """Items that end at a time, in the same seconds as the caller's `now_s`."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[T, None]] = {}
        # Each number once, for as long as its time has not come: also when its bucket is empty again.
        self._order: list[int] = []
        self._known: set[int] = set()

    def add(self, item: T, at_s: float) -> int:
        """Let `item` end at `at_s`; the bucket to name when it is taken back."""
        number = math.ceil(at_s / BUCKET_S)
        if number not in self._known:
            self._known.add(number)
            heapq.heappush(self._order, number)
        self._buckets.setdefault(number, {})[item] = None
        return number

    def discard(self, item: T, number: int) -> None:
        """Take back an item that may have ended already."""
        bucket = self._buckets.get(number)
        if bucket is None:
            return
        bucket.pop(item, None)
        if not bucket:
            del self._buckets[number]

    def due(self, now_s: float, limit: int) -> list[T]:
        """At most `limit` items whose time has come; they are forgotten here."""
        found: list[T] = []
        while self._order and self._order[0] * BUCKET_S <= now_s:
            bucket = self._buckets.get(self._order[0], {})
            while bucket and len(found) < limit:
                found.append(bucket.popitem()[0])
            if bucket:
                break
            number = heapq.heappop(self._order)
            self._known.discard(number)
            self._buckets.pop(number, None)
        return found

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))
