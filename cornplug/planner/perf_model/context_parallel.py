"""What ranks of decode context parallelism (DCP) send each other: each holds a part of every request's KV.

As vLLM does it (0.32, `dcp_comm_backend` "ag_rs"): a decode step gathers the queries of all ranks' heads,
attends to the rank's own part of the context, and reduces and scatters the outputs. Prefill of a prompt's
later chunks gathers the earlier ones' vectors with MLA, and does as decode with KV heads.
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
