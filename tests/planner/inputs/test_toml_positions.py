"""Lines of keys, wherever TOML lets them stand."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cornplug.planner.inputs.field_types import Location, field_path
from cornplug.planner.inputs.toml_reader import key_line, key_lines

TEXT = '''# a comment with [brackets] and = signs
name = "x # no comment"

[[components]]
name = "vit"          # 5
shape.layers = 2
shape . "hidden" = 4
text = """
[[components]] in a text
"""  # 8 to 10

[[components]]        # 12
profiles = [          # 13
  { kind = "table", gpu = "L4", decode_s = [0.1,
    0.2] },           # 15
  # nothing
  {kind = "throughput", requests_per_s = { "a/b" = 2, 'c d' = 3 }},
]

[[components.extra]]
a = 'x]'
[components.extra.inner]
b = 1.5

[rules]
when = 1979-05-27 07:32:00
seed = 7
[[components]]
name = "last"
'''


@pytest.mark.parametrize(
    ("place", "line"),
    [
        (("name",), 2),
        (("components",), 4),
        (("components", 0), 4),
        (("components", 0, "name"), 5),
        (("components", 0, "shape"), 6),
        (("components", 0, "shape", "hidden"), 7),
        (("components", 0, "text"), 8),
        (("components", 1), 12),
        (("components", 1, "profiles", 0, "decode_s", 1), 15),
        (("components", 1, "profiles", 1, "requests_per_s", "a/b"), 17),
        (("components", 1, "profiles", 1, "requests_per_s", "c d"), 17),
        (("components", 1, "extra", 0, "a"), 21),
        (("components", 1, "extra", 0, "inner", "b"), 23),
        (("rules", "seed"), 27),
        (("components", 2, "name"), 29),
    ],
    ids=str,
)
def test_lines_of_every_key_syntax_are_found(place: Location, line: int) -> None:
    assert key_lines(TEXT)[place] == line


def test_line_of_missing_key_is_line_of_table() -> None:
    lines = key_lines(TEXT)
    assert key_line(lines, ("components", 1, "model")) == 12
    assert key_line(lines, ("rules", "router", 0)) == 25
    assert key_line(lines, ("pool",)) == 1
    assert key_lines("") == {}


def _places(value: Any, at: Location = ()) -> set[Location]:
    inner: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return {at} | {place for key, below in inner for place in _places(below, (*at, key))}


def test_lines_of_sample_cover_keys_of_tomllib() -> None:
    assert _places(tomllib.loads(TEXT)) - {()} == set(key_lines(TEXT))


_STRINGS = [
    '"a # \\" ] ="',
    "'}]#'",
    '"""a\n"" # ]\n""""',
    "'''\n[x]\n'''",
    '""',
    "1979-05-27 07:32:00",
    "-1.5",
]
_VALUES = st.recursive(
    st.sampled_from(_STRINGS),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[ # ]\n{', '.join(items)}\n]")
        | st.lists(inner, max_size=3).map(
            lambda items: "{" + ", ".join(f"'k {i}' . b = {v}" for i, v in enumerate(items)) + "}"
        )
    ),
    max_leaves=6,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(["[[t]]", "[u{}.v]", "[t.w{}]", "# [[t]]"]), _VALUES), max_size=5))
def test_lines_of_random_tables_point_at_each_key(tables: list[tuple[str, str]]) -> None:
    text = "[[t]]\n" + "".join(
        f"{header.format(i)}\nx{i} = {value}\n" for i, (header, value) in enumerate(tables)
    )
    lines = key_lines(text)
    assert set(lines) == _places(tomllib.loads(text)) - {()}
    for place, line in lines.items():
        if isinstance(place[-1], str) and place[-1].startswith("x"):
            assert text.splitlines()[line - 1].startswith(f"{place[-1]} = ")


def test_field_place_is_printed_as_toml_key() -> None:
    assert field_path(("applications", 0, "requests", 1, "rate")) == "applications[0].requests[1].rate"
    assert field_path(("components", 0, "requests_per_s", "a/b")) == 'components[0].requests_per_s."a/b"'
    assert field_path(()) == "the file"
