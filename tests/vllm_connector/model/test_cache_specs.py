"""The lists of fields by which a spec of vLLM's is judged, and caches that both kinds of plan refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expected_errors import expect_error
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from cornplug.errors import LayoutError
from cornplug.vllm_connector.kv.cache_geometry import ATTENTION_FIELDS, LATENT_FIELDS, require_plain_blocks
from cornplug.vllm_connector.kv.page_kinds import page_kinds

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("listed", "specs"),
    [(LATENT_FIELDS, (MLAAttentionSpec,)), (ATTENTION_FIELDS, (FullAttentionSpec, SlidingWindowSpec))],
    ids=["latents", "attention"],
)
def test_cache_specs_lists_name_fields_that_vllm_has(listed: Mapping[str, str], specs: Any) -> None:
    """A field that is none of vLLM's any more leaves the list."""
    names = {field.name for spec in specs for field in fields(spec)}
    assert set(listed) - names <= {"is_draft"}  # from 0.33 on


def test_cache_specs_unknown_field_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Later(SlidingWindowSpec):
        sinks: int = 0

    require_plain_blocks(Later(**SIZES, sliding_window=100))
    with expect_error(LayoutError, reason="attention_kind", match="sinks 4"):
        require_plain_blocks(Later(**SIZES, sliding_window=100, sinks=4))


CONTEXTS = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}


def config(**parallel: int) -> Any:
    degrees = {**CONTEXTS, "pipeline_parallel_size": 1, "tensor_parallel_size": 1, **parallel}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**degrees),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: 2,
            get_total_num_hidden_layers=lambda: 2,
            hf_config=SimpleNamespace(),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("spec", "parallel", "reason"),
    [
        ({}, {"decode_context_parallel_size": 2}, "context_parallel"),
        ({}, {"prefill_context_parallel_size": 2}, "context_parallel"),
        ({"head_size_v": 16}, {}, "attention_kind"),
        ({"non_causal": True}, {}, "attention_kind"),
        ({"num_head_slots": 4, "state_content_bytes": 128}, {}, "layout"),
        ({"tokens_per_state": 2}, {}, "layout"),
        ({"dtype": torch.uint8}, {}, "kv_dtype"),
        ({"kv_quant_mode": KVQuantMode.FP8_PER_TOKEN_HEAD}, {}, "kv_dtype"),
        ({"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}, {}, "kv_dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "plain",
)
def test_cache_specs_one_group_and_several_refuse_alike(
    groups: int, spec: dict[str, Any], parallel: dict[str, int], reason: str
) -> None:
    plan = [
        KVCacheGroupSpec([f"model.layers.{i}.attn" for i in range(2)[group::groups]],
                         FullAttentionSpec(**{**SIZES, **spec}))
        for group in range(groups)
    ]  # fmt: skip
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=plan)
    with pytest.raises(LayoutError) as error:
        page_kinds(config(**parallel), cache, 64)
    assert error.value.reason == reason
