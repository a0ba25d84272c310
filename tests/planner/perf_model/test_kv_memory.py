"""Room for KV: a published figure, and what makes it larger or smaller."""

from __future__ import annotations

from typing import Any

import pytest
from planner.perf_model.engine_specs import engine_spec

from cornplug.planner.inputs import component_shapes
from cornplug.planner.inputs.component_shapes import known_models
from cornplug.planner.inputs.schema import GpuSpec, LLMShape
from cornplug.planner.perf_model.engine_spec import engine_share, kv_tokens

A40 = GpuSpec(name="A40", memory_gib=48.3e9 / 2**30, bandwidth_gb_s=696, bf16_tflops=150)
H100 = GpuSpec(name="H100", memory_gib=80, bandwidth_gb_s=3350, bf16_tflops=989, generation="hopper")
# InternVL3-38B's language model, Qwen2.5-32B, without its tower.
INTERNVL3_38B = LLMShape(
    layers=64, hidden=5120, heads=40, kv_heads=8, head_dim=128, parameters=32.8e9, embedding_parameters=1.55e9
)
QWEN2_7B = LLMShape(
    layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, parameters=7.6e9, embedding_parameters=1.09e9
)


def _tokens(shape: LLMShape = QWEN2_7B, gpu: GpuSpec = H100, **other: Any) -> int:
    memory = {
        name: other.pop(name) for name in ("extra_bytes", "utilisation", "element_bytes") if name in other
    }
    spec = engine_spec(gpu, **{"chunk_tokens": 8192, "max_batch": 256, **other})
    return kv_tokens(shape, spec, **memory)


def test_kv_memory_internvl3_on_two_a40_matches_published() -> None:
    # Its developers report 72,832 tokens at a utilisation of 0.93.
    assert _tokens(INTERNVL3_38B, A40, tp=2, utilisation=0.93) == pytest.approx(72_832, rel=0.02)
    assert _tokens(INTERNVL3_38B, A40, tp=1) == 0, "66 GB of weights in 48 GB"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_kv_memory_7b_on_h100_leaves_most_to_cache(engine: str) -> None:
    tokens = _tokens(engine=engine)
    assert tokens % 16 == 0
    assert 0.65 < tokens * 57344 / (80 * 2**30) < 0.75


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_kv_memory_tower_batch_and_share_change_cache(engine: str) -> None:
    before = _tokens(engine=engine, share=0.5)
    tower = _tokens(engine=engine, share=0.5, extra_bytes=1)
    larger = _tokens(engine=engine, share=0.5, extra_bytes=57_344_001)
    assert before >= tower == pytest.approx(larger + 1000, abs=16)
    assert _tokens(engine=engine, share=0.5, chunk_tokens=16384) < before
    assert _tokens(engine=engine, share=0.5, max_batch=1024) < before
    assert _tokens(engine=engine, share=0.25) < before < _tokens(engine=engine)
    assert _tokens(engine=engine, share=0.5, quantisation="fp8") > before
    assert _tokens(engine=engine, share=0.5, element_bytes=1) == pytest.approx(2 * before, abs=32)


def test_kv_memory_more_ranks_hold_more() -> None:
    one, two = _tokens(), _tokens(tp=2)
    assert two > 2.2 * one, "half the weights and half the heads on each"
    # Beyond four KV heads they are repeated: only weights get smaller.
    assert _tokens(tp=8) < 1.2 * _tokens(tp=4)


def test_sglang_keeps_ten_gib_of_a_large_gpu() -> None:
    small_steps = {"engine": "sglang", "chunk_tokens": 2048, "max_batch": 8}
    left = 80 * 2**30 - 15.2e9 - 10 * 2**30
    assert _tokens(**small_steps) == pytest.approx(left / 57344, rel=1e-3)


def test_engine_share_flag_matches_counted_memory() -> None:
    l4 = GpuSpec(name="L4", memory_gib=24, bandwidth_gb_s=300, bf16_tflops=121)

    def share_of(gpu: GpuSpec, engine: str, share: float, *, towers: bool = False) -> float:
        return engine_share(engine_spec(gpu, engine=engine, share=share, max_batch=256), towers=towers)

    assert share_of(l4, "vllm", 0.5) == pytest.approx(0.46)
    # 24 GiB less 512 + 6144 + 128 + 512 MiB: 0.92 would leave too little for a chunk.
    assert share_of(l4, "sglang", 1.0) == pytest.approx(1 - 7296 / 1024 / 24)
    assert share_of(l4, "sglang", 0.25) == 0
    assert share_of(H100, "sglang", 1.0) == pytest.approx(1 - 10 / 80)
    with_tower = share_of(H100, "sglang", 1.0, towers=True)
    assert with_tower == pytest.approx(0.95 * (1 - 10 / 80))
    assert _tokens(engine="sglang", chunk_tokens=4096, extra_bytes=1) * 57344 == pytest.approx(
        with_tower * 80 * 2**30 - 15.23e9, rel=1e-3
    )


def test_kv_memory_cpu_core_holds_small_models_only() -> None:
    core = GpuSpec(name="cpu-core", memory_gib=4, bandwidth_gb_s=10, bf16_tflops=0.05, generation="cpu")
    tiny = LLMShape(layers=2, hidden=64, heads=2, kv_heads=2, head_dim=32, parameters=2e5)
    assert _tokens(tiny, core) * 512 == pytest.approx(4 * 2**30 - 0.5e9, rel=1e-2)
    assert _tokens(QWEN2_7B, core) == 0


H200 = GpuSpec(
    name="H200", memory_gib=131.3, bandwidth_gb_s=4800, bf16_tflops=989, fp8_tflops=1978, generation="hopper"
)
DEEPSEEK_V3 = known_models()["deepseek-ai/DeepSeek-V3"].llm


def test_weights_bytes_attention_dp_spreads_experts_only() -> None:
    # 58 layers of 256 experts of three matrices of 7168 x 2048, a byte each.
    experts = 58 * 256 * 3 * 7168 * 2048
    assert pytest.approx(experts, rel=1e-3) == DEEPSEEK_V3.expert_parameters
    whole, spread = (component_shapes.weights_bytes(DEEPSEEK_V3, "fp8", dp=dp) for dp in (1, 8))
    assert whole - spread == pytest.approx(experts * 7 / 8, rel=1e-3)
    assert component_shapes.weights_bytes(DEEPSEEK_V3, "fp8", tp=2, dp=4) < spread


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_kv_memory_mla_on_eight_gpus_holds_more_with_attention_dp(engine: str) -> None:
    """TP repeats MLA's vector on every GPU; each attention-DP group keeps its own requests'."""
    cell = {"engine": engine, "quantisation": "fp8", "chunk_tokens": 4096}
    tp8 = _tokens(DEEPSEEK_V3, H200, tp=8, **cell)
    dp8 = _tokens(DEEPSEEK_V3, H200, dp=8, **cell)
    assert 0 < dp8 < tp8, "a group has the attention's weights whole"
    assert 8 * dp8 > 3 * tp8
    assert dp8 * 61 * 576 * 2 < 131.3 * 2**30 - component_shapes.weights_bytes(DEEPSEEK_V3, "fp8", dp=8)
    assert _tokens(DEEPSEEK_V3, H200, tp=8, dp=1, **cell) == tp8


def test_kv_bytes_per_token_context_parallel_divides_repeated_kv() -> None:
    def bytes_of(shape: LLMShape, **degrees: int) -> int:
        return component_shapes.kv_bytes_per_token(shape, **degrees)

    assert bytes_of(DEEPSEEK_V3, tp=8) == 61 * 576 * 2
    assert bytes_of(DEEPSEEK_V3, tp=8, dcp=8) == 61 * 576 * 2 / 8
    # Four KV heads on eight ranks: each is there twice, and then once.
    assert bytes_of(QWEN2_7B, tp=8) == bytes_of(QWEN2_7B, tp=4) == 28 * 2 * 128 * 2
    assert bytes_of(QWEN2_7B, tp=8, dcp=2) * 8 == bytes_of(QWEN2_7B)


def test_kv_memory_mla_context_parallel_holds_as_many_times_more() -> None:
    one, eight = (_tokens(DEEPSEEK_V3, H200, tp=8, dcp=n, quantisation="fp8") for n in (1, 8))
    assert eight == pytest.approx(8 * one, rel=1e-3)


def test_kv_memory_prefill_context_parallel_divides_experts_and_repeats_kv() -> None:
    """Of two groups each has half of the experts, and all of the KV."""
    one, two = (_tokens(DEEPSEEK_V3, H200, tp=4, pcp=n, quantisation="fp8") for n in (1, 2))
    assert one == 0
    left = 0.92 * H200.memory_gib * 2**30 - component_shapes.weights_bytes(DEEPSEEK_V3, "fp8", tp=4, dp=2)
    assert 0 < two * 61 * 576 * 2 < left
