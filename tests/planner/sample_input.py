"""An input small enough to plan in a moment: one application, two GPU types, throughputs only."""

from __future__ import annotations

from typing import Any

from cornplug.planner.inputs.schema import PlanInput


def given(*, rate: float = 7.5, **changes: Any) -> PlanInput:
    tables: dict[str, Any] = {
        "name": "sample",
        "components": [
            {
                "name": "llm7",
                "kind": "llm",
                "model": "org/llm7",
                "tp": [1],
                "profiles": [
                    {"kind": "throughput", "gpu": "A10G", "requests_per_s": 2.0},
                    {"kind": "throughput", "gpu": "A100-80", "requests_per_s": 10.0},
                ],
            }
        ],
        "applications": [
            {
                "name": "chat",
                "llm": "llm7",
                "slo": {"ttft_s": 0.5},
                "structures": ["monolith"],
                "requests": [{"name": "short", "rate": rate, "prompt": 400, "output": 60}],
            }
        ],
        "pool": [
            {"name": "a10g", "gpu": "A10G", "gpus": 1, "price_per_hour": 1.01, "stock": 32},
            {"name": "a100", "gpu": "A100-80", "gpus": 1, "price_per_hour": 3.67, "stock": 32},
        ],
        "rules": {"n_plus_one": False, "simulate": False},
    }
    return PlanInput.model_validate(tables | changes)
