"""What context parallelism sends and saves, by hand."""

from __future__ import annotations

import pytest
from planner.perf_model.engine_specs import engine_spec

from cornplug.planner.inputs.gpu_catalog import gpu_table
from cornplug.planner.inputs.schema import Component, LLMShape, RooflineProfile
from cornplug.planner.perf_model import roofline
from cornplug.planner.perf_model.engine_spec import EngineStepTimes
from cornplug.planner.perf_model.roofline import NVLINK, dcp_attention_bytes, dcp_prefill_bytes, pcp_kv_bytes

H200 = gpu_table()["H200"]
MLA = LLMShape(
    layers=10, hidden=1000, heads=16, kv_heads=16, head_dim=64, parameters=1e9, mla_rank=72, max_context=65536
)
GQA = LLMShape(layers=10, hidden=1000, heads=16, kv_heads=2, head_dim=64, parameters=1e9)


def steps(shape: LLMShape, dcp: int, context_tokens: int = 20_000) -> EngineStepTimes:
    return roofline.llm_steps(
        Component(name="m", kind="llm"), shape, RooflineProfile(),
        engine_spec(H200, tp=8, dcp=dcp, context_tokens=context_tokens),
    )  # fmt: skip


def test_attention_bytes_are_queries_and_outputs_of_own_heads_to_each_rank() -> None:
    # Two heads a rank; two values each way; three other ranks.
    assert dcp_attention_bytes(GQA, 5, layers=10, tp=8, dcp=4) == 10 * 2 * 5 * 2 * 64 * 3 * 2
    assert dcp_attention_bytes(MLA, 5, layers=10, tp=8, dcp=8) == 10 * 2 * 5 * 2 * 72 * 7 * 2


def test_prefill_bytes_are_of_earlier_chunks_only() -> None:
    args = {"layers": 10, "tp": 8, "pp": 1, "dcp": 4}
    assert dcp_prefill_bytes(MLA, 4096, 0, **args) == dcp_prefill_bytes(GQA, 4096, 0, **args) == 0
    assert dcp_prefill_bytes(MLA, 4096, 16_000, **args) == 16_000 * 10 * 72 * 2 * 3 / 4
    assert dcp_prefill_bytes(GQA, 4096, 16_000, **args) == dcp_attention_bytes(
        GQA, 4096, layers=10, tp=8, dcp=4
    )


@pytest.mark.parametrize(("shape", "dcp"), [(MLA, 8), (GQA, 4)])
def test_roofline_context_parallel_reads_a_part_and_sends_for_it(shape: LLMShape, dcp: int) -> None:
    before, after = steps(shape, 1), steps(shape, dcp)
    assert after.kv_token_s == pytest.approx(before.kv_token_s / dcp)
    link = H200.link_gb_s * 1e9 * NVLINK.efficiency
    rounds = {8: 3, 4: 2}[dcp] * 10 * NVLINK.latency_s
    sent = dcp_attention_bytes(shape, 64, layers=10, tp=8, dcp=dcp) / link
    assert after.decode(64) - before.decode(64) == pytest.approx(sent + rounds, rel=1e-6)
    sent = dcp_prefill_bytes(shape, 4096, 20_000 - 4096, layers=10, tp=8, pp=1, dcp=dcp) / link
    assert after.prefill(4096) - before.prefill(4096) == pytest.approx(sent + rounds, rel=1e-6)


def test_roofline_context_parallel_short_prompts_send_nothing() -> None:
    assert steps(MLA, 8, context_tokens=500).prefill(4096) == steps(MLA, 1, context_tokens=500).prefill(4096)


MIXTURE = MLA.model_copy(update={"active_parameters": 2e8, "experts": 64, "experts_per_token": 4})


def split_steps(
    shape: LLMShape, *, pcp: int = 1, dp: int = 1, context_tokens: int = 20_000
) -> EngineStepTimes:
    return roofline.llm_steps(
        Component(name="m", kind="llm"), shape, RooflineProfile(),
        engine_spec(H200, tp=2, dp=dp, pcp=pcp, context_tokens=context_tokens),
    )  # fmt: skip


@pytest.mark.parametrize(("shape", "dp"), [(MIXTURE, 4), (MLA, 1)])
def test_roofline_prefill_context_parallel_divides_tokens_and_gathers_kv(shape: LLMShape, dp: int) -> None:
    """A group's part of the tokens takes what attention-DP would take for so many; then KV is gathered."""
    alone, split = split_steps(shape, dp=dp), split_steps(shape, pcp=4)
    link = H200.link_gb_s * 1e9 * NVLINK.efficiency
    rounds = 2 * 10 * NVLINK.latency_s
    sent = pcp_kv_bytes(shape, 4096, pp=1, pcp=4)
    assert sent == 4096 * 10 * 72 * 2 * 3 / 4
    assert split.prefill(4096) == pytest.approx(alone.prefill(1024) + sent / link + rounds)
    sent = pcp_kv_bytes(shape, 64, pp=1, pcp=4)
    assert split.decode(64) == pytest.approx(alone.decode(16) + sent / link + rounds)
    assert split.kv_token_s == pytest.approx(alone.kv_token_s / 4)
    assert split.group is None


def test_roofline_prefill_context_parallel_attends_to_whole_prompt() -> None:
    whole = split_steps(MLA, pcp=4, context_tokens=4096)
    by_itself = roofline.llm_steps(
        Component(name="m", kind="llm"), MLA, RooflineProfile(), engine_spec(H200, tp=2, pcp=4)
    )  # fmt: skip
    assert by_itself.prefill(4096) == whole.prefill(4096)
