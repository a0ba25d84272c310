"""Fields of a component against each other: the errors of expert and attention data parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from expected_errors import expect_error
from pydantic import ValidationError

from cornplug.errors import ConfigError
from cornplug.planner.inputs import component_shapes, llm_shape
from cornplug.planner.inputs.schema import Component, LLMShape

from .test_component_shapes import DEEPSEEK_V3, MIXTRAL_8X7B, QWEN2_7B, QWEN3_30B_A3B

DENSE = {"layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "head_dim": 128, "parameters": 7.6e9}
SPARSE = {**DENSE, "active_parameters": 1e9}
MIXTURE = {**SPARSE, "experts": 64, "experts_per_token": 8}


def component(**fields: Any) -> Component:
    return Component.model_validate({"name": "m", "kind": "llm", **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"shape": DENSE, "dp": [1, 8]}, "dp: 'm' is a dense model without experts. Remove it."),
        ({"shape": DENSE, "expert_parallel": True}, "expert_parallel: 'm' is a dense model"),
        ({"shape": SPARSE, "dp": [8]}, "dp: the number of experts of 'm' is unknown. Add experts and"),
        ({"kind": "generator", "dp": [8]}, "dp: generator 'm' has no experts. Remove it."),
        ({"engines": ["sglang"], "dcp": [2]}, "dcp: supported on vLLM only. Add"),
        ({"kind": "encoder", "dcp": [2]}, "dcp: encoder 'm' has no KV. Remove it."),
        ({"engines": ["sglang"], "pcp": [2]}, "pcp: supported on vLLM only. Add"),
        ({"shape": MIXTURE, "dp": [3]}, "dp: [3] is not a list of allowed sizes"),
        ({"shape": {**MIXTURE, "experts": None}}, "experts: missing, but the shape has experts"),
        ({"shape": {**DENSE, "experts": 8, "experts_per_token": 2}}, "active_parameters: missing"),
        (
            {"shape": {**MIXTURE, "experts_per_token": 64}},
            "experts_per_token: 64 of 64 experts. Write a smaller",
        ),
    ],
)
def test_component_wrong_degrees_name_field_and_remedy(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as raised:
        component(**fields)
    assert any(e["msg"].startswith(said) for e in raised.value.errors())


def test_component_degrees_of_mixture_are_kept() -> None:
    made = component(shape=MIXTURE, dp=[1, 8], expert_parallel=True)
    assert (made.dp, made.expert_parallel) == ([1, 8], True)
    assert (component(shape=DENSE).dp, component(shape=DENSE).expert_parallel) == ([1], False)


def test_resolve_dense_checkpoint_refuses_attention_dp(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B))
    with expect_error(ConfigError, field="components[m].dp", match="'m'"):
        component_shapes.resolve([component(checkpoint=str(tmp_path), dp=[8])])
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL_8X7B))
    (found,) = component_shapes.resolve([component(checkpoint=str(tmp_path), dp=[8])])
    assert isinstance(found.shape, LLMShape)
    assert (found.shape.experts, found.shape.experts_per_token) == (8, 2)


@pytest.mark.parametrize(
    ("config", "of_a_layer", "experts"),
    [
        (MIXTRAL_8X7B, 3 * 4096 * 14336, 32 * 8),
        (QWEN3_30B_A3B, 3 * 2048 * 768, 48 * 128),
        (DEEPSEEK_V3, 3 * 7168 * 2048, 58 * 256),
    ],
    ids=["mixtral", "qwen3", "deepseek"],
)
def test_llm_shape_expert_parameters_are_those_of_config(
    config: dict[str, Any], of_a_layer: int, experts: int
) -> None:
    assert llm_shape.from_config(config).expert_parameters == pytest.approx(of_a_layer * experts, rel=1e-9)
