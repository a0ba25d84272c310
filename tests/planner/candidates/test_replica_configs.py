"""Where a service may run at all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cornplug.planner.candidates.replica_configs import Service, footprints
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
    assert {f.parallelism.tp for f in found} == tp


MIXTURE = {**SHAPE, "heads": 32, "active_parameters": 1e9, "experts": 64, "experts_per_token": 8}


def _footprints(tasks: str = "PD", gpu: str = "H200", **component: Any) -> tuple[set[str], Counter[str]]:
    llm = {"name": "moe", "kind": "llm", "shape": MIXTURE, "engines": ["vllm"], **component}
    plan_input = PlanInput.model_validate(
        {
            "components": [llm],
            "applications": [{"name": "a", "llm": "moe", "requests": [{"name": "r", "rate": 1}]}],
            "pool": [{"name": "n", "gpu": gpu, "gpus": 8, "price_per_hour": 1.0}],
        }
    )
    dropped: Counter[str] = Counter()
    gpus = gpu_table()
    nodes = node_classes(plan_input.pool, gpus, price_table())
    service = Service(tasks, plan_input.components[0])
    found = footprints(service, nodes, gpus, plan_input.rules, ("online",), dropped)
    return {f.name.split(":")[2] for f in found}, dropped


def test_replica_configs_attention_dp_stays_inside_node() -> None:
    found, dropped = _footprints(dp=[1, 8])
    assert found == {"tp1", "tp2", "tp4", "tp8", "tp1dp8"}
    assert list(dropped) == ["moe/PD: attention data parallelism is limited to one node (n has 8 GPUs)"]
    assert _footprints(dp=[4], tp=[1, 2], expert_parallel=True)[0] == {"tp1dp4ep", "tp2dp4ep"}


def test_replica_configs_without_degrees_are_as_before() -> None:
    assert _footprints()[0] == {"tp1", "tp2", "tp4", "tp8"}
    assert _footprints(expert_parallel=True)[0] == {"tp1", "tp2ep", "tp4ep", "tp8ep"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tasks": "D"}, "for engines that both prefill and decode"),
        ({"pp": [2]}, "with pipeline parallelism"),
        ({"gpu": "L40S"}, "L40S has no NVLink"),
        ({"shares": [0.5]}, "a fraction of a GPU cannot have parallel ranks"),
        ({"expert_parallel": True, "shape": {**MIXTURE, "experts": 60}}, "60 experts cannot be distributed"),
    ],
)
def test_replica_configs_attention_dp_names_reason_against(changes: dict[str, Any], reason: str) -> None:
    found, dropped = _footprints(**{"dp": [8], "tp": [1], **changes})
    assert not found
    assert reason in next(iter(dropped))


LATENT = {**MIXTURE, "mla_rank": 576}


def test_replica_configs_context_parallel_divides_repeated_kv_only() -> None:
    found, _ = _footprints(dcp=[1, 2, 4, 8], tp=[4, 8], shape=LATENT)
    assert found == {"tp4", "tp8", *(f"tp4dcp{n}" for n in (2, 4)), *(f"tp8dcp{n}" for n in (2, 4, 8))}
    # Four KV heads: tp = 8 has each twice.
    assert _footprints(dcp=[2, 4], tp=[4, 8])[0] == {"tp8dcp2"}
    assert _footprints(dcp=[2], dp=[4], tp=[2], shape=LATENT)[0] == {"tp2dcp2dp4"}


def test_replica_configs_prefill_context_parallel_multiplies_gpus_inside_a_node() -> None:
    found, dropped = _footprints(pcp=[1, 2, 4, 8], tp=[2], shape=LATENT)
    assert found == {"tp2", "tp2pcp2", "tp2pcp4"}
    assert any("prefill context parallelism is limited to one node" in said for said in dropped)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tasks": "P"}, "for vLLM engines that both prefill and decode text"),
        ({"engines": ["sglang", "vllm"], "shape": MIXTURE}, "only for models with latent attention (MLA)"),
        ({"speculative": "mtp", "acceptance": 0.7}, "with speculative decoding"),
        ({"pp": [2]}, "with pp, dp or dcp"),
        ({"dp": [2]}, "with pp, dp or dcp"),
        ({"dcp": [2]}, "with pp, dp or dcp"),
    ],
)
def test_replica_configs_prefill_context_parallel_names_reason_against(
    changes: dict[str, Any], reason: str
) -> None:
    found, dropped = _footprints(**{"pcp": [2], "tp": [2], "shape": LATENT, **changes})
    assert not found
    assert any(reason in said for said in dropped)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tasks": "D"}, "for vLLM engines that both prefill and decode"),
        ({"engines": ["sglang", "vllm"], "tp": [1]}, "for vLLM engines"),
        ({"speculative": "mtp", "acceptance": 0.7}, "with speculative decoding"),
        ({"tp": [1]}, "1 GPUs cannot be divided into 2 parts"),
        ({"tp": [4], "shape": MIXTURE}, "with tp = 4, fewer than 2 GPUs hold each of the 4 KV heads"),
        (
            {"shape": {**MIXTURE, "heads": 8, "kv_heads": 8}},
            "with tp = 8, fewer than 2 GPUs hold each of the 8 KV heads",
        ),
    ],
)
def test_replica_configs_context_parallel_names_reason_against(changes: dict[str, Any], reason: str) -> None:
    found, dropped = _footprints(**{"dcp": [2], "tp": [8], "shape": LATENT, **changes})
    assert not found
    assert any(reason in said for said in dropped)
