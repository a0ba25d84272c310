"""Tables of an engine's settings: what is in none of them is shared under its default only."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Any

import pytest
from expected_errors import expect_error
from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from cornplug.engine_common.engine_config import (
    AS_OVERRIDE,
    FieldTables,
    SettingsVerdict,
    default_values,
    find_misplaced,
    judge_fields,
    to_json_value,
)
from cornplug.errors import CheckpointError


class Kind(enum.Enum):
    PLAIN = "plain"
    OTHER = "other"


@dataclass
class Settings:
    model: str
    scale: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    loader: str = "auto"
    port: int = 80
    kind: Kind = Kind.PLAIN
    invented: bool = False


TABLES = FieldTables(
    class_name="Settings",
    in_key={
        "model": "the checkpoint's bytes",
        "scale": AS_OVERRIDE,
        "options": AS_OVERRIDE,
        "kind": AS_OVERRIDE,
    },
    harmless={"port": "where it listens"},
    refused={"loader": "reads other files than were hashed"},
    same_as_default={"loader": frozenset({"hf"})},
)


def verdict(**changes: Any) -> SettingsVerdict:
    settings = dataclasses.asdict(dataclasses.replace(Settings("m"), **changes))
    return judge_fields(TABLES, settings, default_values(Settings))


def test_judge_defaults_give_empty_verdict() -> None:
    assert verdict() == SettingsVerdict({}, {})
    assert verdict(model="another", port=1, loader="hf", kind="plain") == SettingsVerdict({}, {})


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({"scale": 2.0}, {"Settings.scale": 2.0}),
        ({"options": {"a": (1, {"b": None})}}, {"Settings.options": {"a": [1, {"b": None}]}}),
        ({"kind": Kind.OTHER}, {"Settings.kind": "other"}),
    ],
)
def test_judge_effective_setting_is_override(changes: dict[str, Any], overrides: dict[str, Any]) -> None:
    assert verdict(**changes) == SettingsVerdict(overrides, {})


def test_overrides_or_raise_refusal_names_field_and_reason() -> None:
    found = verdict(loader="pt")
    with expect_error(CheckpointError, reason="settings", match=r"Settings\.loader"):
        found.overrides_or_raise()


def test_judge_unknown_field_is_refused_once_set() -> None:
    """As of an engine that has gained one since the tables were written."""
    assert verdict(invented=False).refusals == {}
    assert "unknown to this release" in verdict(invented=True).refusals["Settings.invented"]
    # Nobody can say what its default is.
    assert "Settings.newer" in judge_fields(TABLES, {"newer": None}, {}).refusals


@pytest.mark.parametrize("value", [len, {1: 2}, float("nan"), object(), b"bytes"])
def test_judge_value_without_canonical_form_is_refused(value: Any) -> None:
    found = verdict(options={"x": value})
    assert found.overrides == {}
    assert "cannot identify" in found.refusals["Settings.options"]


def test_judge_true_for_default_one_is_override() -> None:
    assert verdict(scale=True).overrides == {"Settings.scale": True}


def test_misplaced_added_dropped_and_duplicate_fields_are_named() -> None:
    fields = [one.name for one in dataclasses.fields(Settings)]
    assert find_misplaced(TABLES, fields) == {"invented": "not in any table"}
    twice = dataclasses.replace(TABLES, refused={**TABLES.refused, "port": "", "invented": "", "gone": ""})
    assert find_misplaced(twice, fields) == {
        "port": "in more than one table",
        "gone": "Settings has no such field",
    }


def test_defaults_of_pydantic_dataclass_skips_required_fields() -> None:
    @pydantic_dataclass
    class Theirs:
        needed: int
        bounded: int = Field(default=3, ge=0)
        made: dict[str, int] = Field(default_factory=dict)
        later: int = Field(init=False)

    assert default_values(Theirs) == {"bounded": 3, "made": {}}


def test_settings_verdict_union_keeps_both_sides() -> None:
    both = verdict(scale=2.0) | verdict(loader="pt")
    assert set(both.overrides) == {"Settings.scale"}
    assert set(both.refusals) == {"Settings.loader"}


def test_plain_set_is_sorted() -> None:
    assert to_json_value({"b", "a"}) == ["a", "b"]
