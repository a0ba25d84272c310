"""Communication between the ranks of context parallelism.

Decode context parallelism (DCP): each rank holds a part of every request's KV. In vLLM (0.32,
`dcp_comm_backend` "ag_rs"), a decode step gathers the queries of all ranks' heads, attends to the rank's own
part of the context, and reduce-scatters the outputs. With MLA, the prefill of a prompt's later chunks gathers
the latent vectors of the earlier chunks. With KV heads, it communicates like a decode step.

Prefill context parallelism (PCP): each rank computes the KV of its part of an iteration's tokens, and every
rank holds the KV of all tokens.
"""

from __future__ import annotations

from cornplug.planner.inputs.component_shapes import kv_bytes_per_token
from cornplug.planner.inputs.schema import LLMShape

_BYTES = 2


def attention_bytes(shape: LLMShape, tokens: float, *, layers: float, tp: int, dcp: int) -> float:
    """Return the number of bytes that a rank sends for the queries and outputs of `tokens` tokens.

    With MLA, a head is as wide as the latent vector.
    """
    width = shape.mla_rank or shape.head_dim
    return layers * 2 * tokens * shape.heads / tp * width * (dcp - 1) * _BYTES


def prefill_bytes(
    shape: LLMShape, tokens: float, earlier: float, *, layers: float, tp: int, pp: int, dcp: int
) -> float:
    """Return the number of bytes that a rank sends for a prefill iteration of `tokens` tokens.

    `earlier` is the number of tokens of the same prompts in earlier iterations.
    """
    if earlier <= 0:
        return 0.0
    if shape.mla_rank is None:
        return attention_bytes(shape, tokens, layers=layers, tp=tp, dcp=dcp)
    return earlier * kv_bytes_per_token(shape, tp=tp, pp=pp) * (dcp - 1) / dcp


def kv_gathered_bytes(shape: LLMShape, tokens: float, *, pp: int, pcp: int) -> float:
    """Return the number of bytes that a rank sends so that all `pcp` groups hold the KV of `tokens` tokens.

    The latent vectors of MLA are not divided among the ranks of a group.
    """
    return tokens * kv_bytes_per_token(shape, pp=pp) * (pcp - 1) / pcp
