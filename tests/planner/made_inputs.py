"""Inputs of plans for tests: small tables that a reader can hold in mind."""

from __future__ import annotations

from typing import Any

from cornplug.planner.inputs.schema import PlanInput

QWEN_7B = {
    "kind": "llm", "layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "head_dim": 128,
    "parameters": 7.6e9,
}  # fmt: skip
QWEN_VIT = {
    "kind": "tower", "layers": 32, "hidden": 1280, "intermediate": 5120, "parameters": 6.7e8,
    "patches_per_token": 4,
}  # fmt: skip


def plan_input(**tables: Any) -> PlanInput:
    return PlanInput.model_validate(tables)


def two_apps(**rules: Any) -> PlanInput:
    """Chat with images and document questions, with one tower and one model."""
    picture = {"encoder": "vit", "tokens": 600}
    return plan_input(
        components=[
            {"name": "vit", "kind": "encoder", "shape": QWEN_VIT, "shares": [0.25, 0.5, 1]},
            {"name": "qwen", "kind": "llm", "shape": QWEN_7B, "tp": [1, 2], "quantisations": ["none", "fp8"]},
        ],
        applications=[
            {
                "name": "chat",
                "llm": "qwen",
                "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
                "requests": [
                    {"name": "text", "rate": 10, "prompt": {"mean": 800, "cv": 0.8}, "output": {"mean": 200}},
                    {"name": "picture", "rate": 8, "prompt": 100, "output": 150, "media": [picture]},
                ],
            },
            {
                "name": "doc",
                "llm": "qwen",
                "slo": {"ttft_s": 4.0, "tpot_s": 0.1},
                "requests": [
                    {
                        "name": "page",
                        "rate": 3,
                        "prompt": 400,
                        "output": 300,
                        "media": [picture | {"items": 4}],
                    }
                ],
            },
        ],
        pool=[
            {"name": "l4", "gpu": "L4", "gpus": 4},
            {"name": "h100", "gpu": "H100", "gpus": 8},
        ],
        rules=rules,
    )
