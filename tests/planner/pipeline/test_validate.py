"""What a plan's simulation says about its queues."""

from __future__ import annotations

import pytest
from planner.made_inputs import QWEN_7B, plan_input

from cornplug.planner.launch.command_lines import commands
from cornplug.planner.pipeline.decide import decide


@pytest.mark.more
def test_validate_bursts_are_not_refused_by_emitted_limit() -> None:
    """Requests that come in bursts wait together; the limit of 1 that the mean rate asks for refused them."""
    given = plan_input(
        components=[{"name": "qwen", "kind": "llm", "shape": QWEN_7B, "tp": [1], "engines": ["sglang"]}],
        applications=[
            {
                "name": "chat",
                "llm": "qwen",
                "slo": {"ttft_s": 0.5},
                "requests": [{"name": "r", "rate": 1.5, "burst": 6.0, "prompt": 600, "output": 8}],
            }
        ],
        pool=[{"name": "l4", "gpu": "L4", "gpus": 1}],
        rules={"n_plus_one": False},
    )
    plan = decide(given, digest="").plan
    (group,) = plan.groups
    assert group.queue is not None
    assert group.queue.requests > 2
    argv = commands(plan)[0].argv
    assert int(argv[argv.index("--max-queued-requests") + 1]) >= 2 * group.queue.requests
