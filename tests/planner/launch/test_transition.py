"""From plan to plan: what stays, what starts first, what ends, what starts in turn."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cornplug.planner.launch.launcher import local_commands
from cornplug.planner.launch.transition import Transition, compute_transition
from cornplug.planner.plan import Plan

from ..plans import Case, plan


@pytest.fixture
def steps(tmp_path: Path) -> Any:
    return lambda old, new: compute_transition(old, new, partial(local_commands, run_dir=tmp_path))


def grouped(made: Plan, **changes: Any) -> Plan:
    """With changes of its last group."""
    *others, last = made.groups
    return made.model_copy(update={"groups": [*others, last.model_copy(update=changes)]})


def placed(made: Plan, *places: tuple[int, int], **changes: Any) -> Plan:
    return grouped(made, placement=[list(p) for p in places], replicas=len(places), **changes)


def counts(found: Transition) -> tuple[int, int, int, int]:
    return len(found.kept), len(found.start_before), len(found.to_stop), len(found.start_after)


def test_transition_to_the_same_plan_keeps_every_process(steps: Any) -> None:
    old = plan(Case("E+PD", caches=True, classes=True))
    found = steps(old, old.model_copy(update={"name": "another", "cost_per_hour": 1.0}))
    assert counts(found) == (3, 0, 0, 0)


def test_transition_with_other_simulated_limits_keeps_the_process_and_says_so(steps: Any) -> None:
    old = plan(Case())
    settings = old.groups[0].settings
    assert settings is not None
    new = grouped(old, settings=settings.model_copy(update={"prefill_tokens_s": 50_000.0}))
    found = steps(old, new)
    assert counts(found) == (1, 0, 0, 0)
    (flags,) = found.outdated_flags.values()
    assert flags == ["--max-num-queued-tokens 25000"]


def test_transition_one_more_replica_starts_beside_the_old_one(steps: Any) -> None:
    old = plan(Case())
    found = steps(old, placed(old, (0, 0), (0, 1)))
    assert [c.kind for c in found.start_before] == ["engine", "router"]
    assert (len(found.kept), found.to_stop, found.start_after) == (1, (), ())
    assert found.start_before[0].port == 8001


def test_transition_replica_on_another_gpu_starts_before_the_old_one_ends(steps: Any) -> None:
    old = plan(Case())
    found = steps(old, placed(old, (0, 3)))
    assert counts(found) == (0, 1, 1, 0)
    assert (found.to_stop[0].port, found.start_before[0].port) == (8000, 8001)
    assert found.deployment.groups[0].ports == [8001]


def test_transition_other_model_on_the_same_gpu_starts_in_turn(steps: Any) -> None:
    old = plan(Case())
    found = steps(old, grouped(old, model="org/other"))
    assert counts(found) == (0, 0, 1, 1)


def test_transition_halves_of_a_gpu_start_beside_each_other(steps: Any) -> None:
    old = plan(Case(share=0.5))
    found = steps(old, grouped(old, model="org/other"))
    assert counts(found) == (0, 1, 1, 0)
    assert found.start_before[0].port != found.to_stop[0].port


def test_transition_of_replicas_of_one_gpu_keeps_each_at_its_port(steps: Any) -> None:
    old = plan(Case(share=0.5, replicas=2))
    assert counts(steps(old, old)) == (3, 0, 0, 0)


def test_transition_back_and_forth_frees_the_ports(steps: Any) -> None:
    old = plan(Case())
    there = steps(old, placed(old, (0, 3)))
    back = steps(there.deployment, old)
    assert back.start_before[0].port == 8000
    assert counts(back) == (0, 1, 1, 0)


def test_transition_router_of_other_servers_starts_beside_the_old_one(steps: Any) -> None:
    old = plan(Case(replicas=2))
    found = steps(old, placed(old, (0, 0), (0, 1), (0, 2)))
    assert [(c.kind, c.port) for c in found.start_before] == [("engine", 8002), ("router", 30100)]
    assert [(c.kind, c.port) for c in found.to_stop] == [("router", 30000)]
    again = steps(found.deployment, old)
    assert [c.port for c in again.start_before] == [30000]


def test_transition_changed_encoder_takes_its_address_over(steps: Any) -> None:
    """Its engines encode by themselves meanwhile; at another address they would start again, too."""
    old = plan(Case("E+PD"))
    encoder, engine = old.groups
    new = old.model_copy(
        update={"groups": [encoder.model_copy(update={"encoder_models": ["org/b"]}), engine]}
    )
    found = steps(old, new)
    assert [c.kind for c in found.start_after] == ["encoder"]
    assert [old.kind for old, _ in found.kept] == ["store", "engine"]


def test_transition_encoder_of_engines_without_tower_is_always_there(steps: Any) -> None:
    old = plan(Case("E+PD", "sglang", share=0.5, tower="service"))
    encoder, engine = old.groups
    new = old.model_copy(
        update={"groups": [encoder.model_copy(update={"encoder_models": ["org/b"]}), engine]}
    )
    found = steps(old, new)
    assert "encoder" in [c.kind for c in found.start_before]


def test_transition_store_keeps_its_size_and_says_so(steps: Any) -> None:
    old = plan(Case(caches=True))
    new = old.model_copy(update={"caches": [c.model_copy(update={"gib": 2.0}) for c in old.caches]})
    found = steps(old, new)
    assert counts(found) == (2, 0, 0, 0)
    assert found.outdated_flags == {"store-0": ["--size 4GiB"]}
