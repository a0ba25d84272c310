"""The kinds of pages that a plan of several cache groups gives, and each group that gives none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expected_errors import expect_error
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
)

from cornplug.errors import LayoutError
from cornplug.vllm_connector.kv.page_kinds import combined_page_size, page_kinds

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SIZES)


def windowed(**fields: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**{**SIZES, "sliding_window": 100, **fields})


def planned(*specs: Any, **group_key: Any) -> KVCacheConfig:
    """A cache of one group a spec; layers take turns, as in vLLM's plan."""
    names = [f"model.layers.{i}.self_attn.attn" for i in range(2 * len(specs))]
    groups = [
        KVCacheGroupSpec(names[i :: len(specs)], spec, **(group_key if i == 0 else {}))
        for i, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)


def config(layers: int = 4, **parallel: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            **{
                "decode_context_parallel_size": 1,
                "prefill_context_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "tensor_parallel_size": 1,
                **parallel,
            }
        ),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: 2,
            get_total_num_hidden_layers=lambda: layers,
            hf_config=SimpleNamespace(),
        ),
        cache_config=SimpleNamespace(cache_dtype="fp8"),
    )


def test_page_kinds_of_windows_and_full_attention_name_layers_and_window() -> None:
    kinds = page_kinds(config(), planned(windowed(), FULL), 64)
    assert [(kind.geometry.group, kind.geometry.window) for kind in kinds] == [((0, 2), 100), ((1, 3), 0)]
    assert kinds[0].geometry.shape == (2, 2, 2, 64, 32)
    assert kinds[0].geometry.spec()["group"] == {"layers": [0, 2], "window": 100}
    assert combined_page_size(kinds).page_bytes == 2 * kinds[0].geometry.page_bytes


def test_page_kinds_of_fp8_are_bytes() -> None:
    fields = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
    kinds = page_kinds(config(), planned(windowed(**fields), FullAttentionSpec(**{**SIZES, **fields})), 64)
    assert [(kind.geometry.dtype, kind.geometry.quantised) for kind in kinds] == [("uint8", "fp8_e4m3")] * 2


def test_page_kinds_of_engine_without_kv_are_refused() -> None:
    """As one of several connectors of an engine that runs its encoder only."""
    with expect_error(LayoutError, reason="layout", match="has no KV"):
        page_kinds(config(), planned(), 64)


def test_page_kinds_of_one_group_is_the_page_of_the_model() -> None:
    """Its keys are those of engines that keep all tokens, and of SGLang."""
    (kind,) = page_kinds(config(2), planned(FULL), 64)
    assert kind.geometry.spec() == {
        "layout": "head-layer-kv-token-dim/1",
        "shape": [2, 2, 2, 64, 32],
        "dtype": "bfloat16",
    }


def test_page_kinds_of_layers_that_read_anothers_cache_are_those_of_the_other_layers() -> None:
    """Gemma 3n: vLLM plans no cache for its last layers, which every page key counts with the config."""
    kinds = page_kinds(config(6), planned(windowed(), FULL), 64)
    assert [kind.geometry.group for kind in kinds] == [(0, 2), (1, 3)]


def test_page_kinds_of_two_caches_in_one_layer_are_refused() -> None:
    cache = planned(windowed(), FULL)
    cache.kv_cache_groups[0].layer_names[0] = cache.kv_cache_groups[1].layer_names[0]
    with pytest.raises(LayoutError) as error:
        page_kinds(config(), cache, 64)
    assert error.value.reason == "hybrid"


@pytest.mark.parametrize(
    ("end", "first"), [(64, 0), (99, 0), (128, 16), (1000, 896), (1002, 896), (1011, 912)]
)
def test_page_kind_needed_from_is_the_block_that_vllm_keeps(end: int, first: int) -> None:
    kind = page_kinds(config(), planned(windowed(), FULL), 64)[0]
    assert kind.first_needed_token(end) == first


REFUSED = [
    ([windowed(), windowed(sliding_window=50)], "hybrid"),
    ([FULL, ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64)], "hybrid"),
    ([FULL, MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))], "hybrid"),
    ([FULL, windowed(extra_retained_tokens=2)], "attention_kind"),
    ([FULL, windowed(num_kv_heads=4)], "hybrid"),
    ([FULL, windowed(block_size=48)], "layout"),
]


@pytest.mark.parametrize(("specs", "reason"), REFUSED)
def test_page_kinds_of_other_groups_are_refused(specs: list[Any], reason: str) -> None:
    with pytest.raises(LayoutError) as error:
        page_kinds(config(), planned(*specs), 64)
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        (config(pipeline_parallel_size=2), "hybrid"),
        # A layer behind the model's, of a draft.
        (config(3), "hybrid"),
    ],
)
def test_page_kinds_of_other_engines_are_refused(ours: Any, reason: str) -> None:
    with pytest.raises(LayoutError) as error:
        page_kinds(ours, planned(FULL, windowed()), 64)
    assert error.value.reason == reason


@pytest.mark.parametrize(
    "group_key",
    [{"host_resident": True}, {"enable_kv_transfer": False}, {"role": KVCacheGroupRole.HISPARSE_SOURCE}],
)
def test_page_kinds_of_a_group_with_a_role_are_refused(group_key: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        page_kinds(config(), planned(FULL, windowed(), **group_key), 64)
