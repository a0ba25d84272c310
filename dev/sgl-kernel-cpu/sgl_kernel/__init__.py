"""What SGLang 0.5.23 asks of its compiled `sgl_kernel` on a CPU without AMX, in pure Python.

The compiled package is published for CUDA only. On a CPU without AMX SGLang computes with
plain torch, and needs of `sgl_kernel` one function for every request, those of speculative
decoding (`speculative.py`), and some operators that model files look up when they are
imported. These are there by name: a call says so and raises.

`torch.ops.sgl_kernel.convert_weight_packed` must stay absent: SGLang takes it for AMX support.
"""

from __future__ import annotations

from typing import Final

import torch

from .speculative import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

# Looked up by models/grok.py, qwen3_5.py and muse_glimmer.py at import. Without them the
# Qwen-VL processors, which import qwen3_5.py, are dropped with no more than a log line.
_OPERATORS: Final = (
    "fused_dual_residual_rmsnorm_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
    "rmsnorm_cpu",
)


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache slots into its row of the table of slots.

    Args:
        req_pool_indices: (requests,) rows of `req_to_token`.
        req_to_token: (rows, pool_len) int32, changed in place.
        start_offset, end_offset: (requests,) half-open range of columns of each request.
        out_cache_loc: the slots of all requests, one request after the other.
        pool_len: width of `req_to_token`.
    """
    at = 0
    ranges = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in ranges:
        assert end <= pool_len, f"request of {end} tokens in a table of {pool_len}"
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].to(req_to_token.dtype)
        at += end - start


for _name in _OPERATORS:
    # A schema without a kernel: torch raises NotImplementedError with the name when it is called.
    torch.library.define(f"sgl_kernel::{_name}", "(Tensor x) -> Tensor")
