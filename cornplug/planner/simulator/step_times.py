"""Durations of an engine's iterations on one replica. This module does not use profiles or the GPU table."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

ANY_CLASS: Final = "*"
"""Key of a rate that applies to every request class."""


@dataclass(frozen=True)
class PiecewiseCurve:
    """Piecewise linear curve with values of at least 0.

    It is extrapolated with its first and last segments. A single point defines a line through the origin.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        if (
            not self.x
            or len(self.x) != len(self.y)
            or any(b <= a for a, b in zip(self.x, self.x[1:], strict=False))
        ):
            raise ValueError("a curve needs points with ascending x, and one y for each")

    @classmethod
    def line(cls, base: float, slope: float) -> PiecewiseCurve:
        return cls((0.0, 1.0), (base, base + slope))

    @classmethod
    def from_points(cls, x: Sequence[float], y: Sequence[float]) -> PiecewiseCurve:
        return cls(tuple(map(float, x)), tuple(map(float, y)))

    def __call__(self, x: float) -> float:
        xs, ys = self.x, self.y
        if len(xs) == 1:
            return ys[0] * x / xs[0]
        # Search from index 1 to the last index, so that the first and last segments extend beyond the points.
        i = bisect_left(xs, x, 1, len(xs) - 1)
        x0, y0 = xs[i - 1], ys[i - 1]
        y = y0 + (ys[i] - y0) * (x - x0) / (xs[i] - x0)
        return y if y > 0.0 else 0.0

    def evaluate(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the curve's values for an array."""
        xs, ys = np.array(self.x), np.array(self.y)
        if len(xs) == 1:
            return np.asarray(x * (ys[0] / xs[0]), dtype=np.float64)
        i = np.clip(np.searchsorted(xs, x), 1, len(xs) - 1)
        slope = (ys[1:] - ys[:-1]) / (xs[1:] - xs[:-1])
        y: NDArray[np.float64] = np.maximum(ys[i - 1] + slope[i - 1] * (x - xs[i - 1]), 0.0)
        return y

    def scaled(self, factor: float) -> PiecewiseCurve:
        return PiecewiseCurve(self.x, tuple(v * factor for v in self.y))


@dataclass(frozen=True)
class GroupPrefill:
    """Prefill times of an attention-DP group if the other groups have fewer tokens."""

    shared: PiecewiseCurve
    """Time in seconds in which the groups compute experts together, including communication, by mean number
    of tokens of all groups. This time is part of `EngineStepTimes.prefill`."""
    isolated: PiecewiseCurve
    """Time in seconds of an iteration by number of prompt tokens, if the other groups have no tokens."""

    def scaled(self, factor: float) -> GroupPrefill:
        return GroupPrefill(self.shared.scaled(factor), self.isolated.scaled(factor))


@dataclass(frozen=True)
class EngineStepTimes:
    """Durations of an engine's iterations on one replica (all TP ranks).

    With attention data parallelism, the durations apply to one group if every other group has as many tokens.
    """

    prefill: PiecewiseCurve
    """Time in seconds of an iteration by number of prompt tokens."""
    decode: PiecewiseCurve
    """Time in seconds of an iteration by number of requests, each of which gets one token."""
    kv_token_s: float = 0.0
    mixed_factor: float = 1.0
    request_overhead_s: float = 0.0
    pipeline: int = 1
    """Number of pipeline-parallel stages. With several stages, `prefill` is the time between iterations (the
    time of one stage), so that rates are correct. A prompt's last tokens still pass through the other
    stages."""
    group: GroupPrefill | None = None
    """Prefill times of unequally loaded groups, or None without attention data parallelism."""

    @property
    def isolated_prefill(self) -> PiecewiseCurve:
        """Prefill times if the other attention-DP groups have no tokens. Without groups, this is
        `prefill`."""
        return self.prefill if self.group is None else self.group.isolated

    def drain_s(self, prompt_tokens: int) -> float:
        """Return the time in seconds from the end of a prompt's last iteration to its first token.

        `prompt_tokens` is the number of prompt tokens in the last iteration.
        """
        return (self.pipeline - 1) * self.prefill(prompt_tokens) if self.pipeline > 1 else 0.0

    def step_s(
        self, prompt_tokens: int, requests: int, kv_tokens: int = 0, *, mean: float | None = None
    ) -> float:
        """Return the time in seconds of an iteration with prompt tokens and decoding requests, or 0 if it is
        empty.

        `kv_tokens` is the context of the decoding requests. `mean` is the mean number of prompt tokens and
        requests per attention-DP group.
        """
        decode = self.decode(requests) + self.kv_token_s * kv_tokens if requests else 0.0
        if not prompt_tokens:
            return decode
        if not requests:
            return self._prefill_s(prompt_tokens, mean)
        return max(self._prefill_s(prompt_tokens + requests, mean), decode) * self.mixed_factor

    def _prefill_s(self, tokens: int, mean: float | None) -> float:
        if self.group is None or mean is None:
            return self.prefill(tokens)
        return in_group_s(self.prefill, self.group.shared, tokens, mean)

    def corrected(self, prefill: float, decode: float) -> EngineStepTimes:
        """Return the times, multiplied by one factor for prefill and one for decode."""
        return replace(
            self,
            prefill=self.prefill.scaled(prefill),
            decode=self.decode.scaled(decode),
            kv_token_s=self.kv_token_s * decode,
            group=self.group and self.group.scaled(prefill),
        )

    def scaled(self, factor: float) -> EngineStepTimes:
        """Return the times of a slower replica (factor > 1). The overhead per request does not change."""
        return self.corrected(factor, factor)


def in_group_s(prefill: PiecewiseCurve, shared: PiecewiseCurve, tokens: float, mean: float) -> float:
    """Return the time in seconds of a group's iteration with `tokens` tokens, if the mean over all groups is
    `mean`.

    The result is at least the time of an iteration with `mean` tokens in each group, because weights are read
    for any number of tokens.
    """
    return max(prefill(tokens) - shared(tokens) + shared(mean), prefill(mean))


@dataclass(frozen=True)
class CellHardware:
    """Times and memory of a cell's replica. Times of tasks that the replica does not have are None."""

    steps: EngineStepTimes | None = None
    encode: PiecewiseCurve | None = None
    """Time in seconds to encode one batch, by number of patches."""
    generate: PiecewiseCurve | None = None
    """Time in seconds to generate a request's output, by number of units."""
    kv_tokens: int = 0
    """Number of tokens that fit into the KV cache. If `steps` is set, 0 means that the model itself does not
    fit."""
    requests_per_s: dict[str, float] = field(default_factory=dict)
    """Requests per second by "application/request" (or ANY), if only a throughput is known."""
    tpot_s: dict[str, float] = field(default_factory=dict)
    """Seconds per token at this throughput by "application/request", if they are known."""
    source: str = ""
    """Source of the profile, for example "roofline (H100, 2026-11 table)" or "measured: ..."."""
    measured: bool = False

    def rate_of(self, demand: str) -> float | None:
        """Return the known throughput of a request class, or None."""
        return self.requests_per_s.get(demand, self.requests_per_s.get(ANY_CLASS))
