"""Batch latency: seconds = fixed + per token * tokens, by least squares with exponential forgetting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_FORGET: Final = 0.9
"""Weight of the past at each new batch, so that about ten batches count."""
_WARM_UP: Final = 2
"""Number of first batches, which allocate and compile. They count only until there are later batches."""
_SURPRISE: Final = 3.0
"""A batch slower than this many times its prediction, and than this many usual batches, counts as this many:
an
outlier moves little, a tower that has become slow is followed within a few batches."""


@dataclass(slots=True)
class BatchLatencyModel:
    """Latency of one tower's batches. Not thread-safe."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    """Seconds per token."""
    batches: int = 0
    _n: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    @property
    def measured(self) -> bool:
        return self.batches > 0

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a batch of `tokens` that took `seconds`."""
        if tokens <= 0:
            return
        self.batches += 1
        if self.batches <= _WARM_UP + 1:
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
        """Return the predicted seconds of a batch with this number of tokens, 0 before the first
        observation."""
        return self.fixed_s + self.token_s * tokens

    def tokens_within(self, seconds: float) -> float:
        """Most tokens of a batch that ends within `seconds`; inf before the first observation.

        Never so few that the fixed cost is over a fifth of the batch.
        """
        if self.token_s <= 0:
            return float("inf")
        return max(4 * self.fixed_s, seconds - self.fixed_s) / self.token_s

    def _fit(self) -> None:
        spread = self._n * self._xx - self._x * self._x
        # Batches of one size tell a sum and not its parts: all of it goes to the tokens.
        self.token_s = self._xy / self._xx
        self.fixed_s = 0.0
        if spread > 1e-3 * self._x * self._x:
            slope = (self._n * self._xy - self._x * self._y) / spread
            start = (self._y - slope * self._x) / self._n
            if slope < 0:
                self.fixed_s, self.token_s = self._y / self._n, 0.0
            elif start >= 0:
                self.fixed_s, self.token_s = start, slope
