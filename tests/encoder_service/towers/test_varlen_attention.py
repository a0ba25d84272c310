"""Packed attention against the plain loop over segments, and the call of the CUDA kernel without a GPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLVisionBlock,
    Qwen2VLVisionRotaryEmbedding,
    VisionAttention,
)

from cornplug.encoder_service.towers import varlen_attention
from cornplug.encoder_service.towers.qwen2_vl import RotaryTable
from cornplug.encoder_service.towers.varlen_attention import PackedAttention, SegmentOffsets

CPU = torch.device("cpu")
HEADS, DIM = 2, 8


def random(rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    made = torch.randn(3, rows, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    return tuple(made)


def looped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """One segment after the other."""
    parts = zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True)
    return torch.cat(
        [scaled_dot_product_attention(*(x.transpose(0, 1) for x in one)).transpose(0, 1) for one in parts]
    )


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 1000))
def test_attention_any_segments_equal_plain_loop(lengths: list[int], seed: int) -> None:
    q, k, v = random(sum(lengths), seed)
    ours = varlen_attention.attention(q, k, v, SegmentOffsets(lengths, CPU))
    torch.testing.assert_close(ours, looped(q, k, v, lengths), atol=1e-6, rtol=0)


def test_attention_segment_is_independent_of_others() -> None:
    lengths = [3, 5, 3, 4]
    q, k, v = random(15)
    before = varlen_attention.attention(q, k, v, SegmentOffsets(lengths, CPU))
    k[3:8], v[3:8] = 7.0, torch.nan
    after = varlen_attention.attention(q, k, v, SegmentOffsets(lengths, CPU))
    assert torch.equal(torch.cat([before[:3], before[8:]]), torch.cat([after[:3], after[8:]]))
    assert not torch.isfinite(after[3:8]).any()


def test_segment_offsets_equal_neighbours_are_one_run() -> None:
    segments = SegmentOffsets([4, 4, 2, 4, 4, 4], CPU)
    assert segments.runs == ((4, slice(0, 8)), (2, slice(8, 10)), (4, slice(10, 22)))
    assert segments.longest == 4
    assert segments.offsets.tolist() == [0, 4, 8, 10, 14, 18, 22]


@pytest.mark.parametrize("lengths", [[], [0], [4, 0], [-1]])
def test_segment_offsets_empty_segment_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="segments"):
        SegmentOffsets(lengths, CPU)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "suits"),
    [
        (torch.bfloat16, 80, (9, 0), True),
        (torch.float16, 72, (8, 0), True),
        (torch.bfloat16, 256, (10, 0), True),
        (torch.float32, 80, (9, 0), False),
        (torch.bfloat16, 84, (9, 0), False),
        (torch.bfloat16, 264, (9, 0), False),
        (torch.float16, 64, (7, 5), False),
    ],
)
def test_suits_kernel_dtypes_head_sizes_and_capabilities(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int], suits: bool
) -> None:
    assert varlen_attention.is_kernel_supported(dtype, head_dim, capability) == suits


def test_attention_kernel_call_fits_torch_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own shape inference: no GPU, and no result, but every argument is checked."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    called = []
    monkeypatch.setattr(varlen_attention, "batched_attention", lambda *_: called.append("batched"))
    with FakeTensorMode():
        q, k, v = torch.empty(3, 10, 16, 80, dtype=torch.bfloat16, device="cuda").unbind(0)
        segments = SegmentOffsets([4, 6], CPU)
        segments.__dict__["offsets"] = torch.empty(3, dtype=torch.int32, device="cuda")
        made = varlen_attention.attention(q, k, v, segments)
    assert (made.shape, made.device.type, called) == (q.shape, "cuda", [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_attention_output_equals_transformers(dtype: torch.dtype) -> None:
    config = Qwen2VLVisionConfig(
        embed_dim=64, num_heads=2, rope_parameters={"rope_type": "axial", "rope_theta": 1e4}
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    theirs, ours = VisionAttention(config).to(dtype), PackedAttention(64, 2).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    rotary = Qwen2VLVisionRotaryEmbedding(config)
    lengths = [4, 6, 4, 1]
    hidden, positions = torch.randn(15, 64).to(dtype), torch.randint(0, 30, (15, 2))
    offsets = SegmentOffsets(lengths, CPU).offsets
    with torch.inference_mode():
        wanted = theirs(hidden, offsets, rotary(hidden, positions))
        made = ours(hidden, SegmentOffsets(lengths, CPU), RotaryTable(rotary)(hidden, positions))
    torch.testing.assert_close(made, wanted, atol=1e-6 if dtype == torch.float32 else 1e-2, rtol=0)


@pytest.mark.more
def test_packed_attention_compiled_is_not_recompiled_per_batch() -> None:
    config = Qwen2VLVisionConfig(embed_dim=64, num_heads=2, mlp_ratio=2)
    torch.manual_seed(0)
    plain = Qwen2VLVisionBlock(config)
    plain.attn = PackedAttention(64, 2)
    compiled = copy.deepcopy(plain)
    # The compiler's front half only: no machine code, the same guards.
    compiled.compile(dynamic=True, backend="eager")
    torch._dynamo.reset()
    counts = []
    with torch.inference_mode():
        for lengths in ([4, 6], [3, 3, 3], [12], [1, 2, 3, 4, 5]):
            rows = sum(lengths)
            hidden, cos_sin = torch.randn(rows, 64), (torch.randn(rows, 16), torch.randn(rows, 16))
            batch: dict[str, Any] = {
                "cu_seqlens": SegmentOffsets(lengths, CPU),
                "position_embeddings": cos_sin,
            }
            torch.testing.assert_close(compiled(hidden, **batch), plain(hidden, **batch), atol=1e-5, rtol=0)
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] > 0
    assert len(set(counts)) == 1


@pytest.mark.parametrize("lengths", [(100,), (100, 100), (33, 100), (17,)])
def test_attention_of_long_segments_by_parts_is_the_same(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen_attention, "_LONG_ROWS", 32)
    monkeypatch.setattr(varlen_attention, "_CHUNK_ROWS", 16)
    pauses: list[None] = []
    monkeypatch.setattr(varlen_attention, "between_layers", lambda: pauses.append(None))
    q, k, v = random(sum(lengths))
    made = varlen_attention.attention(q, k, v, SegmentOffsets(lengths, CPU))
    torch.testing.assert_close(made, looped(q, k, v, lengths))
    assert bool(pauses) == (max(lengths) > 32)
