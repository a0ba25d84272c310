"""Attention inside the segments of a packed batch, without padding or gathering.

    rows of all items, concatenated         [aaaaaa][bb][bb][bb][cccc]
    on CUDA, half precision                 one call of a variable-length kernel
    otherwise                               one call per run of equal lengths: [aaaaaa], [bb][bb][bb], [cccc]

A tower with windows has hundreds of segments with only a few different lengths. Therefore it places segments
of equal length next to each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import accumulate, groupby
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from cornplug.encoder_service.towers.base import between_layers

_MAX_HEAD_DIM: Final = 256
_HALVES: Final = (torch.float16, torch.bfloat16)
_AMPERE: Final = (8, 0)
_LONG_ROWS: Final = 8192
_CHUNK_ROWS: Final = 4096

Kernel = Callable[..., torch.Tensor]


class SegmentOffsets:
    """Offsets of the segments in a packed batch. Created once per batch and used by every layer."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """Compute the offsets of segments with these lengths in rows. Raises ValueError for a length below
        1.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"segments of {list(lengths)} rows")
        self._lengths = tuple(lengths)
        self._device = device
        self.longest: Final = max(lengths)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """First row of each segment, and the end of the last segment: (segments + 1,) int32 on the device."""
        return torch.tensor([0, *accumulate(self._lengths)], dtype=torch.int32).to(self._device)

    @cached_property
    def runs(self) -> tuple[tuple[int, slice], ...]:
        """Runs of adjacent segments of equal length, each as (length of a segment, slice of the run's
        rows)."""
        out = []
        first = 0
        for length, neighbours in groupby(self._lengths):
            end = first + length * len(list(neighbours))
            out.append((length, slice(first, end)))
            first = end
        return tuple(out)


@torch.compiler.disable  # otherwise each batch's segments would need a new compilation
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: SegmentOffsets) -> torch.Tensor:
    """Return full attention inside each segment. All tensors have shape (rows, heads, head_dim). The scale is
    head_dim ** -0.5."""
    if q.is_cuda and is_kernel_supported(q.dtype, q.shape[-1], torch.cuda.get_device_capability(q.device)):
        kernel = load_kernel_attention()
        if kernel is not None:
            return kernel(q, k, v, segments)
    return batched_attention(q, k, v, segments)


def batched_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: SegmentOffsets
) -> torch.Tensor:
    """Return the same result as `attention`, computed with one batched SDPA call per run."""
    made = []
    for length, rows in segments.runs:
        # (rows of the run, heads, dim) -> (segments, heads, length, dim), without a copy
        parts = (x[rows].unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        made.append(_interruptible_sdpa(*parts).transpose(1, 2).flatten(0, 1))
    return made[0] if len(made) == 1 else torch.cat(made)


def _interruptible_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the SDPA of q, k and v.

    On a CPU, long segments are computed in parts, so that another pass may run in between. For an image of 12
    megapixels, one layer takes minutes.
    """
    rows = q.shape[-2]
    if q.is_cuda or rows <= _LONG_ROWS:
        return scaled_dot_product_attention(q, k, v)
    made = torch.empty_like(q)
    parts = -(-rows // _CHUNK_ROWS)
    for queries, out in zip(q.tensor_split(parts, -2), made.tensor_split(parts, -2), strict=True):
        between_layers()
        out.copy_(scaled_dot_product_attention(queries, k, v))
    return made


def is_kernel_supported(dtype: torch.dtype, head_dim: int, capability: tuple[int, int]) -> bool:
    """Return whether FlashAttention-2's variable-length kernels, in torch and in flash_attn, support this
    dtype, head dimension and CUDA capability."""
    return dtype in _HALVES and head_dim % 8 == 0 and head_dim <= _MAX_HEAD_DIM and capability >= _AMPERE


@cache
def load_kernel_attention() -> Kernel | None:
    """Return a version of `attention` with torch's own kernel (2.10 and newer), or with flash_attn's kernel
    if torch has none. Return None if neither is installed."""
    varlen = _import_function("torch.nn.attention.varlen", "varlen_attn")
    if varlen is None:
        varlen = _import_function("flash_attn", "flash_attn_varlen_func")
    if varlen is None:
        return None
    call: Kernel = varlen

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: SegmentOffsets) -> torch.Tensor:
        offsets, longest = segments.offsets, segments.longest
        return call(q, k, v, offsets, offsets, longest, longest)

    return run


def _import_function(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


class PackedAttention(nn.Module):
    """Replaces `attn` in transformers' vision blocks. It has the same weights, but no loop over segments.

    A block passes `SegmentOffsets` as `cu_seqlens`, and cosines and sines of shape (rows, head_dim / 2) in
    float32.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(
        self,
        hidden: torch.Tensor,
        cu_seqlens: SegmentOffsets,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        qkv = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))  # (rows, 3, heads, head_dim)
        q, k = apply_rotary(qkv[:, :2], *position_embeddings).unbind(1)
        made = attention(q, k, qkv[:, 2], cu_seqlens)
        out: torch.Tensor = self.proj(made.flatten(1))
        return out


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `x` (rows, 2, heads, head_dim) after rotary embedding, which pairs the two halves of head_dim.
    Computed in float32."""
    # transformers first converts whole tensors. In a bfloat16 tower, the conversion would take as long as
    # attention.
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    out = torch.empty_like(x)
    out[..., : first.shape[-1]] = torch.addcmul(first * cos, second, sin, value=-1)
    out[..., first.shape[-1] :] = torch.addcmul(second * cos, first, sin)
    return out
