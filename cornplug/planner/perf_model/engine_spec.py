"""Attributes of a replica that determine its latency and memory, and the durations of its iterations.

vLLM profiles a step at startup and uses the remaining memory for the KV cache. SGLang reserves memory by a
fixed rule. If a profile contains the number of KV tokens that an engine reports, this number is used instead
of the estimate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cornplug.planner.inputs.component_shapes import kv_bytes_per_token, weights_bytes
from cornplug.planner.inputs.schema import GpuSpec, LLMShape
from cornplug.planner.plan import Parallelism
from cornplug.settings import GIB

ANY_CLASS: Final = "*"
"""Key of a rate that applies to every request class."""
DEFAULT_UTILISATION: Final = 0.92
"""Default of vLLM's --gpu-memory-utilization."""
BLOCK_TOKENS: Final = 16
# Memory for a step of vLLM on a GPU. The constants are chosen so that InternVL3-38B on two A40 needs the
# memory that vLLM's developers report: 2.6 GB in addition to the weights (planner.md, section 2.1). For other
# models they are accurate to about 1 GB.
_CONTEXT_BYTES: Final = 600_000_000
"""Memory of the CUDA context and libraries, outside PyTorch's allocator."""
_NCCL_BYTES: Final = 370_000_000
"""Memory of NCCL buffers. AIConfigurator 0.12 has 342 to 392 MB with more than one rank."""
_GRAPH_BYTES_PER_REQUEST: Final = 2_000_000
_LOGITS_BYTES_PER_REQUEST: Final = 150_000 * 6
"""Memory of logits for a vocabulary of 150,000, in 16 and in 32 bits."""
_SGLANG_MAX_GRAPHS: Final = 512
_SGLANG_TOWER_FACTOR: Final = 0.95
"""Factor of SGLang's memory share for a tower of CLIP-L's size. SGLang changes the factor by 1 % for each 10
% by which a tower is larger or smaller.
"""
_CPU_BYTES: Final = 500_000_000
"""Memory of a Python process with torch on a CPU, including its scratch memory. There are no graphs."""


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
    """Requests per second by "application/request" (or ANY_CLASS), if only a throughput is known."""
    tpot_s: dict[str, float] = field(default_factory=dict)
    """Seconds per token at this throughput by "application/request", if they are known."""
    source: str = ""
    """Source of the profile, for example "roofline (H100, 2026-11 table)" or "measured: ..."."""
    measured: bool = False

    def rate_of(self, demand: str) -> float | None:
        """Return the known throughput of a request class, or None."""
        return self.requests_per_s.get(demand, self.requests_per_s.get(ANY_CLASS))


@dataclass(frozen=True)
class EngineSpec:
    """GPUs and settings of one replica."""

    gpu: GpuSpec
    engine: str
    """"vllm", "sglang", or the name of the server of a separate tower or generator."""
    parallelism: Parallelism
    share: float
    """Share of each GPU that the replica uses."""
    quantisation: str
    chunk_tokens: int
    max_batch: int
    context_tokens: int | None = None
    """Number of tokens to which prompt tokens attend in a roofline, or None for the tokens of each
    iteration."""


def kv_tokens(
    shape: LLMShape,
    spec: EngineSpec,
    *,
    extra_bytes: int = 0,
    utilisation: float = DEFAULT_UTILISATION,
    element_bytes: int = 2,
) -> int:
    """Return the number of tokens in the KV cache, as a multiple of the block size, or 0 if the model does
    not fit.

    With attention data parallelism, this is the cache of one of the `dp` groups. All `pcp` groups hold the
    same KV.

    Args:
        extra_bytes: Size of towers on a rank.
        utilisation: Share of the memory that vLLM may use.
        element_bytes: Size of one value in the KV cache.
    """
    at, share = spec.parallelism, spec.share
    spent = weights_bytes(shape, spec.quantisation, tp=at.tp, pp=at.pp, dp=at.groups) + extra_bytes
    whole = spec.gpu.memory_gib * GIB
    free = whole * engine_share(spec, towers=extra_bytes > 0, utilisation=utilisation)
    if spec.gpu.generation == "cpu":
        free = whole * share - _CPU_BYTES * share
    elif spec.engine != "sglang":
        free -= _vllm_step_bytes(shape, at.tp, at.pp * at.groups, spec.chunk_tokens, spec.max_batch)
    if at.groups > 1:
        free -= gathered_bytes(shape, spec.chunk_tokens / at.pcp, dp=at.groups)
    kv_token_bytes = kv_bytes_per_token(shape, tp=at.tp, pp=at.pp, dcp=at.dcp, element_bytes=element_bytes)
    tokens = (free - spent) / kv_token_bytes
    return max(int(tokens // BLOCK_TOKENS), 0) * BLOCK_TOKENS


def engine_share(
    spec: EngineSpec, *, towers: bool = False, utilisation: float = DEFAULT_UTILISATION
) -> float:
    """Return the share of a GPU's memory for an engine's flag.

    vLLM's --gpu-memory-utilization is the share for all of the engine's memory. SGLang's
    --mem-fraction-static is the share for the weights and the cache. The result for SGLang is its own default
    (0.5.23, `memory_hook.py`) on a GPU with `spec.share` of the memory.
    """
    gpu, share = spec.gpu, spec.share
    if spec.engine != "sglang" or gpu.generation == "cpu":
        return utilisation * share
    mib = 512 + 1.5 * max(spec.chunk_tokens, 2048) + spec.parallelism.ranks / 8 * 1024
    mib += 2 * min(spec.max_batch, _SGLANG_MAX_GRAPHS)
    if gpu.memory_gib * share > 60:
        mib = max(mib, 10240)
    left = max(share - mib / 1024 / gpu.memory_gib, 0.0)
    return left * (_SGLANG_TOWER_FACTOR if towers else 1.0)


def activation_bytes(shape: LLMShape, chunk_tokens: int, *, tp: int = 1) -> int:
    """Return the peak activation memory of a layer in bytes.

    The memory consists of two residual streams, and an MLP that is about five times as wide.
    """
    return int(chunk_tokens * shape.hidden * 2 * (4 + 12 / tp))


def gathered_bytes(shape: LLMShape, chunk_tokens: float, *, dp: int) -> float:
    """Return the size in bytes of the 16-bit activations of all `dp` groups' tokens, before and after the
    experts of a layer."""
    return 2 * dp * chunk_tokens * shape.hidden * 2


def _vllm_step_bytes(shape: LLMShape, tp: int, group_count: int, chunk_tokens: int, max_batch: int) -> int:
    """Return the bytes of memory that a vLLM rank needs for a step, in addition to weights and KV.
    `group_count` is the number of groups of `tp` ranks."""
    per_request = _GRAPH_BYTES_PER_REQUEST + _LOGITS_BYTES_PER_REQUEST
    ranks = _NCCL_BYTES if tp * group_count > 1 else 0
    return _CONTEXT_BYTES + ranks + max_batch * per_request + activation_bytes(shape, chunk_tokens, tp=tp)
