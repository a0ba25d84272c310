"""Which profile a cell takes, and what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from expected_errors import expect_error
from planner.perf_model.engine_specs import engine_spec

from cornplug.errors import ConfigError
from cornplug.planner.inputs import profile_tables
from cornplug.planner.inputs.schema import Component, GeneratorShape, GpuSpec, LLMShape, TowerShape
from cornplug.planner.perf_model import profile_lookup
from cornplug.planner.perf_model.engine_spec import ANY_CLASS, CellHardware

L4 = GpuSpec(
    name="L4",
    memory_gib=24,
    bandwidth_gb_s=300,
    bf16_tflops=121,
    fp8_tflops=242,
    generation="ada",
    source="a table",
)
A10G = GpuSpec(name="A10G", memory_gib=22.35, bandwidth_gb_s=600, bf16_tflops=70)
LLM = LLMShape(layers=28, hidden=1536, heads=12, kv_heads=2, head_dim=128, parameters=1.54e9)
TOWER = TowerShape(layers=32, hidden=1280, intermediate=5120, parameters=0.67e9)
GENERATOR = GeneratorShape(parameters=1e9, flops_per_unit=1e13)
POINTS = {"prefill_tokens": [1024], "prefill_s": [0.1], "decode_requests": [1, 8], "decode_s": [0.01, 0.02]}


def llm(*given: dict[str, Any], **more: Any) -> Component:
    return Component.model_validate({"name": "m", "kind": "llm", "profiles": list(given), **more})


def encoder(*given: dict[str, Any]) -> Component:
    return Component.model_validate({"name": "vit", "kind": "encoder", "profiles": list(given)})


def take(
    component: Component, shape: profile_lookup.Shape | None = LLM, gpu: GpuSpec = L4, **cell: Any
) -> CellHardware | None:
    parts = {name: cell.pop(name) for name in ("role", "tower", "generator") if name in cell}
    spec = engine_spec(gpu, **{"chunk_tokens": 2048, **cell})
    return profile_lookup.hardware(component, shape, spec, **{"role": "PD", **parts})


def test_profile_lookup_first_fit_is_taken() -> None:
    component = llm(
        {"kind": "table", "gpu": "H100", **POINTS, "source": "elsewhere"},
        {"kind": "table", "gpu": "L4", "engine": "sglang", **POINTS, "source": "the other engine"},
        {"kind": "table", "gpu": "L4", **POINTS, "kv_tokens": 5000, "source": "here"},
        {"kind": "roofline"},
    )
    found = take(component)
    assert found is not None
    assert (found.source, found.measured, found.kv_tokens) == ("here", True, 5000)
    assert found.steps is not None
    assert (found.steps.prefill(2048), found.steps.decode(8)) == pytest.approx((0.2, 0.02))
    other = take(component, engine="sglang")
    assert other is not None
    assert other.source == "the other engine"
    assert other.kv_tokens > 100_000, "not measured: from shape and memory"
    estimate = take(component, tp=2)
    assert estimate is not None
    assert (estimate.source, estimate.measured) == ("roofline (L4, a table)", False)


def test_profile_lookup_table_without_role_does_not_fit() -> None:
    prefill_only = {"kind": "table", "gpu": "L4", "prefill_tokens": [1024], "prefill_s": [0.1]}
    component = llm(prefill_only)
    assert take(component, role="P") is not None
    assert take(component, role="D") is None
    assert take(component, role="PD") is None


def test_profile_lookup_throughput_scales_with_share() -> None:
    component = llm(
        {"kind": "throughput", "gpu": "L4", "role": "P", "requests_per_s": 8.0},
        {"kind": "throughput", "gpu": "L4", "requests_per_s": {"a/b": 3.0}, "tpot_s": {"a/b": 0.04}},
    )
    prefill, whole = take(component, None, role="P", share=0.5), take(component, None)
    assert prefill is not None
    assert prefill.requests_per_s == {ANY_CLASS: 4.0}
    assert whole is not None
    assert (whole.rate_of("a/b"), whole.rate_of("a/c"), whole.tpot_s) == (3.0, None, {"a/b": 0.04})


def test_profile_lookup_half_gpu_halves_speed_and_cache() -> None:
    whole, half = take(llm({"kind": "roofline"})), take(llm({"kind": "roofline"}), share=0.5)
    assert whole is not None
    assert half is not None
    assert whole.steps is not None
    assert half.steps is not None
    assert half.steps.decode(4) == pytest.approx(2 * whole.steps.decode(4))
    assert 0 < half.kv_tokens < whole.kv_tokens / 2


def test_profile_lookup_measured_cache_is_not_for_half_gpu() -> None:
    component = llm({"kind": "table", "gpu": "L4", **POINTS, "kv_tokens": 5000})
    assert take(component, None, share=0.5) is None
    half = take(component, share=0.5)
    assert half is not None
    assert half.kv_tokens > 5000


def test_profile_lookup_fp8_needs_gpu_support() -> None:
    component = llm({"kind": "roofline"}, quantisations=["none", "fp8"])
    assert take(component, quantisation="fp8") is not None
    assert take(component, gpu=A10G, quantisation="fp8") is None


def test_profile_lookup_roofline_of_another_gpu_does_not_fit() -> None:
    slow = {"kind": "roofline", "gpu": "A10G", "compute_efficiency": 0.1}
    plain, elsewhere = take(llm({"kind": "roofline"})), take(llm(slow, {"kind": "roofline"}))
    here = take(llm(slow, {"kind": "roofline"}), gpu=A10G)
    assert plain is not None
    assert elsewhere == plain
    assert take(llm(slow)) is None
    assert here is not None
    assert here != take(llm({"kind": "roofline"}), gpu=A10G)


def test_profile_lookup_tower_takes_memory_and_keeps_precision() -> None:
    component = llm({"kind": "roofline"}, quantisations=["fp8"])
    vit = encoder(
        {"kind": "table", "gpu": "L4", "encode_patches": [1024], "encode_s": [0.05], "source": "vit's"}
    )
    bare = take(component, quantisation="fp8")
    both = take(component, quantisation="fp8", role="EPD", tower=(vit, TOWER))
    assert bare is not None
    assert both is not None
    assert both.encode is not None
    assert both.encode(2048) == pytest.approx(0.1)
    assert (both.source, both.measured) == ("roofline (L4, a table); vit's", False)
    kv_bytes = 2 * 28 * 2 * 128 * 2
    assert bare.kv_tokens - both.kv_tokens == pytest.approx(2 * 0.67e9 / kv_bytes, abs=32)
    assert (
        take(component, quantisation="fp8", role="EPD", tower=(encoder({**_throughput("L4")}), TOWER)) is None
    )


def _throughput(gpu: str) -> dict[str, Any]:
    return {"kind": "throughput", "gpu": gpu, "requests_per_s": 1.0}


def test_profile_lookup_tower_or_generator_alone_has_times() -> None:
    vit = encoder({"kind": "roofline"})
    found = take(vit, TOWER, role="E")
    assert found is not None
    assert found.encode is not None
    assert found.steps is None
    slow = take(vit, TOWER, role="E", share=0.25)
    assert slow is not None
    assert slow.encode is not None
    assert slow.encode(500) == pytest.approx(4 * found.encode(500))
    tts = Component(name="tts", kind="generator")
    made = take(tts, GENERATOR, role="G")
    assert made is not None
    assert made.generate is not None
    assert take(tts, GENERATOR.model_copy(update={"parameters": 20e9}), role="G") is None, "40 GB on an L4"


def test_profile_lookup_generator_in_engine_has_both_times() -> None:
    tts = Component(name="tts", kind="generator")
    found = take(llm({"kind": "roofline"}), role="PDG", generator=(tts, GENERATOR))
    assert found is not None
    assert found.generate is not None
    assert found.steps is not None
    assert found.source == "roofline (L4, a table)"


def test_profile_lookup_table_file_gives_source(tmp_path: Path) -> None:
    rows = (
        profile_tables.ProfileRow("prefill", "L4", 512, 0.05),
        profile_tables.ProfileRow("decode", "L4", 1, 0.01),
    )
    profile_tables.write(tmp_path / "t.csv", profile_tables.ProfileTable(rows, {"date": "today"}))
    component = llm({"kind": "table", "gpu": "L4", "file": tmp_path / "t.csv", "source": "bench"})
    found = take(component)
    assert found is not None
    assert found.source == "bench: date today"


def test_points_that_make_no_curve_are_refused() -> None:
    component = llm({"kind": "table", "gpu": "L4", "prefill_tokens": [512, 256], "prefill_s": [0.05, 0.1]})
    with expect_error(ConfigError, field="profiles.prefill_tokens"):
        take(component, role="P")
