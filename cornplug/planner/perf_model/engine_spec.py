"""Attributes of a replica on which its times and memory depend, and its tokens of KV cache.

vLLM profiles a step at startup and uses the remaining memory for the KV cache. SGLang reserves memory by a
fixed rule. If a profile contains the number of KV tokens that an engine reports, this number is used instead
of the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cornplug.planner.inputs.component_shapes import kv_bytes_per_token, weights_bytes
from cornplug.planner.inputs.schema import GpuSpec, LLMShape
from cornplug.planner.plan import Parallelism

DEFAULT_UTILISATION: Final = 0.92
"""Default of vLLM's --gpu-memory-utilization."""
GIB: Final = 2**30
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
