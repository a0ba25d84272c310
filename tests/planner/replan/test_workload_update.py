"""Observed load takes the place of assumed load, divided among classes as the plan routes them."""

from __future__ import annotations

import pytest
from expected_errors import expect_error

from cornplug.errors import ConfigError
from cornplug.planner import observed_load, workload_update
from cornplug.planner.inputs import request_sampling
from cornplug.planner.inputs.schema import Application, RequestMedia, RequestSpec, SharedPrefix
from cornplug.planner.observed_load import ObservedWindow
from cornplug.planner.plan import Plan, PlanRoute, RouteStage

from ..metrics_text import VLLM
from ..sample_input import given
from ..sample_plan import group, plan


def one_group(**requests: float) -> Plan:
    """Class -> planned rate, all through one engine group."""
    routes = [
        PlanRoute(
            app="chat",
            request=name,
            structure="monolith",
            rate=rate,
            stages=[RouteStage(tasks="PD", groups={"llm7/PD": 1.0})],
        )
        for name, rate in requests.items()
    ]
    return plan(groups=[group("llm7/PD", "PD")], routes=routes)


def window(
    n: int, seconds: float, prompt: float = 400, output: float = 60, cached: float = 0.0
) -> ObservedWindow:
    engine = VLLM()
    before = observed_load.parse(engine.text, 0, "")
    engine.serve(n, prompt, output, cached=cached)
    return observed_load.window_between(before, observed_load.parse(engine.text, seconds, ""))


def with_requests(*requests: RequestSpec) -> list[Application]:
    (app,) = given().applications
    return [app.model_copy(update={"requests": list(requests)})]


def test_workload_update_planned_load_changes_nothing() -> None:
    base = given(rate=5).applications
    assert workload_update.update_applications(base, one_group(short=5), {"": window(300, 60)}) == (base, ())


def test_workload_update_doubled_rate_is_adopted() -> None:
    changed, (difference,) = workload_update.update_applications(
        given(rate=5).applications, one_group(short=5), {"": window(600, 60)}
    )
    assert (difference.demand, difference.what, difference.planned) == ("chat/short", "rate", 5)
    assert changed[0].requests[0].rate == difference.observed == pytest.approx(10)


def test_workload_update_difference_within_chance_is_ignored() -> None:
    """18 requests where 15 were planned for: one standard deviation of 15 is 4."""
    base = given(rate=1).applications
    assert workload_update.update_applications(base, one_group(short=1), {"": window(18, 15)})[1] == ()


def test_workload_update_lone_class_gets_observed_lengths() -> None:
    changed, (difference,) = workload_update.update_applications(
        given(rate=5).applications, one_group(short=5), {"chat/short": window(300, 60, prompt=900)}
    )
    assert difference.what == "prompt"
    prompt = changed[0].requests[0].prompt
    assert request_sampling.mean_length(prompt) == pytest.approx(900, rel=0.02)
    assert request_sampling.length_quantile(prompt, 0.99) > 1000


def test_workload_update_two_classes_of_engine_grow_alike() -> None:
    base = with_requests(
        RequestSpec(name="short", rate=4, prompt=100, output=60),
        RequestSpec(name="long", rate=1, prompt=1600, output=60),
    )
    # The mixture's mean is 400, as planned: neither class's own mean is, and nothing may change but the rate.
    changed, differences = workload_update.update_applications(
        base, one_group(short=4, long=1), {"chat": window(600, 60)}
    )
    assert [d.what for d in differences] == ["rate", "rate"]
    assert [r.rate for r in changed[0].requests] == [pytest.approx(8), pytest.approx(2)]
    _, differences = workload_update.update_applications(
        base, one_group(short=4, long=1), {"chat": window(300, 60, prompt=800)}
    )
    assert {d.demand: d.observed for d in differences} == {
        "chat/short": pytest.approx(200, rel=0.02),
        "chat/long": pytest.approx(3200, rel=0.02),
    }


def test_workload_update_groups_are_weighted_by_route_share() -> None:
    halves = RouteStage(tasks="PD", groups={"a": 0.75, "b": 0.25})
    route = PlanRoute(app="chat", request="short", structure="monolith", rate=8, stages=[halves])
    running = plan(groups=[group("a", "PD"), group("b", "PD")], routes=[route])
    changed, _ = workload_update.update_applications(
        given(rate=8).applications, running, {"a": window(720, 60), "b": window(240, 60)}
    )
    assert changed[0].requests[0].rate == pytest.approx(16)
    only_one, _ = workload_update.update_applications(
        given(rate=8).applications, running, {"b": window(240, 60)}
    )
    assert only_one[0].requests[0].rate == pytest.approx(16)


def test_workload_update_pair_rate_from_decode_hits_from_prefill() -> None:
    base = with_requests(
        RequestSpec(
            name="short", rate=5, prompt=400, output=60, prefix=SharedPrefix(tokens=200, hit_rate=0.2)
        )
    )
    stages = [RouteStage(tasks="P", groups={"p": 1.0}), RouteStage(tasks="D", groups={"d": 1.0})]
    route = PlanRoute(app="chat", request="short", structure="P+D", rate=5, stages=stages)
    running = plan(groups=[group("p", "P"), group("d", "D")], routes=[route])
    seen = {"p": window(600, 60, cached=0.45), "d": window(300, 60, cached=1.0)}
    changed, (difference,) = workload_update.update_applications(base, running, seen)
    assert (difference.what, difference.observed) == ("prefix", pytest.approx(0.9))
    prefix = changed[0].requests[0].prefix
    assert prefix is not None
    assert prefix.hit_rate == pytest.approx(0.9)
    with expect_error(ConfigError, field="--metrics URL", match="The groups are p, d"):
        workload_update.update_applications(base, running, {"": window(600, 60)})


def test_media_keep_their_tokens_and_take_the_observed_hits() -> None:
    media = RequestMedia(encoder="vit", items=1, tokens=300, hit_rate=0.1)
    base = with_requests(RequestSpec(name="short", rate=5, prompt=100, output=60, media=[media]))
    seen = ObservedWindow(60, 300, 0, embedding_hits={"chat": 0.7}, prompt=window(300, 60, prompt=500).prompt)
    changed, differences = workload_update.update_applications(base, one_group(short=5), {"": seen})
    assert {d.what: round(d.observed, 1) for d in differences} == {
        "prompt": pytest.approx(200, rel=0.03),
        "embedding": 0.7,
    }
    assert changed[0].requests[0].media[0].tokens == 300


def test_workload_update_unknown_scope_names_known_ones() -> None:
    with expect_error(ConfigError, field="--metrics chta=...", match="chat/short.*llm7/PD"):
        workload_update.update_applications(given().applications, one_group(short=5), {"chta": window(1, 1)})
