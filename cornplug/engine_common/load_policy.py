"""Rules that decide whether loading is faster than computing, from this engine's own measurements.

The rules use no configured or assumed speeds. A load without a recent measurement is tried, in order to
measure it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, Literal

from cornplug.store.payload import FAR_WAIT_S

When = Literal["pays", "always"]

DEADLINE_FLOOR_S: Final = 0.5
"""Minimum seconds that an engine waits for an embedding from a service, even if its own tower is faster."""
_FADE: Final = 0.9
"""Factor by which the weight of each sample decreases per new sample, so that about ten samples count."""
_FRESH_S: Final = 60.0
"""Seconds after which measurements of loads expire, so that slow loads are tried again."""
_TALK_S: Final = 60.0
_FAR_SHARE: Final = 0.05
_FAR_MOST_S: Final = 0.05


class FadedRate:
    """Average seconds per unit of work over recent samples, as a ratio of decayed sums. Large samples have
    more weight."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._units = self._seconds = 0.0
        self._at = -math.inf

    def note(self, units: float, seconds: float) -> None:
        """Add a sample: a number of units of work, and the seconds that they took."""
        if units > 0 and seconds >= 0:
            self._units = self._units * _FADE + units
            self._seconds = self._seconds * _FADE + seconds
            self._at = self._clock()

    def seconds(self, units: float, *, fresh_s: float = math.inf) -> float | None:
        """Return the estimated seconds for `units` units of work, or None if nothing was measured in the last
        `fresh_s` seconds."""
        if not self._units or self._clock() - self._at > fresh_s:
            return None
        return self._seconds / self._units * units

    def per_second(self) -> float:
        """Return the measured number of units of work per second, or 0 if nothing was measured."""
        return self._units / self._seconds if self._seconds else 0.0


class StepSlope:
    """Estimates the time that one more token adds to an engine's step: the slope of seconds over tokens.

    Each step also has a fixed cost, such as reading the weights, so the plain ratio of seconds to tokens
    would overestimate the time for short prompts. The ratio is used only if all steps had a similar number of
    tokens or if noise hides the slope.
    """

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Add a measured step: its number of tokens, and its duration in seconds."""
        if tokens <= 0 or seconds <= 0:
            return
        self._n, self._x, self._y = self._n * _FADE + 1, self._x * _FADE + tokens, self._y * _FADE + seconds
        self._xx, self._xy = self._xx * _FADE + tokens * tokens, self._xy * _FADE + tokens * seconds

    def seconds(self, tokens: int) -> float | None:
        """Return the estimated seconds to compute `tokens` more tokens, or None if no step was measured."""
        if not self._x:
            return None
        ratio = self._y / self._x
        spread = self._n * self._xx - self._x * self._x
        if spread <= 0.01 * self._x * self._x:
            return ratio * tokens
        slope = (self._n * self._xy - self._x * self._y) / spread
        return (slope if 0 < slope < ratio else ratio) * tokens


class LoadRule:
    """Decides whether loading a prefix from the store is faster than computing it. Used by one thread."""

    def __init__(self, when: When, clock: Callable[[], float] = time.monotonic) -> None:
        self._when = when
        self._clock = clock
        self._moving = FadedRate(clock)
        self._noticing = FadedRate(clock)
        self._prefill = StepSlope()
        self._said_at = -math.inf

    def computed(self, tokens: int, seconds: float) -> None:
        """Record a measured step of the engine: its number of tokens, and its duration in seconds."""
        self._prefill.note(tokens, seconds)

    def moved(self, size_bytes: int, seconds: float) -> None:
        """Record a measured transfer of KV from the store: its number of bytes, and its duration in
        seconds."""
        self._moving.note(size_bytes, seconds)

    def noticed(self, seconds: float) -> None:
        """Record how many seconds a load took in addition to its transfer, because it waited for the engine's
        steps."""
        self._noticing.note(1, max(0.0, seconds))

    def pays(self, *, tokens: int, size_bytes: int, queued_bytes: int, first_s: float = 0.0) -> bool:
        """Return whether loading `tokens` tokens is faster than computing them. The tokens' pages have
        `size_bytes` bytes. The load starts after `queued_bytes` bytes of other loads and `first_s` seconds of
        disk reads."""
        load_s, compute_s = self.load_s(size_bytes + queued_bytes), self.compute_s(tokens)
        if self._when == "always" or compute_s is None or (load_s is None and not first_s):
            return True
        return first_s + (load_s or 0.0) < compute_s

    def load_s(self, size_bytes: int) -> float | None:
        """Return the estimated seconds to load `size_bytes` bytes, or None if no load was measured
        recently."""
        moving = self._moving.seconds(size_bytes, fresh_s=_FRESH_S)
        return None if moving is None else moving + (self._noticing.seconds(1) or 0.0)

    def compute_s(self, tokens: int) -> float | None:
        """Return the estimated seconds to compute `tokens` tokens, or None if no step was measured."""
        return self._prefill.seconds(tokens)

    def far_wait_s(self, tokens: int) -> float:
        """Return the maximum seconds that a request waits for far stores (remote storage) to report whether
        they hold `tokens` missing tokens. This is a twentieth of the time to compute the tokens, within
        bounds. Without a measurement, it is the upper bound."""
        compute_s = self.compute_s(tokens)
        if compute_s is None:
            return _FAR_MOST_S
        return min(_FAR_MOST_S, max(FAR_WAIT_S, _FAR_SHARE * compute_s))

    def news(self, bytes_a_token: float) -> str:
        """Return a log message about the measured speeds, at most once a minute, or "" if there is nothing to
        report. `bytes_a_token` is the KV size per token in bytes."""
        token_s = self.compute_s(1)
        if token_s is None or not self._moving.per_second() or self._clock() < self._said_at + _TALK_S:
            return ""
        self._said_at = self._clock()
        notice_s = self._noticing.seconds(1) or 0.0
        gain_s = token_s - bytes_a_token / self._moving.per_second()
        least = (
            f"is faster than prefill from {math.ceil(notice_s / gain_s)} tokens"
            if gain_s > 0
            else "is not faster than prefill"
        )
        return (
            f"measured: KV loads at {self._moving.per_second() / 1e9:.2f} GB/s and is available after "
            f"{notice_s * 1e3:.1f} ms; prefill at {1 / token_s if token_s else math.inf:.0f} tokens/s: a "
            f"load {least}" + (" (store.load_when is always)" if self._when == "always" else "")
        )


class FetchRule:
    """Decides whether fetching an embedding is faster than encoding it, and how long to wait for an encoder
    service. Used by one thread."""

    def __init__(self, when: When, clock: Callable[[], float] = time.monotonic) -> None:
        self._when = when
        self._reading = FadedRate(clock)
        self._copying = FadedRate(clock)
        self._encoding = FadedRate(clock)

    def read(self, size_bytes: int, seconds: float) -> None:
        """Record that reading an embedding of `size_bytes` bytes from the store took `seconds`."""
        self._reading.note(size_bytes, seconds)

    def copied(self, size_bytes: int, seconds: float) -> None:
        """Record that copying `size_bytes` bytes of embeddings into the engine's cache took `seconds`."""
        self._copying.note(size_bytes, seconds)

    def encoded(self, rows: int, seconds: float) -> None:
        """Record that this engine's tower took `seconds` to encode `rows` rows."""
        self._encoding.note(rows, seconds)

    def pays(self, *, rows: int, size_bytes: int) -> bool:
        """Return whether reading a stored embedding is faster than encoding it. True if the speed of either
        is unknown."""
        fetch_s, encode_s = self._reading.seconds(size_bytes, fresh_s=_FRESH_S), self.encode_s(rows)
        if self._when == "always" or fetch_s is None or encode_s is None:
            return True
        return fetch_s + (self._copying.seconds(size_bytes) or 0.0) < encode_s

    def encode_s(self, rows: int) -> float | None:
        """Return the estimated seconds for this engine's tower to encode `rows` rows, or None if it has not
        run yet."""
        return self._encoding.seconds(rows)

    def encode_deadline_s(self, rows: int, *, ceiling_s: float) -> float:
        """Return the maximum seconds to wait for a service to encode `rows` rows."""
        return encode_deadline_s(self._when, self.encode_s(rows), ceiling_s=ceiling_s)


def encode_deadline_s(when: When, encode_s: float | None, *, ceiling_s: float) -> float:
    """Return the maximum seconds to wait for a service's reply. This is three times the engine's own encode
    time `encode_s`, at least `DEADLINE_FLOOR_S` and at most `ceiling_s`.

    Returns `ceiling_s` if the engine's encode time is unknown (None), or if the engine always loads.
    """
    if when == "always" or encode_s is None:
        return ceiling_s
    return min(ceiling_s, max(DEADLINE_FLOOR_S, 3 * encode_s))
