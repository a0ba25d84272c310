"""A plan of a mixture of experts, from its input to its commands."""

from __future__ import annotations

from typing import Any

import pytest

from cornplug.planner.inputs.component_shapes import known_models
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.launch.command_lines import commands
from cornplug.planner.pipeline.decide import decide
from cornplug.planner.plan import Plan


def deepseek(engine: str, **component: Any) -> Plan:
    """Eight requests a second to DeepSeek-R1, on machines of eight H200."""
    shape = known_models()["deepseek-ai/DeepSeek-V3"].llm.model_dump(exclude_none=True)
    request = {"name": "long", "rate": 8.0, "prompt": 4000, "output": 1500}
    plan_input = PlanInput.model_validate(
        {
            "components": [
                {
                    "name": "r1", "kind": "llm", "model": "deepseek-ai/DeepSeek-R1", "shape": shape,
                    "quantisations": ["fp8"], "engines": [engine], **component,
                }
            ],
            "applications": [
                {
                    "name": "chat", "llm": "r1", "slo": {"ttft_s": 5.0, "tpot_s": 0.1},
                    "structures": ["monolith"], "requests": [request],
                }
            ],
            "pool": [{"name": "h200", "gpu": "H200", "gpus": 8, "price_per_hour": 63.3}],
            "rules": {"n_plus_one": False},
        }
    )  # fmt: skip
    return decide(plan_input, digest="0" * 64).plan


@pytest.mark.more
@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ("vllm", "--tensor-parallel-size 4 --data-parallel-size 2 --enable-expert-parallel"),
        ("sglang", "--tp-size 8 --attn-dp-size 2 --load-balance-method total_requests --ep-size 8"),
    ],
)
def test_build_plan_mixture_takes_attention_dp_where_it_saves(engine: str, flags: str) -> None:
    """TP over eight GPUs keeps MLA's vectors eight times, and room for KV is what its replicas lack."""
    without = deepseek(engine, tp=[8])
    plan = deepseek(engine, tp=[4, 8], dp=[1, 2], expert_parallel=True)
    assert plan.cost_per_hour <= 0.9 * without.cost_per_hour
    (group,) = plan.groups
    assert (group.tp, group.dp, group.expert_parallel, group.ranks) == (4, 2, True, 8)
    assert group.placement == [[node, 0] for node in range(group.replicas)], "a node each"
    forecast = plan.latency_forecasts[0]
    assert forecast.ttft.p95 is not None
    assert forecast.ttft.p95 <= 5.0
    assert plan.model_validate_json(plan.model_dump_json()) == plan
    engines = [" ".join(one.argv) for one in commands(plan) if one.kind == "engine"]
    assert len(engines) == group.replicas
    assert all(flags in line for line in engines)
