"""Inputs decided from end to end: what a user would miss if it were not so."""

from __future__ import annotations

from typing import Any

import pytest

from cornplug.planner.decide import Decision, decide
from cornplug.planner.inputs import PlanInput


def plan_input(**tables: Any) -> PlanInput:
    rules = {"simulate": False, "n_plus_one": False, "max_utilisation": 1.0, "online_share": 1.0}
    tables["rules"] = rules | tables.get("rules", {})
    return PlanInput.model_validate(tables)


def rate(gpu: str, requests_per_s: float, **more: Any) -> dict[str, Any]:
    return {"kind": "throughput", "gpu": gpu, "requests_per_s": requests_per_s} | more


def app(name: str, llm: str, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "llm": llm, "workload": "offline", "requests": list(requests)} | more


def request(name: str, rate: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "rate": rate} | more


def nodes(gpu: str, price: float, gpus: int = 1, stock: int = 99) -> dict[str, Any]:
    return {"name": f"{gpu}x{gpus}", "gpu": gpu, "gpus": gpus, "price_per_hour": price, "stock": stock}


def decided(given: PlanInput) -> Decision:
    return decide(given, digest="0" * 64)


def replicas(decision: Decision) -> dict[tuple[str, str], int]:
    """(service, GPU) -> replicas."""
    found: dict[tuple[str, str], int] = {}
    for g in decision.plan.groups:
        found[g.service, g.gpu] = found.get((g.service, g.gpu), 0) + g.replicas
    return found


def test_cheapest_gpus_for_one_model() -> None:
    profiles = [rate("A10G", 0.37), rate("A100-80", 2.0)]
    given = plan_input(
        components=[{"name": "llama", "kind": "llm", "profiles": profiles, "tp": [1]}],
        applications=[app("chat", "llama", request("one", 4.3))],
        pool=[nodes("A10G", 1.01), nodes("A100-80", 3.67)],
    )
    decision = decided(given)
    assert decision.plan.cost_per_hour == pytest.approx(8.35)
    assert replicas(decision) == {("llama/PD", "A100-80"): 2, ("llama/PD", "A10G"): 1}
    [route] = decision.plan.routes
    assert (route.structure, route.rate) == ("monolith", pytest.approx(4.3))
    assert sum(route.stages[0].groups.values()) == pytest.approx(1)


def encoder_pool(hit_rate: float) -> PlanInput:
    media = [{"encoder": "vit", "tokens": 256, "hit_rate": hit_rate}]
    return plan_input(
        components=[
            {"name": "vit", "kind": "encoder", "profiles": [rate("A100-80", 1.13)]},
            {"name": "llm", "kind": "llm", "tp": [1], "profiles": [rate("A100-80", 1e4)]},
        ],
        applications=[app("see", "llm", request("picture", 10, media=media), structures=["E+PD"])],
        pool=[nodes("A100-80", 3.0)],
        rules={"max_utilisation": 0.8},
    )


@pytest.mark.parametrize(
    ("hit_rate", "gpus"), [(0, 12), (0.3, 8), (0.5, 6), (0.8, 3), (0.9, 2), (0.95, 1), (1, 0)]
)
def test_cached_embeddings_save_encoders(hit_rate: float, gpus: int) -> None:
    assert replicas(decided(encoder_pool(hit_rate))).get(("vit/E", "A100-80"), 0) == gpus
