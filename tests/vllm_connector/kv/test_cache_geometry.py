"""The page that a plan of caches gives, and each kind of layer that gives none."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from expected_errors import expect_error
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from cornplug.errors import LayoutError
from cornplug.kv_page import PageGeometry
from cornplug.vllm_connector.kv import cache_geometry
from cornplug.vllm_connector.kv.cache_geometry import layers_in_page_order, page_geometry

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
CONFIG: Any = SimpleNamespace(
    parallel_config=SimpleNamespace(
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        pipeline_parallel_size=1,
        tensor_parallel_size=1,
    ),
    model_config=SimpleNamespace(
        get_total_num_kv_heads=lambda: 2,
        get_total_num_hidden_layers=lambda: 2,
        dtype=torch.bfloat16,
        hf_config=SimpleNamespace(to_dict=dict),
    ),
    cache_config=SimpleNamespace(cache_dtype="auto"),
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


BYTES: dict[str, Any] = {**SIZES, "dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}


@pytest.mark.parametrize(
    ("name", "quantised"),
    [("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2"), ("auto", "fp8_e4m3")],
)
def test_page_geometry_of_fp8_is_bytes_of_this_engine_alone(name: str, quantised: str) -> None:
    config = SimpleNamespace(**{**vars(CONFIG), "cache_config": SimpleNamespace(cache_dtype=name)})
    page = page_geometry(config, planned(FullAttentionSpec(**BYTES)), 64)
    assert (page.shape, page.dtype, page.page_bytes) == ((2, 2, 2, 64, 32), "uint8", 2 * 2 * 2 * 64 * 32)
    assert page.spec() | {"engine": "vllm", "quantised": quantised} == page.spec()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("fp8_inc", {"dtype": torch.float8_e4m3fn}),
        ("fp8_per_token_head", {"kv_quant_mode": KVQuantMode.FP8_PER_TOKEN_HEAD}),
    ],
)
def test_page_geometry_of_other_quantised_caches_is_refused(name: str, fields: dict[str, Any]) -> None:
    config = SimpleNamespace(**{**vars(CONFIG), "cache_config": SimpleNamespace(cache_dtype=name)})
    with pytest.raises(LayoutError) as error:
        page_geometry(config, planned(FullAttentionSpec(**BYTES | fields)), 64)
    assert error.value.reason == "kv_dtype"


def test_page_geometry_of_fp8_with_amds_own_values_is_refused() -> None:
    config = SimpleNamespace(**{**vars(CONFIG), "cache_config": SimpleNamespace(cache_dtype="fp8")})
    with (
        mock.patch("vllm.platforms.current_platform.fp8_dtype", return_value=torch.float8_e4m3fnuz),
        pytest.raises(LayoutError) as error,
    ):
        page_geometry(config, planned(FullAttentionSpec(**BYTES)), 64)
    assert error.value.reason == "kv_dtype"


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
    ],
    ids=lambda value: value if isinstance(value, str) else type(value[0]).__name__,
)
def test_page_geometry_of_other_layers_is_refused(specs: list[Any], reason: str) -> None:
    with pytest.raises(LayoutError) as error:
        page_geometry(CONFIG, planned(*specs), 64)
    assert error.value.reason == reason


LATENTS: dict[str, Any] = {**SIZES, "num_kv_heads": 1, "head_size": 576}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cache_dtype_str": "auto", "max_tp_shards": 1},
        {"cache_dtype_str": "bfloat16", "block_stride_alignment": MultipleOf(16)},
    ],
)
def test_page_geometry_of_latents_is_one_plane_of_their_width(fields: dict[str, Any]) -> None:
    """Whatever heads the model has: every rank caches the same latent of each token."""
    page = page_geometry(CONFIG, planned(MLAAttentionSpec(**LATENTS, **fields)), 64)
    assert (page.shape, page.dtype) == ((1, 2, 1, 64, 576), "bfloat16")


def test_page_geometry_of_latents_is_of_this_engine_alone() -> None:
    """Where no test compares this model's latents with SGLang's, which have the same shape."""
    page = page_geometry(CONFIG, planned(MLAAttentionSpec(**LATENTS)), 64)
    sglang = PageGeometry(page_tokens=64, heads=1, layers=2, dim=576, dtype="bfloat16", planes=1)
    assert page.shape == sglang.shape
    assert page.spec() != sglang.spec()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656}, "kv_dtype"),
        ({"cache_dtype_str": "float16"}, "kv_dtype"),
        ({"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}, "kv_dtype"),
        ({"dtype": torch.uint8}, "kv_dtype"),
        ({"num_kv_heads": 2}, "attention_kind"),
        ({"max_tp_shards": 2}, "attention_kind"),
        ({"head_size_v": 512}, "attention_kind"),
        ({"tokens_per_state": 4}, "attention_kind"),
        ({"state_content_bytes": 656}, "attention_kind"),
        ({"num_head_slots": 2}, "attention_kind"),
        ({"page_size_padded": 1 << 20}, "attention_kind"),
        ({"alignment": 576}, "attention_kind"),
        ({"model_version": "deepseek_v4"}, "attention_kind"),
        ({"cache_role": SparseCacheRole.INDEXER}, "attention_kind"),
        ({"is_index_group_leader": True}, "attention_kind"),
        ({"non_causal_multi_token_decode": True}, "attention_kind"),
        ({"non_causal": True}, "attention_kind"),
        ({"sliding_window": 128}, "attention_kind"),
        ({"attention_chunk_size": 128}, "attention_kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_page_geometry_of_other_latents_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(LayoutError) as error:
        page_geometry(CONFIG, planned(MLAAttentionSpec(**{**LATENTS, **fields})), 64)
    assert error.value.reason == reason


def test_page_geometry_of_latents_with_an_unknown_field_is_refused() -> None:
    """A later release's: whatever it says, no test has shared such a cache."""

    class Later(MLAAttentionSpec):
        pass

    with expect_error(LayoutError, reason="attention_kind", match="Later"):
        page_geometry(CONFIG, planned(Later(**LATENTS)), 64)
    spec = MLAAttentionSpec(**LATENTS)
    known = dataclasses.fields(spec)
    unknown = dataclasses.make_dataclass("Unknown", [("rotation", int, 0)]).__dataclass_fields__["rotation"]
    object.__setattr__(spec, "rotation", 1)
    with (
        mock.patch.object(cache_geometry, "fields", return_value=(*known, unknown)),
        expect_error(LayoutError, reason="attention_kind", match="rotation 1"),
    ):
        page_geometry(CONFIG, planned(spec), 64)


def speculating(*, dynamic: bool = False, heads: int = 2, tp: int = 1, pp: int = 1) -> Any:
    """`CONFIG` with a draft model of KV of its own."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**vars(CONFIG.parallel_config), "pipeline_parallel_size": pp}),
        model_config=CONFIG.model_config,
        speculative_config=SimpleNamespace(
            uses_draft_kv_cache=lambda: True,
            uses_dynamic_speculative_decoding=lambda: dynamic,
            draft_model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
            draft_parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        ),
    )


def named(*names: str) -> KVCacheConfig:
    """A cache of one group of layers under these names."""
    group = KVCacheGroupSpec([f"{name}.self_attn.attn" for name in names], FullAttentionSpec(**SIZES))
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[group])


TARGET = ("model.layers.1", "model.layers.0")


@pytest.mark.parametrize("draft", ["model.layers.2", "draft_model.model.layers.0", "mtp.layers.0"])
def test_page_order_is_the_model_then_its_draft(draft: str) -> None:
    """EAGLE and DeepSeek's MTP number on, a draft model and others begin again."""
    cache = named(*TARGET, draft)
    assert page_geometry(speculating(), cache, 64).layers == 3
    ordered = layers_in_page_order(speculating(), cache)
    assert [name.removesuffix(".self_attn.attn") for name in ordered] == [
        "model.layers.0",
        "model.layers.1",
        draft,
    ]


def test_page_of_latents_holds_those_of_a_draft_behind_them() -> None:
    names = [f"{name}.self_attn.attn" for name in (*TARGET, "draft_model.model.layers.0")]
    group = KVCacheGroupSpec(names, MLAAttentionSpec(**LATENTS))
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[group])
    assert page_geometry(speculating(), cache, 64).shape == (1, 3, 1, 64, 576)


@pytest.mark.parametrize(
    ("config", "cache", "reason"),
    [
        (speculating(dynamic=True), named(*TARGET, "model.layers.2"), "speculative"),
        (speculating(heads=4), named(*TARGET, "model.layers.2"), "speculative"),
        (speculating(tp=2), named(*TARGET, "model.layers.2"), "speculative"),
        (speculating(pp=2), named(*TARGET), "speculative"),
        (speculating(), named("model.layers.2", *TARGET), "layout"),
        (CONFIG, named(*TARGET, "model.layers.2"), "layout"),
        (CONFIG, named("model.layers.1"), "layout"),
        # LongCat-Flash has two attentions a layer.
        (CONFIG, named("model.layers.0.self_attn.0", "model.layers.0.self_attn.1"), "layout"),
    ],
)
def test_page_geometry_of_a_draft_that_lies_otherwise_is_refused(
    config: Any, cache: KVCacheConfig, reason: str
) -> None:
    with pytest.raises(LayoutError) as error:
        page_geometry(config, cache, 64)
    assert error.value.reason == reason


def test_page_geometry_leaves_out_layers_that_use_anothers_cache() -> None:
    """vLLM plans no cache for them, and registers their target's once more under their names."""
    cache = named("model.layers.0")
    assert page_geometry(CONFIG, cache, 64).layers == 1
    assert layers_in_page_order(CONFIG, cache) == ("model.layers.0.self_attn.attn",)


def test_page_order_of_a_pipeline_stage_is_by_number() -> None:
    pipeline: Any = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2))
    names = layers_in_page_order(pipeline, named("model.layers.3", "model.layers.2"))
    assert names == ("model.layers.2.self_attn.attn", "model.layers.3.self_attn.attn")
