"""Sizes of prefill-decode buffers, against figures worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornplug.planner.launch import connections
from cornplug.planner.plan import KVGeometry

LLAMA_70B = KVGeometry(layers=80, kv_heads=8, head_dim=128, element_bytes=2, max_prompt_tokens=8192)
DEEPSEEK_V3 = KVGeometry(
    layers=61, kv_heads=1, head_dim=576, element_bytes=2, mla=True, max_prompt_tokens=8192
)
OPT_66B = KVGeometry(layers=64, kv_heads=72, head_dim=128, element_bytes=2, max_prompt_tokens=512)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("kv", "tp", "pp", "prompt", "buffer_mib"),
    [
        (LLAMA_70B, 1, 1, 2 * 80 * 8192 * 8 * 128 * 2, 2560),
        (LLAMA_70B, 4, 1, 2 * 80 * 8192 * 2 * 128 * 2, 768),
        (LLAMA_70B, 16, 1, 2 * 80 * 8192 * 1 * 128 * 2, 512),
        (LLAMA_70B, 1, 2, 2 * 40 * 8192 * 8 * 128 * 2, 1280),
        (DEEPSEEK_V3, 1, 1, 61 * 8192 * 576 * 2, 768),
        (DEEPSEEK_V3, 8, 1, 61 * 8192 * 576 * 2, 768),
        (OPT_66B, 1, 1, 2 * 64 * 512 * 72 * 128 * 2, 1280),
    ],
)
def test_buffer_bytes_of_known_models_hold_longest_prompt(
    kv: KVGeometry, tp: int, pp: int, prompt: int, buffer_mib: int
) -> None:
    assert connections.prompt_bytes(kv, tp=tp, pp=pp) == prompt
    assert connections.buffer_bytes(kv, tp=tp, pp=pp) == buffer_mib * MIB


def test_prompt_bytes_opt_66b_match_distserve() -> None:
    """OPT-66B at 512 tokens: 1.13 GB (DistServe, section 3.3)."""
    assert connections.prompt_bytes(OPT_66B) / 2**30 == pytest.approx(1.13, rel=0.01)


def test_prompt_bytes_round_up_to_whole_pages() -> None:
    one = LLAMA_70B.model_copy(update={"max_prompt_tokens": 1})
    assert connections.prompt_bytes(one) == 2 * 80 * 128 * 8 * 128 * 2
    assert connections.page_tokens(one) == 128
    assert connections.page_tokens(DEEPSEEK_V3) == 64


@given(
    st.integers(1, 128), st.integers(1, 128), st.sampled_from([64, 128, 576]), st.integers(1, 200_000),
    st.sampled_from([1, 2]), st.booleans(), st.sampled_from([1, 2, 4, 8]),
)  # fmt: skip
def test_buffer_bytes_any_geometry_are_least_that_fits(
    layers: int, heads: int, dim: int, tokens: int, element: int, mla: bool, tp: int
) -> None:
    kv = KVGeometry(
        layers=layers, kv_heads=heads, head_dim=dim, element_bytes=element, mla=mla, max_prompt_tokens=tokens
    )
    size = connections.buffer_bytes(kv, tp=tp)
    assert size % (256 * MIB) == 0
    assert size - 256 * MIB < connections.prompt_bytes(kv, tp=tp) <= size


def test_vllm_together_two_connectors_become_multi_connector() -> None:
    nixl = connections.vllm_config("P", "nixl")
    assert connections.combine_vllm_connectors(nixl) == nixl
    both = connections.combine_vllm_connectors(nixl, {"kv_connector": "CornplugConnector"})
    assert both["kv_connector"] == "MultiConnector"
    assert [c["kv_connector"] for c in both["kv_connector_extra_config"]["connectors"]] == [
        "NixlConnector",
        "CornplugConnector",
    ]
    assert both["kv_load_failure_policy"] == "recompute"


def test_sglang_staging_mla_needs_none() -> None:
    assert connections.sglang_staging(DEEPSEEK_V3, tp=8, pp=1) == {}
    assert connections.sglang_staging(LLAMA_70B, tp=4, pp=1) == {
        "SGLANG_DISAGG_STAGING_BUFFER": "true",
        "SGLANG_DISAGG_STAGING_POOL_SIZE_MB": "768",
    }
