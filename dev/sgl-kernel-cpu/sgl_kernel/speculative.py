"""The compiled functions of speculative decoding, in plain torch.

A request's drafts are a tree of `n` nodes, the root among them: the token before the drafts. Node i of
request b has the number `b * n + i` in arrays of all requests.
"""

from __future__ import annotations

import ctypes

import torch

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "reconstruct_indices_from_tree_mask",
    "verify_tree_greedy_cpu",
]


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Put each request's slots, columns start to end of its row, into `out_cache_loc`, one after the other.

    As `assign_req_to_token_pool_cpu`, in the other direction.
    """
    at = 0
    ranges = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in ranges:
        assert end <= pool_len, f"request of {end} tokens in a table of {pool_len}"
        out_cache_loc[at : at + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        at += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    """Put each request's `topk * num_cols` slots from its length on into `out_cache_loc`, in turn."""
    ends = seq_lens + topk * num_cols
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Put each request's last accepted token, of `accept_stride` places a request, into `bonus_tokens`."""
    tokens = accept_tokens.reshape(-1, accept_stride)
    bonus_tokens.copy_(tokens[torch.arange(len(tokens)), accept_lens.long() - 1])


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Write the trees of a draft model's proposals, as `reconstruct_indices_from_tree_mask`.

    Args:
        parent_list: (requests, topk * (depth - 1) + 1) for each expanded node the number of its proposal.
        selected_index: (requests, n - 1) numbers of the proposals that are nodes, in ascending order.
        verified_seq_len: (requests,) tokens before the root.
        tree_mask: (requests * n * n,) written: whether node j is i itself or one of its ancestors.
        tree_mask_mode: 1, the masks of trees alone; the other forms are a GPU's.
    """
    assert int(tree_mask_mode) == 1, f"tree mask of the form {tree_mask_mode}"
    n, requests = draft_token_num, len(verified_seq_len)
    masks = torch.eye(n, dtype=torch.bool).repeat(requests, 1, 1)
    for mask, parents, selected in zip(masks, parent_list.tolist(), selected_index.tolist(), strict=True):
        mask[:, 0] = True
        for i, number in enumerate(selected, start=1):
            expanded = number // topk
            parent = 1 + selected.index(parents[expanded]) if expanded else 0
            mask[i] |= mask[parent]
    tree_mask[: masks.numel()] = masks.flatten().to(tree_mask.dtype)
    reconstruct_indices_from_tree_mask(
        tree_mask,
        verified_seq_len,
        positions,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
        requests,
        n,
    )


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy slots `src_loc` to slots `tgt_loc` of each buffer, all read before one is written.

    Args:
        data_ptrs: (buffers,) addresses of the buffers.
        strides: (buffers,) bytes of a slot.
    """
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * size, size) for slot in src_loc.tolist()]
        for slot, row in zip(tgt_loc.tolist(), rows, strict=True):
            ctypes.memmove(address + slot * size, row, size)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Put the slots of accepted nodes (-1 for none) into `accept_out_cache_loc`, without gaps."""
    accepted = accept_index.flatten()
    found = out_cache_loc[accepted[accepted >= 0].long()]
    accept_out_cache_loc[: len(found)] = found


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Write each node's position, number, first child and next sibling (-1 for none).

    Args:
        tree_mask: bool, (batch_size * n * n,): whether node j is i itself or one of its ancestors.
        verified_seq_len: (batch_size,) tokens before the root.
    """
    n = draft_token_num
    for b, mask in enumerate(tree_mask[: batch_size * n * n].view(batch_size, n, n).bool().tolist()):
        ancestors = [[j for j in range(i) if mask[i][j]] for i in range(n)]
        parents = [found[-1] if found else -1 for found in ancestors]
        for i in range(n):
            positions[b * n + i] = int(verified_seq_len[b]) + len(ancestors[i])
            retrieve_index[b, i] = b * n + i
            later = range(i + 1, n)
            retrieve_next_token[b, i] = next((k for k in later if i in ancestors[k]), -1)
            sibling = next((k for k in later if parents[k] == parents[i] >= 0), -1)
            retrieve_next_sibling[b, i] = sibling


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follow each request's tree along the drafts that the model itself would have chosen.

    Args:
        predicts: (nodes,) int32, written: the model's token after each accepted node.
        accept_index: (requests, depth) int32, written from the left: numbers of the accepted nodes.
        accept_token_num: (requests,) int32, written: accepted nodes without the root.
        candidates: (requests, n) tokens of the nodes.
        retrive_index, retrive_next_token, retrive_next_sibling: (requests, n), as
            `reconstruct_indices_from_tree_mask` writes them.
        target_predict: (requests, n) the model's token after each node.
    """
    chosen = target_predict.flatten().tolist()
    for b, tokens in enumerate(candidates.tolist()):
        numbers, children = retrive_index[b].tolist(), retrive_next_token[b].tolist()
        siblings = retrive_next_sibling[b].tolist()
        node, accepted = 0, 0
        accept_index[b, 0] = numbers[0]
        while accepted + 1 < accept_index.shape[1]:
            after = chosen[numbers[node]]
            child = children[node]
            while child != -1 and tokens[child] != after:
                child = siblings[child]
            if child == -1:
                break
            predicts[numbers[node]] = after
            node, accepted = child, accepted + 1
            accept_index[b, accepted] = numbers[node]
        predicts[numbers[node]] = chosen[numbers[node]]
        accept_token_num[b] = accepted
