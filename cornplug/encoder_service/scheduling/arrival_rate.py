"""Arrival rate by class: tokens a second of admitted requests, as an exponentially weighted mean."""

from __future__ import annotations

import math
from typing import Final

from cornplug.qos import ServiceClass

_FORGET_S: Final = 2.0
_MIN_AGE_S: Final = 0.05
"""Minimum time over which a rate is measured."""


class ArrivalRate:
    """Tokens a second by class. Not thread-safe."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._counted: dict[ServiceClass, tuple[float, float]] = {}
        """By class: tokens, decayed to the time at which they were last counted, and that time."""

    def count(self, qos: ServiceClass, tokens: int, now_s: float) -> None:
        """Count an admitted request."""
        if self._began_s is None:
            self._began_s = now_s
        self._counted[qos] = self._faded(qos, now_s) + tokens, now_s

    def tokens_a_second(self, now_s: float) -> dict[ServiceClass, float]:
        """Return the rate of each class that has sent a request."""
        if self._began_s is None:
            return {}
        age_s = max(_MIN_AGE_S, now_s - self._began_s)
        # The weights of so short a past sum to less: normalise, or a young rate would be too small.
        weight_s = _FORGET_S * -math.expm1(-age_s / _FORGET_S)
        return {qos: self._faded(qos, now_s) / weight_s for qos in self._counted}

    def _faded(self, qos: ServiceClass, now_s: float) -> float:
        tokens, then_s = self._counted.get(qos, (0.0, now_s))
        return tokens * math.exp((then_s - now_s) / _FORGET_S)
