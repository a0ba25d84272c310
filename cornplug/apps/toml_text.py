"""Writer for plain data as TOML, which the standard library can only read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(data: Mapping[str, Any]) -> str:
    """Return a document of tables, lists, strings, numbers and booleans."""
    return "\n".join(_table((), data)).lstrip("\n") + "\n"


def _table(place: tuple[str, ...], data: Mapping[str, Any]) -> Iterator[str]:
    later: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) or (isinstance(value, list) and _are_tables(value)):
            later[key] = value
        else:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in later.items():
        inner = (*place, _key(key))
        head = ".".join(inner)
        for one in value if isinstance(value, list) else [value]:
            yield from ("", f"[[{head}]]" if isinstance(value, list) else f"[{head}]")
            yield from _table(inner, one)


def _are_tables(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(one, Mapping) for one in value)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        # JSON's strings are TOML's, but for one control character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _value(key)
