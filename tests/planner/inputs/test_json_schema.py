"""The JSON schema says what the reader says, where one place of the file is enough to see it."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError
from reference_docs import plan_input

from cornplug.planner.inputs import cross_checks
from cornplug.planner.inputs.schema import DIALECT, PlanInput, plan_schema

TREE = Path(__file__).parents[3]
HERE = TREE / "tests" / "planner"
GOOD = [*sorted(TREE.glob("examples/**/*plan*/*.toml")), *sorted(HERE.glob("cases/*.toml"))]
GOOD = [HERE / "good_input.toml", *(file for file in GOOD if file.name != "qos.toml")]
BAD = sorted((HERE / "bad_inputs").glob("*.toml"))
UNSEEN = {
    "divided_prompts": "tables that name the component",
    "duplicate_requests": "names of two tables",
    "duplicates": "names of two tables",
    "files": "files on disk",
    "no_price": "the price table",
    "no_size": "checkpoints on disk",
    "parts_of_parameters": "two numbers of a table",
    "profiles": "the GPU table, names of requests, lengths of two lists",
    "syntax": "no TOML",
    "unclosed": "no TOML",
    "unknown_names": "names of two tables",
}
"""Bad input -> the knowledge that a schema lacks."""

SCHEMA = plan_schema()
VALIDATOR = Draft202012Validator(SCHEMA)


def data(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text())


def test_json_schema_is_draft_2020_12() -> None:
    assert SCHEMA["$schema"] == DIALECT == VALIDATOR.META_SCHEMA["$id"]
    VALIDATOR.check_schema(SCHEMA)


@pytest.mark.parametrize("file", GOOD, ids=lambda file: file.stem)
def test_json_schema_shipped_input_is_accepted(file: Path) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(data(file))] == []


@pytest.mark.parametrize("file", [bad for bad in BAD if bad.stem not in UNSEEN], ids=lambda file: file.stem)
def test_json_schema_bad_input_is_refused(file: Path) -> None:
    assert not VALIDATOR.is_valid(data(file))


@pytest.mark.parametrize("stem", UNSEEN)
def test_json_schema_unseen_bad_input_is_really_unseen(stem: str) -> None:
    """Else the list of exceptions would hide a rule that the schema has lost."""
    try:
        assert VALIDATOR.is_valid(data(HERE / "bad_inputs" / f"{stem}.toml"))
    except tomllib.TOMLDecodeError:
        assert UNSEEN[stem] == "no TOML"


def places(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([at] if at else []), *(place for key, one in inner for place in places(one, (*at, key)))]


BASES = [data(file) for file in GOOD if file.name in ("good_input.toml", "plan.toml", "a10_distserve.toml")]
VALUES = (-1, 0, 1, 3, 0.5, 1.5, True, "x", "online", "offline", "llm", "p95", [], [1], ["+G"], {}, {"a": 1})
KEYS = ("trace", "tower_of", "speculative", "workload", "slo", "structures", "kind", "nonsense", "fp8_tflops")


@st.composite
def changed_inputs(draw: st.DrawFn) -> dict[str, Any]:
    """A good input with one to three values taken out, replaced or added."""
    plan = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 3))):
        *above, key = draw(st.sampled_from(places(plan)))
        holder: Any = plan
        for part in above:
            holder = holder[part]
        action = draw(st.sampled_from(("remove", "replace", "add")))
        if action == "remove":
            del holder[key]
        elif action == "replace" or isinstance(holder, list):
            holder[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        else:
            holder[draw(st.sampled_from(KEYS))] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    return plan


def refused(plan: dict[str, Any]) -> set[str]:
    """Kinds of pydantic's errors; "cross" for the checks across tables."""
    try:
        read = PlanInput.model_validate(plan)
    except ValidationError as e:
        return {error["type"] for error in e.errors()}
    return {"cross"} if next(cross_checks.errors(read), None) else set()


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(changed_inputs())
def test_json_schema_random_change_has_verdict_of_reader(plan: dict[str, Any]) -> None:
    """The schema refuses nothing that the reader takes, and sees all but comparisons of two places."""
    kinds = refused(plan)
    if VALIDATOR.is_valid(plan):
        assert kinds <= {"cross", "plan_input"}
    else:
        assert kinds


def test_json_schema_every_key_has_a_sentence() -> None:
    for name, table in {"PlanInput": SCHEMA, **SCHEMA["$defs"]}.items():
        assert table["description"].endswith("."), name
        for key, value in table["properties"].items():
            assert value.get("description", "").endswith("."), f"{name}.{key} needs a docstring"


def test_plan_input_page_has_every_table_once() -> None:
    shown = [id(section.table) for section in plan_input.sections(SCHEMA)]
    tables = {id(one) for name, one in SCHEMA["$defs"].items() if name not in plan_input._LENGTHS}
    assert len(shown) == len(set(shown))
    assert set(shown) == {id(SCHEMA)} | tables
