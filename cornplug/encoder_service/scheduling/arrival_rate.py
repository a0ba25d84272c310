"""How much keeps coming in, by class: tokens a second of those let in, by a mean that forgets. Pure."""

from __future__ import annotations

import math
from typing import Final

from cornplug.qos import ServiceClass

_FORGET_S: Final = 2.0
_LEAST_S: Final = 0.05
"""Before so much time has passed, a rate would be a guess."""


class ArrivalRate:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._counted: dict[ServiceClass, tuple[float, float]] = {}
        """Tokens, fading, and when they were counted."""

    def count(self, qos: ServiceClass, tokens: int, now_s: float) -> None:
        """Something was let in."""
        if self._began_s is None:
            self._began_s = now_s
        self._counted[qos] = self._faded(qos, now_s) + tokens, now_s

    def tokens_a_second(self, now_s: float) -> dict[ServiceClass, float]:
        """Of each class that anything has come from."""
        if self._began_s is None:
            return {}
        age_s = max(_LEAST_S, now_s - self._began_s)
        # What a mean of so short a past weighs together, so that a young one is no smaller.
        weight_s = _FORGET_S * -math.expm1(-age_s / _FORGET_S)
        return {qos: self._faded(qos, now_s) / weight_s for qos in self._counted}

    def _faded(self, qos: ServiceClass, now_s: float) -> float:
        tokens, then_s = self._counted.get(qos, (0.0, now_s))
        return tokens * math.exp((then_s - now_s) / _FORGET_S)
