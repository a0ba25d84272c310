"""A plan's files for Prometheus, beside its groups, routes and forecasts."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from planner.plans import Case, plan

from cornplug.planner.launch.command_lines import commands
from cornplug.planner.launch.connections import replica_addresses
from cornplug.planner.plan import Plan, RequestTimes
from cornplug.planner.report.plan_folder import (
    BOUND_SERIES,
    GROUP_LABEL,
    RATE_SERIES,
    RULES_FILE,
    SECONDS_SERIES,
    SERIES_LABELS,
    TARGETS_FILE,
    write_prometheus_files,
)

CASES = ["monolith", "E+PD", "P+D", "E+P+D"]


def timed(case: Case) -> Plan:
    """A plan whose classes have simulated times."""
    made = plan(case)
    times = {"ttft": RequestTimes(mean=0.2, p95=0.5), "tpot": RequestTimes(mean=0.02, p95=0.03)}
    return made.model_copy(
        update={"latency_forecasts": [one.model_copy(update=times) for one in made.latency_forecasts]}
    )


def written(of: Plan, name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        write_prometheus_files(of, Path(folder))
        return Path(folder, name).read_text()


def rules(of: Plan) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(written(of, RULES_FILE))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


@pytest.mark.parametrize("structure", CASES)
def test_prometheus_targets_are_the_addresses_that_serve(structure: str) -> None:
    made = plan(Case(structure, replicas=2))
    found = json.loads(written(made, TARGETS_FILE))
    by_group = {one["labels"][GROUP_LABEL]: one["targets"] for one in found}
    assert set(by_group) == {group.name for group in made.groups}
    ports = {c.port for c in commands(made) if c.kind in ("engine", "encoder") and not c.rank}
    assert ports <= {int(one.rpartition(":")[2]) for each in by_group.values() for one in each}


def test_prometheus_targets_of_a_replica_on_two_hosts_are_rank_0() -> None:
    made = plan(Case(pp=2, hosts=2, tp=8))
    placed = replica_addresses(made)
    assert any(site.rank for site in placed)
    (found,) = json.loads(written(made, TARGETS_FILE))
    assert found["targets"] == [f"{site.host}:{site.port}" for site in placed if not site.rank]


@pytest.mark.parametrize("structure", CASES)
def test_prometheus_rules_rate_of_groups_is_that_of_the_routes(structure: str) -> None:
    made = timed(Case(structure))
    rates = [rule for rule in rules(made) if rule["record"] == RATE_SERIES]
    answering = {group.name for group in made.groups if "D" in group.tasks}
    assert {rule["labels"][GROUP_LABEL] for rule in rates} == answering
    total = sum(float(rule["expr"][len("vector(") : -1]) for rule in rates)
    assert total == pytest.approx(sum(route.rate for route in made.routes))


def test_prometheus_rules_times_and_bounds_are_the_forecasts() -> None:
    made = timed(Case(classes=True))
    found = {
        (rule["record"], *(rule["labels"][name] for name in ("request", "quantity", "percentile"))): rule[
            "expr"
        ]
        for rule in rules(made)
        if rule["record"] != RATE_SERIES
    }
    for one in made.latency_forecasts:
        assert found[SECONDS_SERIES, one.request, "ttft", "p95"] == "vector(0.5)"
        assert found[SECONDS_SERIES, one.request, "tpot", "mean"] == "vector(0.02)"
        for of in one.bounds:
            if of.bound is not None and of.quantity != "e2e":
                assert (
                    found[BOUND_SERIES, one.request, of.quantity, of.percentile] == f"vector({of.bound:.6g})"
                )


def test_prometheus_rules_of_a_divided_engine_have_no_first_token() -> None:
    quantities = {rule["labels"].get("quantity") for rule in rules(timed(Case("P+D")))}
    assert quantities == {None, "tpot"}


def test_prometheus_rules_have_the_labels_that_boards_read() -> None:
    for rule in rules(timed(Case("E+PD"))):
        assert tuple(rule["labels"]) == SERIES_LABELS[rule["record"]]
