"""The page that a plan of caches gives, and each kind of layer that gives none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from cornplug.errors import LayoutError
from cornplug.vllm_connector.kv.cache_geometry import page_geometry

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
CONFIG: Any = SimpleNamespace(
    parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    model_config=SimpleNamespace(
        get_total_num_kv_heads=lambda: 2, get_total_num_hidden_layers=lambda: 2, dtype=torch.bfloat16
    ),
)


def planned(*specs: Any) -> KVCacheConfig:
    """A cache of one group a spec, of two layers each."""
    groups = [
        KVCacheGroupSpec([f"model.layers.{2 * i + j}.self_attn.attn" for j in range(2)], spec)
        for i, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)


def test_page_geometry_of_full_attention_is_the_whole_model() -> None:
    page = page_geometry(CONFIG, planned(FullAttentionSpec(**SIZES)), 64)
    assert (page.shape, page.dtype) == ((2, 2, 2, 64, 32), "bfloat16")


@pytest.mark.parametrize("fields", [{"sliding_window": 128}, {"attention_chunk_size": 8192}])
def test_page_geometry_of_windows_without_eviction_is_a_page(fields: dict[str, int]) -> None:
    """`--disable-hybrid-kv-cache-manager`: blocks of all tokens stay, whatever a layer attends to."""
    assert page_geometry(CONFIG, planned(FullAttentionSpec(**SIZES, **fields)), 64).layers == 2


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ([FullAttentionSpec(**SIZES), SlidingWindowSpec(**SIZES, sliding_window=32)], "hybrid"),
        ([SlidingWindowSpec(**SIZES, sliding_window=32)], "attention_kind"),
        # It frees blocks between the prompt and its window while a request runs.
        ([RSWASpec(**SIZES, rswa_window=32)], "attention_kind"),
        ([SinkFullAttentionSpec(**SIZES, sink_len=4)], "attention_kind"),
        ([FullAttentionSpec(**SIZES, non_causal=True)], "attention_kind"),
        ([FullAttentionSpec(**SIZES, head_size_v=16)], "attention_kind"),
        ([FullAttentionSpec(**SIZES, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)], "kv_dtype"),
        ([FullAttentionSpec(**{**SIZES, "dtype": torch.uint8})], "kv_dtype"),
        ([FullAttentionSpec(**SIZES, num_head_slots=4, state_content_bytes=128)], "layout"),
        ([FullAttentionSpec(**SIZES, tokens_per_state=2)], "layout"),
        ([MLAAttentionSpec(**{**SIZES, "num_kv_heads": 1, "head_size": 576})], "attention_kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value[0]).__name__,
)
def test_page_geometry_of_other_layers_is_refused(specs: list[Any], reason: str) -> None:
    with pytest.raises(LayoutError) as error:
        page_geometry(CONFIG, planned(*specs), 64)
    assert error.value.reason == reason
