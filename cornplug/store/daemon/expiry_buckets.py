"""Items by expiry time, in buckets, so that an item that is removed early takes no more memory.

A heap would keep each released lease until its expiry time. At 50,000 leases per second, it would keep a
million leases.
"""

from __future__ import annotations

import heapq
import math
from typing import Final, Generic, TypeVar

BUCKET_S: Final = 1 / 32
"""Maximum delay of an expiry in seconds."""

T = TypeVar("T")


class ExpiryBuckets(Generic[T]):
    """Items with their expiry times, which are in seconds of the same clock as the caller's `now_s`."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[T, None]] = {}
        # Each bucket number is listed once until its expiry time, even if its bucket is empty again.
        self._order: list[int] = []
        self._known: set[int] = set()

    def add(self, item: T, at_s: float) -> int:
        """Let `item` expire at `at_s`, and return the bucket number to pass to `discard`."""
        number = math.ceil(at_s / BUCKET_S)
        if number not in self._known:
            self._known.add(number)
            heapq.heappush(self._order, number)
        self._buckets.setdefault(number, {})[item] = None
        return number

    def discard(self, item: T, number: int) -> None:
        """Remove an item, which may have expired already."""
        bucket = self._buckets.get(number)
        if bucket is None:
            return
        bucket.pop(item, None)
        if not bucket:
            del self._buckets[number]

    def due(self, now_s: float, limit: int) -> list[T]:
        """Remove and return at most `limit` expired items."""
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
