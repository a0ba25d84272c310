"""Work goes where the solution sends it, within the tier that its variant asks for."""

from __future__ import annotations

import pytest

from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.pipeline.decide import decide

LLM = {"name": "llm", "kind": "llm", "tp": [1], "profiles": [
    {"kind": "throughput", "gpu": "L4", "requests_per_s": 2.0},
    {"kind": "throughput", "gpu": "H100", "requests_per_s": 9.0},
]}  # fmt: skip


def test_weights_are_shares_of_the_rate() -> None:
    given = PlanInput.model_validate(
        {
            "components": [LLM],
            "applications": [
                {"name": "a", "llm": "llm", "workload": "offline", "requests": [{"name": "r", "rate": 10.0}]}
            ],
            "pool": [
                {"name": "small", "gpu": "L4", "gpus": 1, "price_per_hour": 1.0, "stock": 1},
                {"name": "large", "gpu": "H100", "gpus": 1, "price_per_hour": 4.0, "stock": 1},
            ],
            "rules": {"max_utilisation": 1.0},
        }
    )
    [route] = decide(given, digest="0").plan.routes
    weights = {group.partition("-")[2]: w for group, w in route.stages[0].groups.items()}
    assert weights == {
        "PD-small-vllm-tp1-offline": pytest.approx(2 / 11),
        "PD-large-vllm-tp1-offline": pytest.approx(9 / 11),
    }
