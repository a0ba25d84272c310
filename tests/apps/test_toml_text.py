"""TOML that is written is read as the same data."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from cornplug.apps.deployment import format_toml


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"a": 1, "b": 1.5, "c": -1e30, "d": True, "e": "x"},
        {"text": 'quotes " and \\ and\nlines\x7f\x00 ü \U0001f600', "a key": {"with.dots": 1}},
        {"list": [], "mixed": [1, "a", [2, {"in": {"side": []}}]], "after": 1},
        {"tables": [{"a": 1, "inner": [{"b": 2}, {}]}, {"c": {"d": [{"e": 1}]}}], "scalar": 0},
        {"": {"": {"": 0}}},
    ],
)
def test_toml_text_of_data_is_read_as_the_same(data: dict[str, Any]) -> None:
    assert tomllib.loads(format_toml(data)) == data
