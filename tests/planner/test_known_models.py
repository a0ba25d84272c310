"""The table of models: parameters as their cards give them, shapes as their config.json gives them."""

from __future__ import annotations

from typing import Any

import pytest

from cornplug.planner.inputs import component_shapes, llm_shape
from cornplug.planner.inputs.component_shapes import known_models
from cornplug.planner.inputs.schema import InputTable

from .inputs import test_component_shapes as configs

PUBLISHED = {
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "meta-llama/Llama-3.3-70B-Instruct": 70.55,
    "meta-llama/Llama-3.1-405B-Instruct": 405.85,
    "mistralai/Mistral-7B-Instruct-v0.1": 7.24,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46.70,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": 140.6,
    "Qwen/Qwen2.5-7B-Instruct": 7.616,
    "Qwen/Qwen2.5-14B-Instruct": 14.77,
    "Qwen/Qwen2.5-32B-Instruct": 32.76,
    "Qwen/Qwen2.5-72B-Instruct": 72.71,
    "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-32B": 32.76,
    "Qwen/Qwen3-32B-FP8": 32.76,
    "Qwen/Qwen3-30B-A3B": 30.53,
    "Qwen/Qwen3-30B-A3B-FP8": 30.53,
    "Qwen/Qwen3-235B-A22B": 235.1,
    "Qwen/Qwen3-235B-A22B-FP8": 235.1,
    "deepseek-ai/DeepSeek-V3": 671.0,
    "Qwen/Qwen2-VL-7B-Instruct": 8.29,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3.755,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8.292,
    "Qwen/Qwen2.5-VL-32B-Instruct": 33.45,
    "Qwen/Qwen2.5-VL-72B-Instruct": 73.41,
    "Qwen/Qwen3-VL-2B-Instruct": 2.127,
    "Qwen/Qwen3-VL-4B-Instruct": 4.438,
    "Qwen/Qwen3-VL-8B-Instruct": 8.767,
    "Qwen/Qwen3-VL-32B-Instruct": 33.36,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 31.07,
    "Qwen/Qwen3-VL-235B-A22B-Instruct": 235.7,
    "google/gemma-3-4b-it": 4.300,
    "google/gemma-3-12b-it": 12.187,
    "google/gemma-3-27b-it": 27.432,
    "llava-hf/llava-1.5-7b-hf": 7.063,
    "llava-hf/llava-1.5-13b-hf": 13.35,
}
"""First hub id of a row -> billions of parameters of its safetensors, as the hub counts them."""

CONFIGS = {
    "meta-llama/Llama-3.1-8B-Instruct": {**configs.LLAMA3_8B, "max_position_embeddings": 131072},
    "mistralai/Mixtral-8x7B-Instruct-v0.1": {**configs.MIXTRAL_8X7B, "max_position_embeddings": 32768},
    "Qwen/Qwen3-30B-A3B": {**configs.QWEN3_30B_A3B, "max_position_embeddings": 40960},
    "deepseek-ai/DeepSeek-V3": {**configs.DEEPSEEK_V3, "max_position_embeddings": 163840},
    "google/gemma-3-4b-it": configs.GEMMA3_4B,
    "llava-hf/llava-1.5-7b-hf": configs.LLAVA_7B,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_parameters_are_published_ones(name: str) -> None:
    row = known_models()[name]
    total = row.llm.parameters + (row.tower.parameters if row.tower else 0)
    assert total == pytest.approx(PUBLISHED[name] * 1e9, rel=2e-3)


def test_known_models_every_row_is_compared() -> None:
    assert {row.ids[0] for row in known_models().values()} == set(PUBLISHED)


@pytest.mark.parametrize("name", CONFIGS)
def test_known_models_row_equals_shape_of_its_config(name: str) -> None:
    config: dict[str, Any] = CONFIGS[name]
    row = known_models()[name]
    assert fields(row.llm) == pytest.approx(fields(llm_shape.from_config(config)), rel=1e-4)
    if row.tower is not None:
        assert fields(row.tower) == pytest.approx(
            fields(component_shapes.tower_from_config(config)), rel=1e-4
        )


def fields(shape: InputTable) -> dict[str, float]:
    return shape.model_dump(exclude={"kind"}, exclude_none=True)
