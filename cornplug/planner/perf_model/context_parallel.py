"""What ranks of context parallelism send each other.

Decode context parallelism (DCP): each rank holds a part of every request's KV.

As vLLM does it (0.32, `dcp_comm_backend` "ag_rs"): a decode step gathers the queries of all ranks' heads,
attends to the rank's own part of the context, and reduces and scatters the outputs. Prefill of a prompt's
later chunks gathers the earlier ones' vectors with MLA, and does as decode with KV heads.

Prefill context parallelism (PCP): each rank computes the KV of its part of an iteration's tokens, and all
hold all of it.
"""

from __future__ import annotations

from cornplug.planner.inputs.component_shapes import kv_bytes_per_token
from cornplug.planner.inputs.schema import LLMShape

_BYTES = 2


def attention_bytes(shape: LLMShape, tokens: float, *, layers: float, tp: int, dcp: int) -> float:
    """That a rank sends for so many tokens' queries and outputs; an MLA head is as wide as its vector."""
    width = shape.mla_rank or shape.head_dim
    return layers * 2 * tokens * shape.heads / tp * width * (dcp - 1) * _BYTES


def prefill_bytes(
    shape: LLMShape, tokens: float, earlier: float, *, layers: float, tp: int, pp: int, dcp: int
) -> float:
    """That a rank sends for an iteration of so many prompt tokens, after `earlier` ones of their prompts."""
    if earlier <= 0:
        return 0.0
    if shape.mla_rank is None:
        return attention_bytes(shape, tokens, layers=layers, tp=tp, dcp=dcp)
    return earlier * kv_bytes_per_token(shape, tp=tp, pp=pp) * (dcp - 1) / dcp


def kv_gathered_bytes(shape: LLMShape, tokens: float, *, pp: int, pcp: int) -> float:
    """That a rank sends so that each of `pcp` has the KV of an iteration's tokens; MLA's is whole on each."""
    return tokens * kv_bytes_per_token(shape, pp=pp) * (pcp - 1) / pcp
