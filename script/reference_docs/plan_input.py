"""docs/plan-input.md, from the JSON schema of a plan's TOML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from cornplug.planner.inputs.json_schema import plan_schema
from cornplug.planner.starter.known_models import known_models

from .markdown import notice, table

Json = Mapping[str, Any]

_HEAD: Final = ("key", "value", "default", "meaning")
_LENGTHS: Final = {"LogNormal": "log-normal", "Histogram": "histogram"}
_INTRO: Final = """# Plan input

{notice}

This page lists every table and key of the file that [`cornplug plan`](planner.md) reads. `cornplug plan init`
writes a first file.

To have your editor complete and check the file, save the output of `cornplug plan schema` as
`plan.schema.json` and put this into the first line (for Even Better TOML or Taplo):

```text
#:schema ./plan.schema.json
```

- Times are in seconds, rates in requests per second, money in dollars per hour, memory in GiB (2^30
  bytes).
- Paths are relative to the file.
- A key whose default is "required" must be present.
- `[[NAME]]` may occur several times, and `[NAME]` once in its parent table.
"""
_LENGTH_TEXT: Final = """## Lengths

A length (tokens, items or units) is one of these:

- a whole number
- a log-normal distribution, `{ mean = 600, cv = 1.0, max = 4000 }`
- a histogram, `{ values = [100, 900], weights = [3, 1] }`
"""
_MODELS_TEXT: Final = """## Models known by hub id

`cornplug plan init MODEL --gpus GPU,GPU` knows the shapes of these models. It reads other models from a
checkpoint's folder or the local Hugging Face cache. Parameters are in billions and include the tower.
"""


class InputSection(NamedTuple):
    title: str
    table: Json


def page() -> str:
    """The text of docs/plan-input.md."""
    schema = plan_schema()
    parts = [_INTRO.format(notice=notice("`cornplug/planner/inputs/schema.py`"))]
    for title, of in sections(schema):
        parts.append(f"## {title}\n\n{of['description']}\n\n{_table(of)}\n")
    parts.append(_LENGTH_TEXT)
    for name, kind in _LENGTHS.items():
        of = schema["$defs"][name]
        parts.append(f"### {kind}\n\n{of['description']}\n\n{_table(of)}\n")
    parts += [_MODELS_TEXT, _models() + "\n"]
    return "\n".join(parts)


def _models() -> str:
    """A table of the rows of data/models.toml."""
    rows = []
    for name, model in known_models().items():
        if name != model.ids[0]:
            continue
        total = (model.llm.parameters + (model.tower.parameters if model.tower else 0)) / 1e9
        tower = f"{model.tower.parameters / 1e9:.2f}" if model.tower else "none"
        weights = "16 bits" if model.quantisation == "none" else model.quantisation
        rows.append(("<br>".join(f"`{one}`" for one in model.ids), f"{total:.1f}", tower, weights))
    return table(("hub ids", "parameters", "tower", "weights"), rows)


def sections(schema: Json) -> Iterator[InputSection]:
    """Each table of the file once, in the order of the models, under its place in the file."""
    yield InputSection("Top level", schema)
    yield from _inner("", schema, schema["$defs"], set())


def _inner(place: str, of: Json, tables: Json, seen: set[str]) -> Iterator[InputSection]:
    for key, value in of["properties"].items():
        names = [name for name in _tables_of(value) if name not in {*seen, *_LENGTHS}]
        path = f"{place}.{key}" if place else key
        title = f"`[[{path}]]`" if value.get("type") == "array" else f"`[{path}]`"
        for name in names:
            seen.add(name)
            inner = tables[name]
            kind = inner["properties"].get("kind", {}).get("const")
            yield InputSection(f'{title}, kind = "{kind}"' if kind else title, inner)
            yield from _inner(path, inner, tables, seen)


def _tables_of(value: Json) -> Iterator[str]:
    """Names of the tables that a key's value may be."""
    if "$ref" in value:
        yield value["$ref"].rpartition("/")[2]
    for one in (value.get("items"), *value.get("oneOf", ())):
        if isinstance(one, Mapping):
            yield from _tables_of(one)


def _table(of: Json) -> str:
    required = of.get("required", ())
    rows = []
    for key, value in of["properties"].items():
        default = "required" if key in required else _default(value)
        rows.append((f"`{key}`", _type(value), default, value.get("description", "")))
    return table(_HEAD, rows)


def _type(value: Json) -> str:
    if any(name in _LENGTHS for name in _tables_of(value)):
        return "[length](#lengths)"
    if "$ref" in value or "oneOf" in value:
        return "table"
    if "anyOf" in value:
        return " or ".join(_type(one) for one in value["anyOf"])
    if "const" in value:
        return f'`"{value["const"]}"`'
    if "enum" in value:
        return ", ".join(f'`"{one}"`' if isinstance(one, str) else f"`{one:g}`" for one in value["enum"])
    if value["type"] == "array":
        each = _type(value["items"]).replace("number", "numbers")
        return "tables" if next(_tables_of(value), None) else f"list of {each}"
    if value["type"] == "object":
        return f"table, each value a {_type(value['additionalProperties'])}"
    if value["type"] == "string":
        words = {"path": "path", "size": "size with a unit"}
        return words.get(value.get("format", ""), "name" if "pattern" in value else "text")
    if value["type"] == "boolean":
        return "`true` or `false`"
    return ("whole number" if value["type"] == "integer" else "number") + _range(value)


def _range(value: Json) -> str:
    if "maximum" in value and "exclusiveMinimum" in value:
        return f" over {value['exclusiveMinimum']:g}, up to {value['maximum']:g}"
    if "maximum" in value:
        return f", {value['minimum']:g} to {value['maximum']:g}"
    if "exclusiveMinimum" in value:
        return f" over {value['exclusiveMinimum']:g}"
    return f" from {value['minimum']:g}" if "minimum" in value else ""


def _default(value: Json) -> str:
    said = value.get("default")
    if isinstance(said, Mapping) or (
        isinstance(said, list) and any(isinstance(one, Mapping) for one in said)
    ):
        return "its defaults"
    if said is None:
        return "none"
    if isinstance(said, bool):
        return f"`{str(said).lower()}`"
    if isinstance(said, str):
        return f'`"{said}"`'
    text = f"{said:_}" if isinstance(said, int) and said > 9999 else str(said)
    return f"`{text}`".replace("'", '"')
