"""How long a tower pass takes, measured: seconds = a + b * tokens, by least squares that forget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_FORGET: Final = 0.9
"""Weight of the past at each new pass: about ten passes count."""
_WARM_UP: Final = 2
"""First passes, which allocate and compile: believed only until there are others."""
_SURPRISE: Final = 3.0
"""A pass slower than this many times the expected, and than this many usual ones, counts as this many: a
hiccup moves little, a tower that has become slow is followed within a few passes."""


@dataclass(slots=True)
class PassTime:
    """Of one tower. Not thread-safe."""

    a_s: float = 0.0
    b_s: float = 0.0
    """Seconds a token."""
    passes: int = 0
    _n: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    @property
    def measured(self) -> bool:
        return self.passes > 0

    def observe(self, tokens: int, seconds: float) -> None:
        """A pass of `tokens` took `seconds`."""
        if tokens <= 0:
            return
        self.passes += 1
        if self.passes <= _WARM_UP + 1:
            self._n = self._x = self._y = self._xx = self._xy = 0.0
        else:
            seconds = min(seconds, _SURPRISE * max(self.seconds(tokens), self._y / self._n))
        self._n = _FORGET * self._n + 1
        self._x = _FORGET * self._x + tokens
        self._y = _FORGET * self._y + seconds
        self._xx = _FORGET * self._xx + tokens * tokens
        self._xy = _FORGET * self._xy + tokens * seconds
        self._fit()

    def seconds(self, tokens: float) -> float:
        """Expected for a pass of so many tokens; 0 before anything was measured."""
        return self.a_s + self.b_s * tokens

    def tokens_within(self, seconds: float) -> float:
        """How many tokens a pass may have to end within `seconds`, but never so few that its fixed cost
        is over a fifth of it; infinite before anything was measured."""
        if self.b_s <= 0:
            return float("inf")
        return max(4 * self.a_s, seconds - self.a_s) / self.b_s

    def _fit(self) -> None:
        spread = self._n * self._xx - self._x * self._x
        # Passes of one size tell a sum and not its parts: all of it goes to the tokens.
        self.b_s = self._xy / self._xx
        self.a_s = 0.0
        if spread > 1e-3 * self._x * self._x:
            slope = (self._n * self._xy - self._x * self._y) / spread
            start = (self._y - slope * self._x) / self._n
            if slope < 0:
                self.a_s, self.b_s = self._y / self._n, 0.0
            elif start >= 0:
                self.a_s, self.b_s = start, slope
