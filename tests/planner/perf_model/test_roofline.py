"""Estimated times against published measurements, and against what they must obey."""

from __future__ import annotations

from math import log

import pytest
from planner.perf_model.engine_specs import engine_spec

from cornplug.planner.inputs.schema import (
    Component,
    GeneratorShape,
    GpuSpec,
    LLMShape,
    RooflineProfile,
    TowerShape,
)
from cornplug.planner.perf_model import roofline
from cornplug.planner.perf_model.engine_spec import EngineStepTimes
from cornplug.planner.perf_model.roofline import EXPERT_LAYER_EXTRA_S, LAYER_S, NVLINK

H100 = GpuSpec(
    name="H100",
    memory_gib=80,
    bandwidth_gb_s=3350,
    bf16_tflops=989,
    fp8_tflops=1978,
    link_gb_s=450,
    nvlink=True,
    generation="hopper",
)
H200 = H100.model_copy(update={"name": "H200", "memory_gib": 131.3, "bandwidth_gb_s": 4800})
LLAMA_8B = LLMShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, parameters=8.03e9, embedding_parameters=1.05e9
)
BLOOM = LLMShape(layers=70, hidden=14336, heads=112, kv_heads=112, head_dim=128, parameters=176e9)
LLAMA_70B = LLMShape(
    layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, parameters=70.6e9, embedding_parameters=2.1e9
)
MINIMAX_M2 = LLMShape(
    layers=62, hidden=3072, heads=48, kv_heads=8, head_dim=128, parameters=229e9, active_parameters=10e9,
    embedding_parameters=1.2e9,
)  # fmt: skip
LAYERS_S = 32 * LAYER_S + RooflineProfile().step_overhead_s
"""Of an iteration of LLAMA_8B, whatever its work."""
MIXTURE = LLMShape(
    layers=10, hidden=1000, heads=16, kv_heads=16, head_dim=64, parameters=1e9, active_parameters=0.3e9,
    experts=64, experts_per_token=8,
)  # fmt: skip
"""0.8e9 of its parameters are experts', a token passes through 0.1e9 of them."""
BEFORE_DEGREES = {
    (1, 1): (0.034621286970996756, 0.0018523705003533092),
    (1, 2): (0.017521324966979862, 0.0021528368173388732),
    (2, 1): (0.019189273115128008, 0.0016006667316581361),
    (2, 2): (0.009805318039045484, 0.0018963961864472143),
    (8, 1): (0.007727762723226446, 0.0015243889051367563),
    (8, 2): (0.004074562843094704, 0.0018165657132784702),
}
"""(TP, PP) -> prefill and decode of `MIXTURE` on an H100, by the last version without DP and EP."""
MIXTRAL = LLAMA_8B.model_copy(update={"parameters": 46.7e9, "active_parameters": 12.9e9})


def steps(
    shape: LLMShape,
    *,
    gpu: GpuSpec = H100,
    quantisation: str = "none",
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    **component: object,
) -> EngineStepTimes:
    return roofline.llm_steps(
        Component.model_validate({"name": "m", "kind": "llm", **component}),
        shape,
        RooflineProfile(),
        engine_spec(gpu, tp=tp, pp=pp, dp=dp, quantisation=quantisation, chunk_tokens=8192, max_batch=256),
    )


def test_roofline_bloom_on_eight_h100_matches_splitwise() -> None:
    # Splitwise's medians: prompts to 30 %, tokens to a factor of 2 (its stack of 2023 had no graphs).
    times = steps(BLOOM, tp=8)
    assert times.prefill(1024) == pytest.approx(0.1322, rel=0.3)
    assert times.prefill(2048) == pytest.approx(0.2520, rel=0.3)
    assert 0.5 < times.decode(1) / 0.03574 < 1


def test_roofline_decode_is_bandwidth_and_prefill_is_flops() -> None:
    times = steps(LLAMA_8B)
    assert times.decode(1) == pytest.approx(2 * 8.03e9 / (0.85 * 3350e9) + LAYERS_S, rel=0.01)
    attention = 2 * 32 * 4096 * 4096**2
    flops = 2 * (8.03e9 - 1.05e9) * 4096 + attention
    assert times.prefill(4096) == pytest.approx(flops / (0.68 * 989e12) + LAYERS_S, rel=0.01)
    assert times.kv_token_s == pytest.approx(131_072 / (0.85 * 3350e9))


@pytest.mark.parametrize(
    ("shape", "gpu", "tp", "ttft_s", "tpot_s"),
    [
        (LLAMA_70B, H100, 2, 0.738, 0.0206),
        (LLAMA_70B, H100, 8, 0.301, 0.0102),
        (LLAMA_70B, H200, 1, 1.345, 0.0261),
        (MINIMAX_M2, H200, 8, 0.198, 0.0084),
    ],
)
def test_roofline_fp8_matches_published_times(
    shape: LLMShape, gpu: GpuSpec, tp: int, ttft_s: float, tpot_s: float
) -> None:
    """vLLM, 4 clients, prompts of 8192 tokens (InferenceMAX). All: `benchmarks/plan_vs_published.py`."""
    times = steps(shape, gpu=gpu, quantisation="fp8", tp=tp)
    assert times.prefill(0.9 * 8192) + times.request_overhead_s == pytest.approx(ttft_s, rel=0.4)
    assert times.decode(4) + times.kv_token_s * 4 * 8192 == pytest.approx(tpot_s, rel=0.2)


def test_roofline_fp8_prefill_is_less_than_twice_as_fast() -> None:
    plain, fp8 = (steps(LLAMA_70B, gpu=H200, quantisation=q) for q in ("none", "fp8"))
    assert 1.4 < plain.prefill(8192) / fp8.prefill(8192) < 1.85


def test_roofline_quantisation_speeds_decode_only_fp8_prefill() -> None:
    plain, fp8, awq = (steps(LLAMA_8B, quantisation=q) for q in ("none", "fp8", "awq"))
    assert awq.decode(1) < fp8.decode(1) < plain.decode(1)
    assert fp8.prefill(8192) < 0.65 * plain.prefill(8192)
    assert awq.prefill(8192) == pytest.approx(plain.prefill(8192))


def test_roofline_tp_pays_for_all_reduces() -> None:
    one, two, eight = (steps(LLAMA_8B, tp=tp) for tp in (1, 2, 8))
    assert one.prefill(8192) / 2 < two.prefill(8192) < one.prefill(8192)
    assert one.prefill(8192) / 8 < eight.prefill(8192) < two.prefill(8192)


def test_roofline_pp_raises_prefill_rate_not_latency() -> None:
    one, two = steps(BLOOM, tp=8), steps(BLOOM, tp=8, pp=2)
    assert two.prefill(2048) == pytest.approx(one.prefill(2048) / 2, rel=0.05)
    assert two.prefill(2048) + two.drain_s(2048) == pytest.approx(one.prefill(2048), rel=0.05)
    assert two.decode(1) >= one.decode(1), "a token passes through every stage"


def test_roofline_experts_in_small_batch_are_not_all_read() -> None:
    times = steps(MIXTRAL)
    dense, latency = 2 * 46.7e9 / (0.85 * 3350e9), LAYERS_S + 32 * EXPERT_LAYER_EXTRA_S
    assert times.decode(1) - latency == pytest.approx(dense * 12.9 / 46.7, rel=0.02)
    assert times.decode(64) - latency == pytest.approx(dense, rel=0.02)


def test_roofline_speculation_pays_at_small_batches() -> None:
    plain = steps(LLAMA_8B)
    fast = steps(LLAMA_8B, speculative="eagle3", acceptance=0.7)
    tokens = 1 + 0.7 + 0.49 + 0.343
    assert plain.decode(1) / tokens < fast.decode(1) < 0.6 * plain.decode(1)
    assert fast.decode(256) / plain.decode(256) > 1.2 * fast.decode(1) / plain.decode(1)
    assert steps(LLAMA_8B, speculative="eagle3").decode(1) == plain.decode(1), "no acceptance is known"


def test_roofline_long_prompt_attends_to_whole_context() -> None:
    def prefill(context: int | None) -> float:
        component = Component(name="m", kind="llm")
        return roofline.llm_steps(
            component, LLAMA_8B, RooflineProfile(),
            engine_spec(H100, chunk_tokens=2048, max_batch=256, context_tokens=context),
        ).prefill(2048)  # fmt: skip

    assert prefill(32_768) > 1.4 * prefill(None)
    assert prefill(256) < prefill(None)


def test_roofline_tower_batch_is_faster_than_single_images() -> None:
    shape = TowerShape(layers=32, hidden=1280, intermediate=5120, parameters=0.67e9, patches_per_token=4)
    curve = roofline.encode(shape, H100, RooflineProfile(), tp=1)
    one, eight = curve(1024), curve(8192)
    assert one < eight < 8 * one + curve(4096)
    assert curve(16384) == pytest.approx(2 * curve(8192) - LAYERS_S, rel=0.01), (
        "pictures do not attend to each other"
    )
    assert roofline.encode(shape, H100, RooflineProfile(), tp=2)(4096) < curve(4096)


def test_roofline_generator_time_is_flops() -> None:
    shape = GeneratorShape(parameters=20e9, flops_per_unit=4e15)
    curve = roofline.generate(shape, H100, RooflineProfile(), tp=1, quantisation="none")
    assert curve(2) == pytest.approx(2 * 4e15 / (0.5 * 989e12), rel=0.01)


def test_roofline_attention_dp_reads_all_but_experts_on_each_rank() -> None:
    each = 10 * (LAYER_S + EXPERT_LAYER_EXTRA_S + NVLINK.latency_s * 3) + RooflineProfile().step_overhead_s
    # A rank has 0.2e9 weights of all, and an eighth of the experts', of which 32 tokens leave some alone.
    read = 2 * (0.2e9 + 0.1e9 * (1 - (56 / 64) ** 32))
    sent = 10 * 2 * 7 * 1000 * 4 * 2
    found = steps(MIXTURE, dp=8, tp=1).decode(4)
    link = H100.link_gb_s * 1e9 * NVLINK.efficiency
    assert found == pytest.approx(read / (0.85 * 3350e9) + sent / link + each, rel=1e-9)


def test_roofline_attention_dp_multiplies_as_tp_of_one_group_alone() -> None:
    """The experts of eight times the tokens, on eight times the ranks; what is sent comes on top."""
    one, eight = steps(MIXTURE).prefill(8192), steps(MIXTURE, dp=8).prefill(8192)
    sent = 10 * 2 * 7 * 1000 * 8192 * 2 / (H100.link_gb_s * 1e9 * NVLINK.efficiency)
    assert eight - one == pytest.approx(sent + 10 * 3 * NVLINK.latency_s, rel=1e-6)


def test_roofline_lone_group_has_experts_of_all_ranks_to_itself() -> None:
    """Its own weights multiply on one rank; its experts' part, and what is sent for it, is an eighth."""
    times = steps(MIXTURE, dp=8)
    assert times.group is not None
    link = H100.link_gb_s * 1e9 * NVLINK.efficiency
    common = 2 * 0.1e9 * 8192 / (0.19 * 989e12) + 10 * 2 * 7 * 1000 * 8192 * 2 / link
    assert times.group.shared(8192) == pytest.approx(common, rel=1e-9)
    assert times.prefill(8192) - times.isolated_prefill(8192) == pytest.approx(common * 7 / 8, rel=1e-6)
    assert times.isolated_prefill(8192) < times.step_s(8192, 0, mean=4096) < times.step_s(8192, 0, mean=8192)
    assert times.step_s(8192, 0, mean=8192) == times.prefill(8192)
    assert times.isolated_prefill(1) > 0.9 * times.prefill(1), "the weights are read whatever their number"


def test_roofline_expert_parallel_waits_for_fullest_rank() -> None:
    even, uneven = steps(MIXTURE, dp=8), steps(MIXTURE, dp=8, expert_parallel=True)
    mean = 8192 * 8 * 8 / 8
    more = 2 * 0.1e9 * 8192 * (2 * log(8) / mean) ** 0.5 / (0.19 * 989e12)
    assert uneven.prefill(8192) - even.prefill(8192) == pytest.approx(more, rel=1e-6)
    assert uneven.decode(1) == even.decode(1), "it reads the same weights"


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("pp", [1, 2])
def test_roofline_degree_of_one_is_as_without(tp: int, pp: int) -> None:
    """Bit for bit, also where the number of experts is known."""
    plain = MIXTURE.model_copy(update={"experts": None, "experts_per_token": None})
    known, unknown = steps(MIXTURE, tp=tp, pp=pp, dp=1), steps(plain, tp=tp, pp=pp)
    assert known == unknown
    assert steps(MIXTURE, tp=1, expert_parallel=True) == steps(plain)
    assert (known.prefill(8192), known.decode(64)) == BEFORE_DEGREES[tp, pp]
