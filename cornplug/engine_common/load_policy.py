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

LoadWhen = Literal["pays", "always"]

MIN_DEADLINE_S: Final = 0.5
"""Minimum seconds that an engine waits for an embedding from a service, even if its own tower is faster."""
_DECAY: Final = 0.9
"""Factor by which the weight of each sample decreases per new sample, so that about ten samples count."""
_MAX_AGE_S: Final = 60.0
"""Seconds after which measurements of loads expire, so that slow loads are tried again."""
_REPORT_INTERVAL_S: Final = 60.0
_FAR_WAIT_SHARE: Final = 0.05
_MAX_FAR_WAIT_S: Final = 0.05


class EwmaRate:
    """Average seconds per unit of work over recent samples, as a ratio of decayed sums. Large samples have
    more weight."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._units = self._seconds = 0.0
        self._sampled_at_s = -math.inf

    def add_sample(self, units: float, seconds: float) -> None:
        """Add a sample: a number of units of work, and the seconds that they took."""
        if units > 0 and seconds >= 0:
            self._units = self._units * _DECAY + units
            self._seconds = self._seconds * _DECAY + seconds
            self._sampled_at_s = self._clock()

    def estimate_s(self, units: float, *, max_age_s: float = math.inf) -> float | None:
        """Return the estimated seconds for `units` units of work, or None if nothing was measured in the last
        `max_age_s` seconds."""
        if not self._units or self._clock() - self._sampled_at_s > max_age_s:
            return None
        return self._seconds / self._units * units

    def units_per_second(self) -> float:
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

    def add_step(self, tokens: int, seconds: float) -> None:
        """Add a measured step: its number of tokens, and its duration in seconds."""
        if tokens <= 0 or seconds <= 0:
            return
        self._n, self._x, self._y = (
            self._n * _DECAY + 1,
            self._x * _DECAY + tokens,
            self._y * _DECAY + seconds,
        )
        self._xx, self._xy = self._xx * _DECAY + tokens * tokens, self._xy * _DECAY + tokens * seconds

    def estimate_s(self, tokens: int) -> float | None:
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

    def __init__(self, when: LoadWhen, clock: Callable[[], float] = time.monotonic) -> None:
        self._when = when
        self._clock = clock
        self._transfer_rate = EwmaRate(clock)
        self._delay = EwmaRate(clock)
        self._step_slope = StepSlope()
        self._reported_at_s = -math.inf

    def record_step(self, tokens: int, seconds: float) -> None:
        """Record a measured step of the engine: its number of tokens, and its duration in seconds."""
        self._step_slope.add_step(tokens, seconds)

    def record_transfer(self, size_bytes: int, seconds: float) -> None:
        """Record a measured transfer of KV from the store: its number of bytes, and its duration in
        seconds."""
        self._transfer_rate.add_sample(size_bytes, seconds)

    def record_delay(self, seconds: float) -> None:
        """Record how many seconds a load took in addition to its transfer, because it waited for the engine's
        steps."""
        self._delay.add_sample(1, max(0.0, seconds))

    def should_load(self, *, tokens: int, size_bytes: int, queued_bytes: int, disk_s: float = 0.0) -> bool:
        """Return whether loading `tokens` tokens is faster than computing them. The tokens' pages have
        `size_bytes` bytes. The load starts after `queued_bytes` bytes of other loads and `disk_s` seconds of
        disk reads."""
        load_s, compute_s = self.load_s(size_bytes + queued_bytes), self.compute_s(tokens)
        if self._when == "always" or compute_s is None or (load_s is None and not disk_s):
            return True
        return disk_s + (load_s or 0.0) < compute_s

    def load_s(self, size_bytes: int) -> float | None:
        """Return the estimated seconds to load `size_bytes` bytes, or None if no load was measured
        recently."""
        moving = self._transfer_rate.estimate_s(size_bytes, max_age_s=_MAX_AGE_S)
        return None if moving is None else moving + (self._delay.estimate_s(1) or 0.0)

    def compute_s(self, tokens: int) -> float | None:
        """Return the estimated seconds to compute `tokens` tokens, or None if no step was measured."""
        return self._step_slope.estimate_s(tokens)

    def far_wait_s(self, tokens: int) -> float:
        """Return the maximum seconds that a request waits for far stores (remote storage) to report whether
        they hold `tokens` missing tokens. This is a twentieth of the time to compute the tokens, within
        bounds. Without a measurement, it is the upper bound."""
        compute_s = self.compute_s(tokens)
        if compute_s is None:
            return _MAX_FAR_WAIT_S
        return min(_MAX_FAR_WAIT_S, max(FAR_WAIT_S, _FAR_WAIT_SHARE * compute_s))

    def speed_report(self, token_bytes: float) -> str:
        """Return a log message about the measured speeds, at most once a minute, or "" if there is nothing to
        report. `token_bytes` is the KV size per token in bytes."""
        token_s = self.compute_s(1)
        if (
            token_s is None
            or not self._transfer_rate.units_per_second()
            or self._clock() < self._reported_at_s + _REPORT_INTERVAL_S
        ):
            return ""
        self._reported_at_s = self._clock()
        notice_s = self._delay.estimate_s(1) or 0.0
        gain_s = token_s - token_bytes / self._transfer_rate.units_per_second()
        least = (
            f"is faster than prefill from {math.ceil(notice_s / gain_s)} tokens"
            if gain_s > 0
            else "is not faster than prefill"
        )
        return (
            f"measured: KV loads at {self._transfer_rate.units_per_second() / 1e9:.2f} GB/s "
            "and is available after "
            f"{notice_s * 1e3:.1f} ms; prefill at {1 / token_s if token_s else math.inf:.0f} tokens/s: a "
            f"load {least}" + (" (store.load_when is always)" if self._when == "always" else "")
        )


class FetchRule:
    """Decides whether fetching an embedding is faster than encoding it, and how long to wait for an encoder
    service. Used by one thread."""

    def __init__(self, when: LoadWhen, clock: Callable[[], float] = time.monotonic) -> None:
        self._when = when
        self._read_rate = EwmaRate(clock)
        self._encode_rate = EwmaRate(clock)

    def record_read(self, size_bytes: int, seconds: float) -> None:
        """Record that reading `size_bytes` bytes of embeddings from the store took `seconds`."""
        self._read_rate.add_sample(size_bytes, seconds)

    def record_encode(self, rows: int, seconds: float) -> None:
        """Record that this engine's tower took `seconds` to encode `rows` rows."""
        self._encode_rate.add_sample(rows, seconds)

    def should_fetch(self, *, rows: int, size_bytes: int) -> bool:
        """Return whether reading a stored embedding is faster than encoding it. True if the speed of either
        is unknown."""
        fetch_s, encode_s = self._read_rate.estimate_s(size_bytes, max_age_s=_MAX_AGE_S), self.encode_s(rows)
        if self._when == "always" or fetch_s is None or encode_s is None:
            return True
        return fetch_s < encode_s

    def encode_s(self, rows: int) -> float | None:
        """Return the estimated seconds for this engine's tower to encode `rows` rows, or None if it has not
        run yet."""
        return self._encode_rate.estimate_s(rows)

    def encode_deadline_s(self, rows: int, *, ceiling_s: float) -> float:
        """Return the maximum seconds to wait for a service to encode `rows` rows."""
        return encode_deadline_s(self._when, self.encode_s(rows), ceiling_s=ceiling_s)


def encode_deadline_s(when: LoadWhen, encode_s: float | None, *, ceiling_s: float) -> float:
    """Return the maximum seconds to wait for a service's reply. This is three times the engine's own encode
    time `encode_s`, at least `MIN_DEADLINE_S` and at most `ceiling_s`.

    Returns `ceiling_s` if the engine's encode time is unknown (None), or if the engine always loads.
    """
    if when == "always" or encode_s is None:
        return ceiling_s
    return min(ceiling_s, max(MIN_DEADLINE_S, 3 * encode_s))
