"""Duration of an engine's iterations on one replica, as numbers without a profile or a GPU table."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

ANY: Final = "*"
"""Key of a rate that applies to every request class."""


@dataclass(frozen=True)
class PiecewiseCurve:
    """Piecewise linear curve, extrapolated from the first and last segments, and never below 0.

    A single point defines a line through the origin.
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
    def through(cls, x: Sequence[float], y: Sequence[float]) -> PiecewiseCurve:
        return cls(tuple(map(float, x)), tuple(map(float, y)))

    def __call__(self, x: float) -> float:
        xs, ys = self.x, self.y
        if len(xs) == 1:
            return ys[0] * x / xs[0]
        # From 1 to the last index, so that the first and last segments extend beyond the points.
        i = bisect_left(xs, x, 1, len(xs) - 1)
        x0, y0 = xs[i - 1], ys[i - 1]
        y = y0 + (ys[i] - y0) * (x - x0) / (xs[i] - x0)
        return y if y > 0.0 else 0.0

    def on(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate the curve for an array."""
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

    common: PiecewiseCurve
    """Seconds by mean tokens of all groups. This is the part of `EngineStepTimes.prefill` in which the groups
    work together on experts, including communication."""
    alone: PiecewiseCurve
    """Seconds by prompt tokens of the iteration, if the other groups have none."""

    def scaled(self, factor: float) -> GroupPrefill:
        return GroupPrefill(self.common.scaled(factor), self.alone.scaled(factor))


@dataclass(frozen=True)
class EngineStepTimes:
    """Duration of an engine's iteration on one replica (all TP ranks), or on one attention-DP group with as
    many tokens in every other."""

    prefill: PiecewiseCurve
    """Seconds by prompt tokens of the iteration."""
    decode: PiecewiseCurve
    """Seconds by number of requests that get one token."""
    kv_token_s: float = 0.0
    mixed_factor: float = 1.0
    request_overhead_s: float = 0.0
    pipeline: int = 1
    """Number of pipeline-parallel stages. `prefill` is then the time between iterations (one stage), so that
    rates are correct. A prompt's last tokens still pass through the other stages."""
    group: GroupPrefill | None = None
    """Present with attention data parallelism."""

    @property
    def alone(self) -> PiecewiseCurve:
        """`prefill` of a replica that does nothing else."""
        return self.prefill if self.group is None else self.group.alone

    def drain_s(self, prompt_tokens: int) -> float:
        """Return the seconds from the end of a prompt's last iteration, with `prompt_tokens`, to its first
        token."""
        return (self.pipeline - 1) * self.prefill(prompt_tokens) if self.pipeline > 1 else 0.0

    def step_s(
        self, prompt_tokens: int, requests: int, kv_tokens: int = 0, *, mean: float | None = None
    ) -> float:
        """Return the seconds of an iteration with both, 0 if empty.

        `mean` is the mean tokens of both over all attention-DP groups.
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
        return in_group_s(self.prefill, self.group.common, tokens, mean)

    def corrected(self, prefill: float, decode: float) -> EngineStepTimes:
        """Return the times multiplied by a factor for each kind of iteration."""
        return replace(
            self,
            prefill=self.prefill.scaled(prefill),
            decode=self.decode.scaled(decode),
            kv_token_s=self.kv_token_s * decode,
            group=self.group and self.group.scaled(prefill),
        )

    def scaled(self, factor: float) -> EngineStepTimes:
        """Return the times of a slower replica (factor > 1). Times off the device do not change."""
        return self.corrected(factor, factor)


def in_group_s(prefill: PiecewiseCurve, common: PiecewiseCurve, tokens: float, mean: float) -> float:
    """Return the seconds of a group's iteration with `tokens`, with a `mean` over all groups.

    It is at least the time with `mean` everywhere, because weights are read for any number of tokens.
    """
    return max(prefill(tokens) - common(tokens) + common(mean), prefill(mean))


@dataclass(frozen=True)
class CellHardware:
    """Times (in seconds) and memory of a cell's replica. None for tasks outside its role."""

    steps: EngineStepTimes | None = None
    encode: PiecewiseCurve | None = None
    """Seconds by patches of one batch."""
    generate: PiecewiseCurve | None = None
    """Seconds by units of one request."""
    kv_tokens: int = 0
    """Tokens that fit in the KV cache. 0 with `steps` means that the model itself does not fit."""
    requests_per_s: dict[str, float] = field(default_factory=dict)
    """Requests per second by "application/request" (or ANY), if only a throughput is known."""
    tpot_s: dict[str, float] = field(default_factory=dict)
    """Seconds per token at that rate by "application/request", if measured under an SLO."""
    source: str = ""
    """Profile's source, as "roofline (H100, 2026-11 table)", "measured: ..."."""
    measured: bool = False

    def rate_of(self, demand: str) -> float | None:
        """Return the known throughput of a request class, or None."""
        return self.requests_per_s.get(demand, self.requests_per_s.get(ANY))
