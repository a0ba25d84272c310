"""Inputs decided from end to end: what a user would miss if it were not so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from expected_errors import expect_error
from planner.made_inputs import QWEN_7B, QWEN_VIT, two_apps

from cornplug.errors import ConfigError, PlanInfeasible
from cornplug.planner.inputs.schema import PlanInput
from cornplug.planner.optimizer import milp
from cornplug.planner.optimizer.optimization_problem import PoolSolution
from cornplug.planner.pipeline import confirm_capacities
from cornplug.planner.pipeline.decide import PlanDecision, decide
from cornplug.planner.plan import Deployment, Plan


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


def decided(given: PlanInput) -> PlanDecision:
    return decide(given, digest="0" * 64)


def replicas(decision: PlanDecision) -> dict[tuple[str, str], int]:
    """(service, GPU) -> replicas."""
    found: dict[tuple[str, str], int] = {}
    for g in decision.plan.groups:
        found[g.service, g.gpu] = found.get((g.service, g.gpu), 0) + g.replicas
    return found


def test_decide_one_model_takes_cheapest_gpus() -> None:
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
def test_decide_embedding_hits_save_encoders(hit_rate: float, gpus: int) -> None:
    assert replicas(decided(encoder_pool(hit_rate))).get(("vit/E", "A100-80"), 0) == gpus


def test_decide_impossible_bound_is_named_with_the_best() -> None:
    given = two_apps(simulate=False)
    slo = {"ttft_s": 0.02, "tpot_s": 0.05}
    apps = [a.model_dump() | ({"slo": slo} if a.name == "chat" else {}) for a in given.applications]
    best = r"chat/text.*qwen/PD may take at most 0\.02 s for TTFT \(p95\).*takes 0\.05"
    with pytest.raises(PlanInfeasible, match=best):
        decided(PlanInput.model_validate(given.model_dump() | {"applications": apps}))


@pytest.fixture(scope="module")
def shared() -> PlanDecision:
    return decided(two_apps(simulate=False))


@pytest.mark.more
def test_decide_every_class_is_routed_in_full(shared: PlanDecision) -> None:
    for o in shared.plan.latency_forecasts:
        routes = [r for r in shared.plan.routes if (r.app, r.request) == (o.app, o.request)]
        assert sum(r.rate for r in routes) == pytest.approx(o.rate)
        for route in routes:
            for stage in route.stages:
                assert sum(stage.groups.values()) == pytest.approx(1)


def test_decide_groups_stay_within_online_share(shared: PlanDecision) -> None:
    load = dict.fromkeys((g.name for g in shared.plan.groups), 0.0)
    groups = {g.name: g for g in shared.plan.groups}
    for route in shared.plan.routes:
        for stage in route.stages:
            for name, weight in stage.groups.items():
                g = groups[name]
                load[name] += route.rate * weight / g.capacity[f"{route.app}/{route.request}"] / g.replicas
    for name, g in groups.items():
        assert load[name] <= 0.8 * 1.001
        assert load[name] == pytest.approx(g.utilisation, rel=1e-4)


def test_decide_replicas_have_distinct_gpus(shared: PlanDecision) -> None:
    taken: dict[tuple[str, int, int], float] = {}
    nodes = {n.name: n for n in shared.plan.nodes}
    for g in shared.plan.groups:
        assert len(g.placement) == g.replicas
        for node, first in g.placement:
            assert node < nodes[g.nodes].count
            for gpu in range(first, first + g.tp * g.pp):
                key = (g.nodes, node, gpu)
                taken[key] = taken.get(key, 0) + g.share
    assert all(share <= 1 for share in taken.values())


def test_decide_n_plus_one_has_spare_replica(shared: PlanDecision) -> None:
    """A busy machine's solver may leave a replica without work: nobody misses that one."""
    busy = [g for g in shared.plan.groups if g.utilisation > 0]
    assert busy
    for g in busy:
        assert sum(other.replicas for other in shared.plan.groups if other.service == g.service) >= 2


def test_engines_have_the_settings_that_become_flags(shared: PlanDecision) -> None:
    for g in shared.plan.groups:
        if set(g.tasks) & set("PD"):
            assert g.settings is not None
            assert g.settings.kv_bytes == g.settings.kv_tokens * 2 * 28 * (4 // g.tp) * 128 * 2
        assert (g.kv is not None) == bool(set(g.tasks) & set("PD"))


def test_plan_is_read_back_as_it_was_written(shared: PlanDecision, tmp_path: Path) -> None:
    shared.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == shared.plan
    assert Deployment.load(tmp_path / "plan.json") == shared.plan


def test_plan_edited_into_a_wrong_one_is_refused(shared: PlanDecision, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(shared.plan.model_dump_json().replace('"replicas":', '"copies":', 1))
    with expect_error(ConfigError, field=str(path), match=r"groups\.0\.\w+"):
        Plan.load(path)


@pytest.mark.more
def test_plan_simulated_end_to_end_keeps_its_bounds() -> None:
    given = two_apps()
    chat = given.applications[0]
    text = chat.model_copy(update={"requests": chat.requests[:1], "structures": ["monolith"]})
    decision = decided(given.model_copy(update={"applications": [text], "pool": given.pool[:1]}))
    assert decision.misses == ()
    for o in decision.plan.latency_forecasts:
        assert o.ttft.p95 is not None
        assert o.slo_ttft_s is not None
        assert o.ttft.p95 <= o.slo_ttft_s * 1.02


def test_decide_small_classes_of_two_media_share_engine_and_its_spare() -> None:
    """Apart they would be four replicas: two services, each with one to spare."""
    slo = {"ttft_s": 5.0, "tpot_s": 0.2}
    classes = [
        {
            "name": name,
            "llm": "qwen",
            "slo": slo,
            "structures": ["monolith"],
            "requests": [
                {
                    "name": "r",
                    "rate": 0.2,
                    "prompt": 100,
                    "output": 20,
                    "media": [{"encoder": name, "tokens": 64}],
                }
            ],
        }
        for name in ("eyes", "ears")
    ]
    given = PlanInput.model_validate(
        {
            "components": [
                {"name": "qwen", "kind": "llm", "shape": QWEN_7B, "tp": [1], "engines": ["vllm"]},
                *({"name": name, "kind": "encoder", "shape": QWEN_VIT} for name in ("eyes", "ears")),
            ],
            "applications": classes,
            "pool": [{"name": "a100", "gpu": "A100-80", "gpus": 1, "price_per_hour": 2.0}],
            "rules": {"simulate": False},
        }
    )
    assert replicas(decided(given)) == {("qwen+eyes+ears/EPD", "A100-80"): 2}


@pytest.mark.more
def test_decide_clock_that_ended_first_round_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later rounds, in time themselves, start from what the first one found."""
    rounds, solve = list[PoolSolution](), milp.solve

    def late_at_first(*args: Any, **options: Any) -> PoolSolution:
        solution = solve(*args, **options)
        rounds.append(replace(solution, timed_out=not rounds))
        return rounds[-1]

    monkeypatch.setattr(milp, "solve", late_at_first)
    monkeypatch.setattr(confirm_capacities, "balance_load", lambda *_: None)  # the first does not stand
    given = two_apps()
    text = given.applications[0].model_copy(update={"requests": given.applications[0].requests[:1]})
    decision = decided(given.model_copy(update={"applications": [text], "pool": given.pool[:1]}))
    assert len(rounds) > 1
    assert decision.plan.proof.timed_out
