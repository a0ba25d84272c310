"""Communication between ranks of context parallelism.

Decode context parallelism (DCP): each rank holds a part of every request's KV. In vLLM (0.32,
`dcp_comm_backend` "ag_rs"), a decode step gathers the queries of all ranks' heads, attends to the rank's own
part of the context, and reduce-scatters the outputs. Prefill of a prompt's later chunks gathers the vectors
of the earlier chunks with MLA, and works like decode with KV heads.

Prefill context parallelism (PCP): each rank computes the KV of its part of an iteration's tokens, and every
rank holds all of it.
"""

from __future__ import annotations

from cornplug.planner.inputs.component_shapes import kv_bytes_per_token
from cornplug.planner.inputs.schema import LLMShape

_BYTES = 2


def attention_bytes(shape: LLMShape, tokens: float, *, layers: float, tp: int, dcp: int) -> float:
    """Return the bytes that a rank sends for the queries and outputs of `tokens`. An MLA head is as wide as
    its vector."""
    width = shape.mla_rank or shape.head_dim
    return layers * 2 * tokens * shape.heads / tp * width * (dcp - 1) * _BYTES


def prefill_bytes(
    shape: LLMShape, tokens: float, earlier: float, *, layers: float, tp: int, pp: int, dcp: int
) -> float:
    """Return the bytes that a rank sends for an iteration of `tokens` after `earlier` tokens of the same
    prompts."""
    if earlier <= 0:
        return 0.0
    if shape.mla_rank is None:
        return attention_bytes(shape, tokens, layers=layers, tp=tp, dcp=dcp)
    return earlier * kv_bytes_per_token(shape, tp=tp, pp=pp) * (dcp - 1) / dcp


def kv_gathered_bytes(shape: LLMShape, tokens: float, *, pp: int, pcp: int) -> float:
    """Return the bytes that a rank sends so that all `pcp` have an iteration's KV. MLA's is whole on each."""
    return tokens * kv_bytes_per_token(shape, pp=pp) * (pcp - 1) / pcp
