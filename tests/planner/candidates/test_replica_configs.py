"""Where a service may run at all."""

from __future__ import annotations

from collections import Counter

import pytest

from cornplug.planner.candidates.replica_configs import footprints
from cornplug.planner.candidates.services import Service
from cornplug.planner.inputs.gpu_catalog import gpu_table, node_classes, price_table
from cornplug.planner.inputs.schema import PlanInput

SHAPE = {"layers": 28, "hidden": 3584, "kv_heads": 4, "head_dim": 128, "parameters": 7.6e9}


@pytest.mark.parametrize(("heads", "tp"), [(28, {1, 2, 4}), (32, {1, 2, 4, 8}), (None, {1, 2, 4, 8})])
def test_replica_configs_tp_divides_heads(heads: int | None, tp: set[int]) -> None:
    llm = {"name": "llm", "kind": "llm", "shape": {**SHAPE, "heads": heads} if heads else None}
    plan_input = PlanInput.model_validate(
        {
            "components": [llm],
            "applications": [{"name": "a", "llm": "llm", "requests": [{"name": "r", "rate": 1}]}],
            "pool": [{"name": "h", "gpu": "H100"}],
        }
    )
    service = Service("PD", plan_input.components[0])
    gpus = gpu_table()
    nodes = node_classes(plan_input.pool, gpus, price_table())
    found = footprints(service, nodes, gpus, plan_input.rules, ("online",), Counter())
    assert {f.tp for f in found} == tp
