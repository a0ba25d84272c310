"""Boards and alert rules: every query is PromQL, and names series, labels and values that the code has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from reference_docs import metrics, troubleshooting

from cornplug.planner import observed_load
from cornplug.planner.report import plan_folder

TREE = Path(__file__).parents[1]
BOARDS = sorted((TREE / "deploy" / "grafana").glob("*.json"))
ALERTS = TREE / "deploy" / "prometheus" / "alerts.yml"
OF_PROMETHEUS = {"instance", "le"}
SERIES = {
    one.name: one
    for room in (metrics.engines(), metrics.service(), metrics.store(), metrics.admission())
    for one in room
}
# Of a plan, and of engines with its label: the names that `cornplug replan` reads in their text.
_ENGINES = ("engine", "model_name", plan_folder.GROUP_LABEL)
SERIES |= {
    name: metrics.Series(name, "gauge", labels, "") for name, labels in plan_folder.SERIES_LABELS.items()
} | {
    name: metrics.Series(name, "counter" if name.endswith("_total") else "histogram", _ENGINES, "")
    for name in (*observed_load.FINISHED_METRICS, *observed_load.TTFT_METRICS, *observed_load.TPOT_METRICS)
}
REASONS = {word for section in troubleshooting.reasons().values() for word in section}


def queries() -> Iterator[tuple[str, str]]:
    """(place, PromQL) of every panel and of every rule."""
    for file in BOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{file.name}: {panel['title']}", target["expr"].replace("$__rate_interval", "5m")
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alerts.yml: {rule['alert']}", rule["expr"]


QUERIES = dict.fromkeys(queries())


def nodes(expr: Any) -> Iterator[Any]:
    """The expression and all within it."""
    yield expr
    for name in ("expr", "lhs", "rhs", "param", "vs", "vector_selector"):
        inner = getattr(expr, name, None)
        if isinstance(inner, promql_parser.Expr):
            yield from nodes(inner)
    for inner in getattr(expr, "args", None) or ():
        yield from nodes(inner)


def faults(query: str) -> list[str]:
    """Series, labels and reasons of a query that the code does not have, and labels that a sum has lost."""
    found = []
    tree = promql_parser.parse(query)
    selectors = [node for node in nodes(tree) if isinstance(node, promql_parser.VectorSelector)]
    known = set(OF_PROMETHEUS)
    if not selectors:
        found.append("no series")
    for selector in selectors:
        name = selector.name or ""
        series = SERIES.get(name) or SERIES.get(re.sub(r"_(bucket|sum|count)$", "", name))
        if series is None or (name != series.name) != (series.kind == "histogram"):
            found.append(f"series {name}")
            continue
        known |= set(series.labels)
        for matcher in selector.matchers.matchers:
            if matcher.name not in {*series.labels, *OF_PROMETHEUS}:
                found.append(f"label {matcher.name} of {name}")
            elif matcher.name == "reason":
                found += [f"reason {word}" for word in matcher.value.split("|") if word not in REASONS]
    grouped = {label for labels in re.findall(r"\bby \(([^)]*)\)", query) for label in labels.split(", ")}
    return [*found, *(f"label {label}" for label in sorted(grouped - known))]


@pytest.mark.parametrize(("place", "query"), QUERIES, ids=[place for place, _ in QUERIES])
def test_board_query_names_series_of_the_code(place: str, query: str) -> None:
    assert faults(query) == []


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("sum (rate(cornplug_hit_total[5m]))", "series cornplug_hit_total"),
        ("rate(cornplug_wait_seconds[5m])", "series cornplug_wait_seconds"),
        ('cornplug_hits_total{tier="memory"}', "label tier of cornplug_hits_total"),
        ('cornplug_misses_total{reason=~"absent|gone_away"}', "reason gone_away"),
        ("sum by (quality) (cornplug_hits_total)", "label quality"),
        ("cornplug_hits_total / (1 + rate(cornplug_none_total[5m]))", "series cornplug_none_total"),
        ("1 + 1", "no series"),
    ],
)
def test_board_query_with_an_unknown_name_is_seen(query: str, fault: str) -> None:
    assert faults(query) == [fault]


def test_board_legend_names_labels_that_its_query_keeps() -> None:
    for file in BOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
                named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                assert named == kept - {"le"}, (file.name, panel["title"])


def test_board_panels_do_not_overlap_and_say_what_to_read() -> None:
    for file in BOARDS:
        board = json.loads(file.read_text())
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
        assert len(places) == len(set(places))
        assert all(panel["description"].endswith(".") for panel in board["panels"])


def test_board_alert_each_has_summary_description_and_severity() -> None:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description"}
