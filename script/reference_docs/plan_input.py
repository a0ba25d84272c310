"""docs/plan-input.md, from the JSON schema of a plan's TOML file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from cornplug.planner.inputs.component_shapes import known_models
from cornplug.planner.inputs.schema import plan_schema

from .markdown import notice

Json = Mapping[str, Any]

_LENGTHS: Final = {"LogNormal": "log-normal", "Histogram": "histogram"}
_INTRO: Final = """# Plan input

{notice}

This page lists the keys of the file that [`cornplug plan`](planner.md) reads. `cornplug plan init` writes a
first file.

To have your editor complete and check the file, save the output of `cornplug plan schema` as
`plan.schema.json` and put this into the first line (for Even Better TOML or Taplo):

```text
#:schema ./plan.schema.json
```

- `key = value` shows the default. All keys without "required" are optional.
- Sizes in GiB (2^30 bytes) may be text with a unit, such as `"64GiB"`. 1 GB/s is 10^9 bytes per second.
- Paths are relative to the file.
- A GPU type is a name from cornplug's table or from `[[gpus]]`.
- `[[NAME]]` may occur several times, and `[NAME]` once in its parent table.
"""
_LENGTH_TEXT: Final = """## Lengths

A length (tokens, items or units) is one of these:

- a whole number
- a log-normal distribution, `{ mean = 600, cv = 1.0, max = 4000 }`
- a histogram, `{ values = [100, 900], weights = [3, 1] }`
"""
_MODELS_TEXT: Final = """## Models known by hub id

`cornplug plan init MODEL --gpus GPU,GPU` knows the shapes of these models, and reads others from a
checkpoint's folder or the local Hugging Face cache. Numbers are billions of parameters, including the tower.
"""


class InputSection(NamedTuple):
    title: str
    table: Json


def page() -> str:
    """The text of docs/plan-input.md."""
    schema = plan_schema()
    parts = [_INTRO.format(notice=notice("`cornplug/planner/inputs/schema.py`"))]
    shown: dict[str, InputSection] = {}
    for section in sections(schema):
        title, of = section
        path = title.partition(",")[0]
        parts.append(f"## {title}\n\n{of['description']}\n\n{_keys(of, _earlier(section, shown))}")
        shown.setdefault(path, section)
    parts.append(_LENGTH_TEXT)
    for name, kind in _LENGTHS.items():
        of = schema["$defs"][name]
        parts.append(f"### {kind}\n\n{of['description']}\n\n{_keys(of)}")
    parts += [_MODELS_TEXT, _models()]
    return "\n".join(parts)


def _earlier(section: InputSection, shown: Mapping[str, InputSection]) -> InputSection | None:
    """The table whose equal keys this section does not repeat: the first one at the same place, or the one in
    which it is nested."""
    path = section.title.partition(",")[0]
    return shown.get(path) or shown.get(f"`[{path.strip('`[]').rpartition('.')[0]}]`")


def _models() -> str:
    """The rows of data/models.toml as a list."""
    rows = []
    for name, model in known_models().items():
        if name == model.ids[0]:
            total = (model.llm.parameters + (model.tower.parameters if model.tower else 0)) / 1e9
            weights = "" if model.quantisation == "none" else f", {model.quantisation}"
            rows.append(f"- {', '.join(f'`{one}`' for one in model.ids)}: {total:.1f}{weights}\n")
    return "".join(rows)


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


def _keys(of: Json, earlier: InputSection | None = None) -> str:
    """A list of a table's keys, each with its type and meaning. Keys that are equal in the earlier table are
    only named. The title contains the key `kind` of a table with several kinds."""
    required, before = of.get("required", ()), earlier.table["properties"] if earlier else {}
    rows, same = [], []
    for key, value in of["properties"].items():
        if key == "kind" and "const" in value:
            continue
        if before.get(key) == value:
            same.append(f"`{key}`")
            continue
        meaning = " ".join(value.get("description", "").split())
        rows.append(f"- {_head(key, value, required=key in required)}: {meaning}\n")
    if earlier and same:
        names = f"{same[0]} to {same[-1]}" if len(same) > 2 else ", ".join(same)
        rows.insert(0, f"- {names}: as in {earlier.title}\n")
    return "".join(rows)


def _head(key: str, value: Json, *, required: bool) -> str:
    """The key with its default and its type. A boolean's or a text's default already shows the type."""
    if required:
        return f"`{key}` ({_type(value)}, required)"
    default = _default(value)
    if default and value.get("type") in ("boolean", "string") and "enum" not in value:
        return f"`{key}{default}`"
    return f"`{key}{default}` ({_type(value)})"


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
        return "tables" if next(_tables_of(value), None) else f"list of {_plural(value['items'])}"
    if value["type"] == "object":
        return f"table of {_plural(value['additionalProperties'])}"
    if value["type"] == "string":
        words = {"path": "path", "size": "size with a unit"}
        return words.get(value.get("format", ""), "name" if "pattern" in value else "text")
    if value["type"] == "boolean":
        return "`true` or `false`"
    return ("integer" if value["type"] == "integer" else "number") + _range(value)


def _plural(value: Json) -> str:
    return re.sub("number|integer|name|text", r"\g<0>s", _type(value))


def _range(value: Json) -> str:
    low = f" >{value['exclusiveMinimum']:g}" if "exclusiveMinimum" in value else ""
    if "minimum" in value:
        low = f" ≥{value['minimum']:g}"
    return low + (f" ≤{value['maximum']:g}" if "maximum" in value else "")


def _default(value: Json) -> str:
    said = value.get("default")
    if (
        said is None
        or isinstance(said, Mapping)
        or (isinstance(said, list) and any(isinstance(one, Mapping) for one in said))
    ):
        return ""
    if isinstance(said, bool):
        return f" = {str(said).lower()}"
    if isinstance(said, str):
        return f' = "{said}"'
    text = f"{said:_}" if isinstance(said, int) and said > 9999 else str(said)
    return f" = {text}".replace("'", '"')
