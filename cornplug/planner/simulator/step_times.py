"""How long an engine's iterations take on one replica. Pure numbers: no profile, no GPU table."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

ANY: Final = "*"
"""Key of a rate that holds for every request class."""


@dataclass(frozen=True)
class PiecewiseCurve:
    """Piecewise linear through points; beyond them the outermost two points' line, never below 0.

    One point is a proportional line through the origin.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        if (
            not self.x
            or len(self.x) != len(self.y)
            or any(b <= a for a, b in zip(self.x, self.x[1:], strict=False))
        ):
            raise ValueError("a curve needs points with growing x, one y each")

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
        # Between 1 and the last point: beyond either end the outermost segment goes on.
        i = bisect_left(xs, x, 1, len(xs) - 1)
        x0, y0 = xs[i - 1], ys[i - 1]
        y = y0 + (ys[i] - y0) * (x - x0) / (xs[i] - x0)
        return y if y > 0.0 else 0.0

    def on(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same for many at once."""
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
    """Prefill of one attention-DP group where the others have fewer tokens than it."""

    common: PiecewiseCurve
    """Mean tokens of all groups -> s: the part of `EngineStepTimes.prefill` in which groups work together,
    on experts, and what they send each other for it."""
    alone: PiecewiseCurve
    """Prompt tokens of the iteration, the other groups having none -> s."""

    def scaled(self, factor: float) -> GroupPrefill:
        return GroupPrefill(self.common.scaled(factor), self.alone.scaled(factor))


@dataclass(frozen=True)
class EngineStepTimes:
    """One iteration of a language model's engine, on one replica (all its TP ranks).

    With attention data parallelism: of one group, all others having as many tokens.
    """

    prefill: PiecewiseCurve
    """Prompt tokens of the iteration -> s."""
    decode: PiecewiseCurve
    """Requests that get one token -> s."""
    kv_token_s: float = 0.0
    mixed_factor: float = 1.0
    request_overhead_s: float = 0.0
    pipeline: int = 1
    """Stages of pipeline parallelism. `prefill` is then the time between iterations (one stage's),
    so that rates are right; a prompt's last tokens still have the other stages before them."""
    group: GroupPrefill | None = None
    """With attention data parallelism."""

    @property
    def alone(self) -> PiecewiseCurve:
        """`prefill` of a replica that does nothing else."""
        return self.prefill if self.group is None else self.group.alone

    def drain_s(self, prompt_tokens: int) -> float:
        """From the end of a prompt's last iteration, of so many tokens, to its first token."""
        return (self.pipeline - 1) * self.prefill(prompt_tokens) if self.pipeline > 1 else 0.0

    def step_s(
        self, prompt_tokens: int, requests: int, kv_tokens: int = 0, *, mean: float | None = None
    ) -> float:
        """Seconds of an iteration that computes both; 0 for an empty one.

        `mean`: tokens of both kinds, of all attention-DP groups.
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
        """With a factor on the times of each kind of iteration."""
        return replace(
            self,
            prefill=self.prefill.scaled(prefill),
            decode=self.decode.scaled(decode),
            kv_token_s=self.kv_token_s * decode,
            group=self.group and self.group.scaled(prefill),
        )

    def scaled(self, factor: float) -> EngineStepTimes:
        """The times of a slower replica (factor > 1); times off the device stay."""
        return self.corrected(factor, factor)


def in_group_s(prefill: PiecewiseCurve, common: PiecewiseCurve, tokens: float, mean: float) -> float:
    """Seconds of a group's iteration of so many tokens where all groups have `mean` on average.

    Never under the time that all would take with `mean` each: the weights are read whatever their number.
    """
    return max(prefill(tokens) - common(tokens) + common(mean), prefill(mean))


@dataclass(frozen=True)
class CellHardware:
    """Times and memory of a cell's replica, in seconds; None for tasks that are not in its role."""

    steps: EngineStepTimes | None = None
    encode: PiecewiseCurve | None = None
    """Patches of one batch -> s."""
    generate: PiecewiseCurve | None = None
    """Units of one request -> s."""
    kv_tokens: int = 0
    """Tokens of KV cache that fit; 0 with `steps`: the model itself does not fit."""
    requests_per_s: dict[str, float] = field(default_factory=dict)
    """"application/request" (or ANY) -> rate, where only a throughput is known."""
    tpot_s: dict[str, float] = field(default_factory=dict)
    """"application/request" -> seconds a token at that rate, where it was measured under an SLO."""
    source: str = ""
    """Of the profile: "roofline (H100, 2026-11 table)", "measured: ..."."""
    measured: bool = False

    def rate_of(self, demand: str) -> float | None:
        """The throughput known for a request class; None where none is."""
        return self.requests_per_s.get(demand, self.requests_per_s.get(ANY))
