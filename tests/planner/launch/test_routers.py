"""Routers' lines against the flags of vllm-router 0.1.17 and sglang-router 0.3.2.

The two are not installed beside the engines. `router_flags.json` was read from their wheels' own
`RouterArgs.add_cli_args`, whose `from_cli_args` and `_validate_router_args` took all of these lines.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from cornplug.planner.inputs.field_types import RouterPolicy
from cornplug.planner.launch.command_lines import LaunchCommand, commands, files
from cornplug.planner.launch.connections import replica_addresses
from cornplug.planner.launch.engine_groups import routers
from cornplug.planner.perf_model.stations import Station
from cornplug.planner.plan import Plan, PlanRoute, QueueForecast, RouteStage

from ..plans import Case, matrix, plan

FLAGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "planner" / "router_flags.json").read_text()
)


def parser(name: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(name, exit_on_error=False, allow_abbrev=False)
    for flag, how in FLAGS[name].items():
        if how.get("switch"):
            made.add_argument(flag, action="store_true")
            continue
        given: dict[str, Any] = {key: how[key] for key in ("nargs", "choices") if key in how}
        types = {"int": int, "float": float}
        made.add_argument(
            flag,
            type=types.get(how.get("type", ""), str),
            action="append" if how.get("repeats") else "store",
            **given,
        )
    return made


PARSERS = {name: parser(name) for name in FLAGS}


def parsed(command: LaunchCommand) -> argparse.Namespace:
    if command.argv[0] == "vllm-router":
        return PARSERS["vllm_router 0.1.17"].parse_args(list(command.argv[1:]))
    assert command.argv[:3] == ("python", "-m", "sglang_router.launch_router")
    return PARSERS["sglang_router 0.3.2"].parse_args(list(command.argv[3:]))


def of(made: Plan) -> list[LaunchCommand]:
    return [c for c in commands(made) if c.kind == "router"]


@pytest.mark.parametrize("case", matrix(), ids=lambda case: case.id)
def test_routers_every_case_is_parsed_by_sglang_router(case: Case) -> None:
    for command in of(plan(case)):
        parsed(command)


def test_routers_one_server_needs_none() -> None:
    assert of(plan(Case())) == []
    assert json.loads(files(plan(Case()))["routes.json"]) == {
        "chat/short": {"priority": -2, "to": [{"weight": 1.0, "url": "http://${HOST_1}:8000"}]}
    }


def test_routers_replicas_share_one_address() -> None:
    made = plan(Case(replicas=3))
    (command,) = of(made)
    assert parsed(command).worker_urls == [f"http://${{HOST_1}}:{port}" for port in (8000, 8001, 8002)]
    assert json.loads(files(made)["routes.json"]) == {
        "chat/short": {"priority": -2, "to": [{"weight": 1.0, "url": "http://${HOST_1}:30000"}]}
    }


def test_routers_cache_plan_uses_cache_aware_policy() -> None:
    assert parsed(of(plan(Case(replicas=2)))[0]).policy == "power_of_two"
    assert parsed(of(plan(Case(replicas=2, caches=True)))[0]).policy == "cache_aware"


@pytest.mark.parametrize("policy", get_args(RouterPolicy))
def test_routers_simulated_policy_is_emitted_as_it_is(policy: str) -> None:
    """Each policy of `rules.router` is the simulator's and both routers' own."""
    assert policy in get_args(get_type_hints(Station)["router"])
    made = plan(Case(replicas=2))
    groups = [g.model_copy(update={"router": policy}) for g in made.groups]
    assert parsed(of(made.model_copy(update={"groups": groups}))[0]).policy == policy


def test_routers_assumed_prefix_hits_use_cache_aware_policy() -> None:
    """A hit rate without a planned store is of the engines' own caches."""
    made = plan(Case(replicas=2))
    hits = [one.model_copy(update={"prefix_hit_rate": 0.9}) for one in made.latency_forecasts]
    assert parsed(of(made.model_copy(update={"latency_forecasts": hits}))[0]).policy == "cache_aware"


def test_routers_unequal_groups_have_routers_and_weights_of_their_own() -> None:
    """Neither router takes weights: clients divide requests as the simulation did."""
    one = plan(Case(replicas=2))
    (first,) = one.groups
    second = first.model_copy(update={"name": "faster", "placement": [[0, 2], [0, 3]]})
    route = one.routes[0].model_copy(
        update={"stages": [RouteStage(tasks="EPD", groups={first.name: 0.44, "faster": 0.56})]}
    )
    both = one.model_copy(update={"groups": [first, second], "routes": [route]})
    assert [len(parsed(command).worker_urls) for command in of(both)] == [2, 2]
    assert json.loads(files(both)["routes.json"])["chat/short"]["to"] == [
        {"weight": 0.56, "url": "http://${HOST_1}:30001"},
        {"weight": 0.44, "url": "http://${HOST_1}:30000"},
    ]


@pytest.mark.parametrize(("engine", "bootstrap"), [("vllm", []), ("sglang", ["8998"])])
def test_routers_pair_has_roles_and_queue_limits(engine: Any, bootstrap: list[str]) -> None:
    (command,) = of(plan(Case("P+D", engine)))
    args = parsed(command)
    assert args.prefill == [["http://${HOST_1}:8000", *bootstrap]]
    assert args.decode == [["http://${HOST_1}:8001"]]
    # 3 requests a second and 0.5 s: two may wait; 128 run.
    assert (args.max_concurrent_requests, args.queue_size, args.queue_timeout_secs) == (128, 2, 1)


def flag(made: Plan, name: str) -> str | None:
    """Its value in the first engine's line; None: it is not there."""
    argv = next(c for c in commands(made) if c.kind == "engine").argv
    return argv[argv.index(name) + 1] if name in argv else None


@pytest.mark.parametrize(
    ("engine", "name", "by_bound", "by_queue"),
    [("vllm", "--max-num-queued-tokens", "10000", "60000"), ("sglang", "--max-queued-requests", "2", "14")],
)
def test_engine_queue_limit_holds_twice_the_simulated_queue(
    engine: Any, name: str, by_bound: str, by_queue: str
) -> None:
    """A limit below it would reject planned load."""
    made = plan(Case(engine=engine))
    queue = QueueForecast(requests=7, prompt_tokens=30_000)
    simulated = [g.model_copy(update={"queue": queue}) for g in made.groups]
    assert flag(made, name) == by_bound
    assert flag(made.model_copy(update={"groups": simulated}), name) == by_queue


@pytest.mark.parametrize(
    ("engine", "name"), [("vllm", "--max-num-queued-tokens"), ("sglang", "--max-queued-requests")]
)
def test_engine_with_work_that_can_wait_has_no_queue_limit(engine: Any, name: str) -> None:
    """Offline requests of the same engine are queued, not refused."""
    assert flag(plan(Case(engine=engine, classes=True)), name) is None


def test_routers_distant_encoders_are_no_concern_of_clients() -> None:
    """The engine asks them itself."""
    far = json.loads(files(plan(Case("E+PD", hosts=2, replicas=2)))["routes.json"])["chat/short"]["to"]
    assert far == [{"weight": 1.0, "url": "http://${HOST_1}:30000"}]


def test_routers_offline_class_has_no_queue_limit() -> None:
    (command,) = of(plan(Case("P+D", workload="offline")))
    assert parsed(command).queue_size is None


def test_routers_class_of_two_routes_has_weighted_addresses() -> None:
    whole, pair = plan(Case()), plan(Case("P+D", "sglang"))
    both = whole.model_copy(
        update={
            "groups": [*whole.groups, *pair.groups],
            "routes": [
                whole.routes[0].model_copy(update={"rate": 1.5}),
                pair.routes[0].model_copy(update={"rate": 0.5}),
            ],
        }
    )
    entries = json.loads(files(both)["routes.json"])["chat/short"]["to"]
    assert entries == [
        {"weight": 0.75, "url": "http://${HOST_1}:8000"},
        {"weight": 0.25, "url": "http://${HOST_1}:30000"},
    ]


def test_routers_pairs_of_two_engines_stay_apart() -> None:
    """KV of one engine is not handed to the other."""
    one, two = plan(Case("P+D")), plan(Case("P+D", "sglang"))
    groups = [
        group.model_copy(update={"name": f"{group.engine}-{group.tasks}"})
        for group in (*one.groups, *two.groups)
    ]
    mixed = one.model_copy(
        update={
            "groups": groups,
            "routes": [
                PlanRoute(
                    app="chat",
                    request="short",
                    structure="P+D",
                    rate=2.0,
                    stages=[
                        RouteStage(tasks="EP", groups={"vllm-EP": 0.75, "sglang-EP": 0.25}),
                        RouteStage(tasks="D", groups={"vllm-D": 0.75, "sglang-D": 0.25}),
                    ],
                )
            ],
        }
    )
    made = routers(mixed, replica_addresses(mixed), transfer="nixl")
    assert {router.pool.engine for router in made} == {"vllm", "sglang"}
    for router in made:
        assert all(name.startswith(router.pool.engine) for name in router.pool.groups)
    to = json.loads(files(mixed)["routes.json"])["chat/short"]["to"]
    assert [one["weight"] for one in to] == [0.75, 0.25]
