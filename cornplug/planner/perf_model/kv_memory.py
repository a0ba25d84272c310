"""Tokens of KV cache that fit beside the weights on one device.

Both engines fill the memory that they may use: vLLM measures a step at start and gives the rest to
the cache, SGLang sets a part aside by a fixed rule. These are estimates; a profile with an engine's
reported figure goes before them.
"""

from __future__ import annotations

from typing import Final

from cornplug.planner.inputs.component_shapes import kv_bytes_per_token, weights_bytes
from cornplug.planner.inputs.schema import Engine, GpuSpec, LLMShape

UTILISATION: Final = 0.92
"""vLLM's default of --gpu-memory-utilization."""
GIB: Final = 2**30
BLOCK_TOKENS: Final = 16

# vLLM's step on a GPU. Chosen so that InternVL3-38B on two A40 gets the figure that vLLM's developers
# report: 2.6 GB beside the weights (planner.md, section 2.1); right for other models to about 1 GB.
_CONTEXT_BYTES: Final = 600_000_000
"""CUDA context and libraries, outside PyTorch's allocator."""
_NCCL_BYTES: Final = 370_000_000
"""AIConfigurator 0.12: 342 to 392 MB with more than one rank."""
_GRAPH_BYTES_PER_REQUEST: Final = 2_000_000
_LOGITS_BYTES_PER_REQUEST: Final = 150_000 * 6
"""A vocabulary of 150,000 in 16 and in 32 bits."""
_SGLANG_MOST_GRAPHS: Final = 512
_SGLANG_BESIDE_TOWERS: Final = 0.95
"""For a tower of CLIP-L's size. SGLang asks 1 % more or less for each tenth that it is larger or smaller."""
_CPU_BYTES: Final = 500_000_000
"""A Python process with torch and its scratch memory, where no graphs are kept."""


def kv_tokens(
    shape: LLMShape,
    gpu: GpuSpec,
    *,
    engine: Engine,
    tp: int,
    pp: int,
    dp: int = 1,
    dcp: int = 1,
    pcp: int = 1,
    share: float,
    quantisation: str,
    chunk_tokens: int,
    max_batch: int,
    extra_bytes: int = 0,
    utilisation: float = UTILISATION,
    element_bytes: int = 2,
) -> int:
    """Tokens for which every rank has room, in whole blocks; 0 where the model itself does not fit.

    With attention data parallelism they are those of one of its `dp` groups; groups of prefill context
    parallelism (`pcp`) all have the same KV. `share` of each GPU is this
    replica's. `extra_bytes`: of one rank, for towers in the same engine.
    """
    groups = dp * pcp
    spent = weights_bytes(shape, quantisation, tp=tp, pp=pp, dp=groups) + extra_bytes
    whole = gpu.memory_gib * GIB
    free = whole * engine_share(
        gpu,
        engine=engine,
        ranks=tp * pp * groups,
        share=share,
        chunk_tokens=chunk_tokens,
        max_batch=max_batch,
        towers=extra_bytes > 0,
        utilisation=utilisation,
    )
    if gpu.generation == "cpu":
        free = whole * share - _CPU_BYTES * share
    elif engine == "vllm":
        free -= _vllm_step(shape, tp, pp * groups, chunk_tokens, max_batch)
    if groups > 1:
        free -= gathered_bytes(shape, chunk_tokens / pcp, dp=groups)
    tokens = (free - spent) / kv_bytes_per_token(shape, tp=tp, pp=pp, dcp=dcp, element_bytes=element_bytes)
    return max(int(tokens // BLOCK_TOKENS), 0) * BLOCK_TOKENS


def engine_share(
    gpu: GpuSpec,
    *,
    engine: str,
    ranks: int,
    share: float,
    chunk_tokens: int,
    max_batch: int,
    towers: bool = False,
    utilisation: float = UTILISATION,
) -> float:
    """Share of a GPU's memory for an engine's flags: vLLM's covers all of its memory
    (--gpu-memory-utilization), SGLang's its weights and cache (--mem-fraction-static).

    SGLang's is the share that it would choose itself (0.5.23, `memory_hook.py`) for a GPU of the part's size.
    """
    if engine != "sglang" or gpu.generation == "cpu":
        return utilisation * share
    mib = 512 + 1.5 * max(chunk_tokens, 2048) + ranks / 8 * 1024 + 2 * min(max_batch, _SGLANG_MOST_GRAPHS)
    if gpu.memory_gib * share > 60:
        mib = max(mib, 10240)
    left = max(share - mib / 1024 / gpu.memory_gib, 0.0)
    return left * (_SGLANG_BESIDE_TOWERS if towers else 1.0)


def activation_bytes(shape: LLMShape, chunk_tokens: int, *, tp: int = 1) -> int:
    """The widest moment of a layer: two residual streams, and an MLP about five times as wide."""
    return int(chunk_tokens * shape.hidden * 2 * (4 + 12 / tp))


def gathered_bytes(shape: LLMShape, chunk_tokens: float, *, dp: int) -> float:
    """Of a layer's experts: the tokens of all `dp` groups, before and after them, at 16 bits."""
    return 2 * dp * chunk_tokens * shape.hidden * 2


def _vllm_step(shape: LLMShape, tp: int, others: int, chunk_tokens: int, max_batch: int) -> int:
    """`others`: groups of `tp` ranks of a replica."""
    per_request = _GRAPH_BYTES_PER_REQUEST + _LOGITS_BYTES_PER_REQUEST
    ranks = _NCCL_BYTES if tp * others > 1 else 0
    return _CONTEXT_BYTES + ranks + max_batch * per_request + activation_bytes(shape, chunk_tokens, tp=tp)
