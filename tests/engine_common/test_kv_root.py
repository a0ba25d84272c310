"""Latents are of both engines for the models that a test compares, and of one engine for all others."""

from __future__ import annotations

from typing import Any

import pytest

from cornplug.engine_common.model_identity import only_engine_of_latents

ROPE: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0}
COMPARED: dict[str, Any] = {"architectures": ["DeepseekV2ForCausalLM"], "rope_parameters": ROPE}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"architectures": ["DeepseekV3ForCausalLM"]},
        {"rope_interleave": True},
        {"rope_parameters": {**ROPE, "rope_type": "deepseek_yarn", "type": "yarn"}},
    ],
)
def test_engine_of_latents_that_a_test_compares_is_both(fields: dict[str, Any]) -> None:
    assert only_engine_of_latents("vllm", COMPARED | fields) == ""
    assert only_engine_of_latents("sglang", COMPARED | fields) == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["Glm4MoeLiteForCausalLM"]},
        {"architectures": ["DeepseekV2ForCausalLM", "Another"]},
        {"architectures": ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"]},
        {"architectures": None},
        {"rope_interleave": False},
        {"rope_parameters": None},
        {"rope_parameters": {**ROPE, "rope_type": "default"}},
        {"rope_parameters": {**ROPE, "attention_factor": 1.0}},
    ],
)
def test_engine_of_latents_of_another_model_is_one(fields: dict[str, Any]) -> None:
    assert only_engine_of_latents("vllm", COMPARED | fields) == "vllm"
    assert only_engine_of_latents("sglang", COMPARED | fields) == "sglang"
