"""Which observed times are one group's, and warm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cornplug.planner import observed_load, replan_decision
from cornplug.planner.observed_load import ObservedWindow
from cornplug.planner.plan import Plan, PlanRoute, RouteStage
from cornplug.planner.replan_decision import ObservedTime, times_of_groups

from ..metrics_text import VLLM
from ..sample_plan import group, plan

NOW = 10_000.0


def one_group(**changes: Any) -> Plan:
    stages = [RouteStage(tasks="PD", groups={"a": 1.0})]
    route = PlanRoute(app="chat", request="short", structure="monolith", rate=7.5, stages=stages)
    return plan(groups=[group("a", "PD", **changes)], routes=[route])


def window(n: int = 450, ttft_s: float = 0.4, tpot_s: float = 0.03) -> ObservedWindow:
    engine = VLLM()
    before = observed_load.parse(engine.text, 0, "")
    engine.serve(n, 400, 60, ttft_s=ttft_s, tpot_s=tpot_s)
    return observed_load.window_between(before, observed_load.parse(engine.text, 60, ""))


def phases(of: Plan, seen: ObservedWindow, scope: str = "") -> dict[str, float]:
    found = times_of_groups(of, {scope: seen}, now=NOW, min_age_s=900)
    return {one.phase: one.ratio for one in found}


def test_of_groups_lone_group_has_both_times() -> None:
    """0.2 s and 0.03 s were planned."""
    assert phases(one_group(), window()) == {"prefill": pytest.approx(2.0), "decode": pytest.approx(1.0)}


@pytest.mark.parametrize(
    ("running", "seen"),
    [
        pytest.param(one_group(since=NOW - 60), window(), id="started a minute ago"),
        pytest.param(one_group(), replace(window(), restarted=True), id="restarted in the window"),
        pytest.param(one_group(), window(n=80), id="few requests"),
        pytest.param(one_group(), window(n=900), id="twice the planned load"),
    ],
)
def test_of_groups_cold_or_overloaded_engine_tells_nothing(running: Plan, seen: ObservedWindow) -> None:
    assert phases(running, seen) == {}


def test_of_groups_old_engine_counts_again() -> None:
    assert phases(one_group(since=NOW - 901), window()).keys() == {"prefill", "decode"}


def test_of_groups_source_of_two_groups_tells_neither() -> None:
    halves = RouteStage(tasks="PD", groups={"a": 0.5, "b": 0.5})
    route = PlanRoute(app="chat", request="short", structure="monolith", rate=7.5, stages=[halves])
    running = plan(groups=[group("a", "PD"), group("b", "PD")], routes=[route])
    assert phases(running, window()) == {}
    assert phases(running, window(n=220), "a").keys() == {"prefill", "decode"}


def test_of_groups_first_tokens_behind_an_encoder_are_not_prefills() -> None:
    stages = [RouteStage(tasks="E", groups={"e": 1.0}), RouteStage(tasks="PD", groups={"a": 1.0})]
    route = PlanRoute(app="chat", request="short", structure="E+PD", rate=7.5, stages=stages)
    running = plan(groups=[group("e", "E"), group("a", "PD")], routes=[route])
    assert phases(running, window()).keys() == {"decode"}


def test_of_groups_pair_divides_its_times() -> None:
    stages = [RouteStage(tasks="P", groups={"p": 1.0}), RouteStage(tasks="D", groups={"d": 1.0})]
    route = PlanRoute(app="chat", request="short", structure="P+D", rate=7.5, stages=stages)
    running = plan(groups=[group("p", "P"), group("d", "D")], routes=[route])
    found = times_of_groups(running, {"p": window(), "d": window()}, now=NOW, min_age_s=900)
    assert {(one.group, one.phase) for one in found} == {("p", "prefill"), ("d", "decode")}


def test_between_restarted_engine_is_noticed() -> None:
    old, new = VLLM(), VLLM()
    old.serve(300, 400, 60)
    before = observed_load.parse(old.text, 0, "")
    new.serve(200, 400, 60)
    assert observed_load.window_between(before, observed_load.parse(new.text, 60, "")).restarted
    old.serve(200, 400, 60)
    assert not observed_load.window_between(before, observed_load.parse(old.text, 60, "")).restarted


def times(prefill: float, decode: float) -> list[ObservedTime]:
    return [
        ObservedTime("a", "a", "prefill", prefill, 1.0, 500),
        ObservedTime("a", "a", "decode", decode, 1.0, 500),
    ]


def test_agreed_needs_two_windows_on_one_side() -> None:
    slow = times(1.5, 1.0)
    assert replan_decision.times_to_correct(slow, {}, {}) == []
    assert replan_decision.times_to_correct(slow, replan_decision.ratios(times(1.1, 1.5)), {}) == []
    assert replan_decision.times_to_correct(slow, replan_decision.ratios(times(0.6, 1.0)), {}) == []
    assert replan_decision.times_to_correct(slow, replan_decision.ratios(times(1.3, 1.0)), {}) == slow
    assert (
        replan_decision.times_to_correct(times(0.7, 1.0), replan_decision.ratios(times(0.6, 1.0)), {}) != []
    )


def test_agreed_explained_time_is_compared_with_its_explanation() -> None:
    """A correction for 1.5 was found: 1.5 again is no news, 1.0 twice is."""
    explained = replan_decision.ratios(times(1.5, 1.0))
    assert replan_decision.times_to_correct(times(1.5, 1.0), explained, explained) == []
    as_planned = times(1.0, 1.0)
    assert replan_decision.times_to_correct(as_planned, explained, explained) == []
    assert (
        replan_decision.times_to_correct(as_planned, replan_decision.ratios(as_planned), explained)
        == as_planned
    )
