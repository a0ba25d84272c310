"""Circuit breaker for a slow store, with a pause that grows with each failure.

Without a circuit breaker, an engine would wait 0.1 s in every step for a store that does not reply in time.
Callers with longer deadlines may still get replies, so failures are counted separately for each binary order
of magnitude of the deadline.
"""

from __future__ import annotations

import math
from typing import Final

_PAUSES_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class CircuitBreaker:
    """Counts late replies by deadline, and rejects requests that would probably fail again. All times are of
    one monotonic clock. It is not thread-safe, so callers hold a lock."""

    def __init__(self) -> None:
        self._missed: dict[int, tuple[int, float]] = {}

    def refuses(self, deadline_s: float, now_s: float) -> bool:
        """Return whether a caller with this deadline should not send a request yet."""
        missed = self._missed.get(_kind(deadline_s))
        return missed is not None and now_s < missed[1]

    def missed(self, deadline_s: float, now_s: float) -> None:
        """Record that a reply was late."""
        kind = _kind(deadline_s)
        times, until_s = self._missed.get(kind, (0, 0.0))
        # Callers that waited at the same time count as one failure.
        if now_s >= until_s:
            pause_s = _PAUSES_S[min(times, len(_PAUSES_S) - 1)]
            self._missed[kind] = (times + 1, now_s + pause_s)

    def answered(self, deadline_s: float) -> None:
        """Record that a reply arrived in time."""
        if self._missed:
            self._missed.pop(_kind(deadline_s), None)


def _kind(deadline_s: float) -> int:
    return math.frexp(deadline_s)[1]
