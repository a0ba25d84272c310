"""Whether a store that has been slow is asked again: not before a pause that grows.

A caller that waits 0.1 s for nothing at every step is worse off than without a store. A caller that waits
longer may still be served, so each length of deadline has its own count.
"""

from __future__ import annotations

import math
from typing import Final

_PAUSES_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class CircuitBreaker:
    """Times are of one monotonic clock. Not thread-safe: its owner calls under a lock."""

    def __init__(self) -> None:
        self._missed: dict[int, tuple[int, float]] = {}

    def refuses(self, deadline_s: float, now_s: float) -> bool:
        """Whether a caller with this deadline should not ask yet."""
        missed = self._missed.get(_kind(deadline_s))
        return missed is not None and now_s < missed[1]

    def missed(self, deadline_s: float, now_s: float) -> None:
        """An answer did not come in time."""
        kind = _kind(deadline_s)
        times, until_s = self._missed.get(kind, (0, 0.0))
        # Those that waited together were disappointed together: one failure.
        if now_s >= until_s:
            pause_s = _PAUSES_S[min(times, len(_PAUSES_S) - 1)]
            self._missed[kind] = (times + 1, now_s + pause_s)

    def answered(self, deadline_s: float) -> None:
        """An answer came in time."""
        if self._missed:
            self._missed.pop(_kind(deadline_s), None)


def _kind(deadline_s: float) -> int:
    return math.frexp(deadline_s)[1]
