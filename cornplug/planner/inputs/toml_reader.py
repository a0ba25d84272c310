"""Reader for a plan's TOML file, which reports all errors together, each with its line and a remedy.

`tomllib` does not report lines, so `key_lines` finds the lines of keys and list elements. The text must be
valid TOML, because `key_lines` does not check it.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cornplug.errors import ConfigError
from cornplug.planner.inputs import cross_checks
from cornplug.planner.inputs.field_types import (
    BARE_KEY,
    InputError,
    Location,
    field_path,
    suggest_known_name,
)
from cornplug.planner.inputs.schema import Histogram, InputTable, LogNormal, PlanInput

_POSITION_SUFFIX: Final = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$")
File = TypeVar("File", bound=PlanInput)
_LENGTH_EXAMPLE: Final = (
    "{0} = 600, {0} = {{ mean = 600, cv = 1.0 }} or {0} = {{ values = [100, 900], weights = [3, 1] }}"
)
_EXAMPLES: Final[Mapping[str, str]] = {
    **{key: _LENGTH_EXAMPLE.format(key) for key in ("prompt", "output", "items", "units")},
    "name": 'name = "chat"',
    "kind": 'kind = "llm"',
    "llm": 'llm = "NAME" of a component',
    "encoder": 'encoder = "NAME" of a component',
    "generator": 'generator = "NAME" of a component',
    "n_plus_one": 'n_plus_one = true, false or "node"',
    "rate": "rate = 4.0, in requests per second",
    "peak": "peak = 1.5, to plan for 1.5 times the mean rate",
    "burst": "burst = 1.0 for a Poisson process",
    "tokens": "tokens = 256",
    "hit_rate": "hit_rate = 0.3",
    "ttft_s": "ttft_s = 1.0",
    "tpot_s": "tpot_s = 0.05",
    "e2e_s": "e2e_s = 10.0",
    "gpu": 'gpu = "H100"',
    "price_per_hour": "price_per_hour = 55.04, for the whole machine",
    "parameters": "parameters = 7.6e9",
    "requests_per_s": 'requests_per_s = 5.0 or requests_per_s = { "app/request" = 5.0 }',
    "tp": "tp = [1, 2]",
    "components": '[[components]] with name = "llm" and kind = "llm"',
    "applications": '[[applications]] with name = "chat" and llm = "llm"',
    "requests": '[[applications.requests]] with name = "short" and rate = 4.0',
    "media": '[[applications.requests.media]] with encoder = "vit" and tokens = 256',
    "pool": '[[pool]] with name = "h100" and gpu = "H100"',
    "profiles": 'profiles = [{ kind = "roofline" }]',
}
_TYPE_WORDS: Final[Mapping[str, str]] = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "string": "a string in quotes",
    "path": "a path in quotes",
    "list": "a list",
    "model": "a table",
    "dict": "a table",
    "bool": "true or false",
}
_PROFILE_KINDS: Final = '"roofline", "table" or "throughput"'
_LENGTH_TAGS: Final[Mapping[str, type[InputTable]]] = {"log-normal": LogNormal, "histogram": Histogram}
_BLANK: Final = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_STRING: Final = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?:"{0,2})' + r"|'''.*?'''(?:'{0,2})" + r'|"(?:\\.|[^"\\\n])*"' + r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR: Final = re.compile(r"[^,\]}\n#]+")
_DOT: Final = re.compile(r"[ \t]*\.[ \t]*")


def read(path: Path) -> PlanInput:
    """Read the TOML file of a plan. Raises the same errors as `read_as`."""
    return read_as(PlanInput, path, cross_checks.errors)


def read_as(table: type[File], path: Path, checks: Callable[[File], Iterable[InputError]]) -> File:
    """Read a TOML file as an instance of `table`. Paths in the file are relative to its folder.

    Raises ConfigError if the file has errors. The error's text has a line for each error in the order of the
    file, such as "plan.toml:17 applications[0].llm: problem. Remedy". The error's `field` is the field of the
    first error. `checks` yields further errors, and is called only if every table is valid.
    """
    text = _text(path)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise _syntax_error(path, text, e) from e
    try:
        plan_input = table.model_validate(data, context={"folder": path.parent})
    except ValidationError as e:
        raise _join_errors(path, text, _problems(e, data)) from e
    if errors := list(checks(plan_input)):
        raise _join_errors(path, text, errors)
    return plan_input


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except OSError as e:
        raise ConfigError(
            str(path), f"cannot be read: {e.strerror}", "Pass the path of a plan's TOML file."
        ) from e
    except UnicodeDecodeError as e:
        raise ConfigError(str(path), "not UTF-8 text", "Pass the path of a plan's TOML file.") from e


def _syntax_error(path: Path, text: str, error: tomllib.TOMLDecodeError) -> ConfigError:
    found = _POSITION_SUFFIX.search(str(error))
    line = int(found[1]) if found and found[1] else text.count("\n") + 1
    problem = _POSITION_SUFFIX.sub("", str(error))
    content = text.splitlines()[line - 1].strip() if line <= text.count("\n") + 1 and text else ""
    remedy = "Use TOML syntax: key = value, strings in quotes, and headers such as [rules] or [[components]]."
    return ConfigError(f"{path}:{line}", f"{problem}: {content}" if content else problem, remedy)


def _join_errors(path: Path, text: str, errors: Iterable[InputError]) -> ConfigError:
    lines = key_lines(text)
    placed = sorted(((key_line(lines, e.location), e) for e in errors), key=lambda pair: pair[0])
    (line, first), *others = placed
    more = [f"{path}:{at} {e}" for at, e in others]
    return ConfigError(
        f"{path}:{line} {field_path(first.location)}", first.problem, "\n".join([first.remedy, *more])
    )


def _problems(error: ValidationError, data: Mapping[str, Any]) -> list[InputError]:
    """Convert a validation error of the file with this `data`. Returns at most one error for each location in
    the file, and omits the errors of a table in which another location has an error."""
    found: dict[Location, InputError] = {}
    for detail in error.errors():
        if detail["type"] == "union_tag_not_found" and detail["loc"][-1] == "shape":
            continue  # The shape's kind is derived from the component's kind, for which an error is reported.
        one = _problem(detail, data)
        found.setdefault(one.location, one)
    inner = {place[:end] for place in found for end in range(len(place))}
    return [one for place, one in found.items() if place not in inner]


def _problem(detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    place, kind = _error_location(detail, data), detail["type"]
    make = _ERROR_MAKERS.get(kind)
    if make is None and kind.split("_")[0] in _TYPE_WORDS:
        make = _wrong_type
    if make is None:
        return InputError(place, f"{_format_value(detail['input'])}: {detail['msg']}", _example(place))
    return make(place, detail, data)


def _error_location(detail: ErrorDetails, data: Mapping[str, Any]) -> Location:
    """Return the error's location in the file: pydantic's location without the names of a union's members,
    which the file does not contain."""
    place: Location = ()
    value: Any = data
    for part in detail["loc"]:
        inside = (
            part < len(value)
            if isinstance(value, list) and isinstance(part, int)
            else isinstance(value, dict) and part in value
        )
        if inside:
            place, value = (*place, part), value[part]
    return (*place, detail["loc"][-1]) if detail["type"] == "missing" else place


def _missing(location: Location, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    return InputError(location, "missing", _example(location))


def _unknown_key(location: Location, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    keys = sorted(_keys_at(location[:-1], detail["loc"]))
    return InputError(location, "unknown key", suggest_known_name(str(location[-1]), keys))


def _wrong_type(location: Location, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    word = _TYPE_WORDS[detail["type"].split("_")[0]]
    remedy = _example(location, otherwise=f"Write {word}.")
    return InputError(location, f"{_format_value(detail['input'])} is not {word}", remedy)


def _not_one_of(location: Location, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    expected = str(detail.get("ctx", {}).get("expected", "")).replace("'", '"')
    return InputError(
        location, f"{_format_value(detail['input'])} is not an allowed value", f"Write {expected}."
    )


def _no_tag(location: Location, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    context = detail.get("ctx", {})
    tag = context.get("tag")
    problem = f'"{tag}" is not an allowed value' if tag else "missing"
    return InputError((*location, "kind"), problem, f"Write kind = {_PROFILE_KINDS}.")


def _out_of_range(word: str, key: str) -> Callable[[Location, ErrorDetails, Mapping[str, Any]], InputError]:
    def make(location: Location, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
        bound = detail.get("ctx", {})[key]
        remedy = _example(location, otherwise=f"Write a number {word} {bound:g}.")
        return InputError(location, f"{_format_value(detail['input'])} is not {word} {bound:g}", remedy)

    return make


def _empty(location: Location, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    return InputError(location, "empty", _example(location, otherwise="Write at least one."))


def _bad_name(location: Location, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    remedy = "Use letters, digits, '.', '_' and '-', with a letter or digit first."
    return InputError(location, f"{_format_value(detail['input'])} is not a valid name", remedy)


def _validator_error(location: Location, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    context = detail.get("ctx", {})
    key = context["key"]
    return InputError((*location, key) if key else location, context["problem"], context["remedy"])


_ERROR_MAKERS: Final[Mapping[str, Callable[[Location, ErrorDetails, Mapping[str, Any]], InputError]]] = {
    "missing": _missing,
    "extra_forbidden": _unknown_key,
    "literal_error": _not_one_of,
    "union_tag_invalid": _no_tag,
    "union_tag_not_found": _no_tag,
    "greater_than": _out_of_range("above", "gt"),
    "greater_than_equal": _out_of_range("at least", "ge"),
    "less_than_equal": _out_of_range("at most", "le"),
    "too_short": _empty,
    "string_pattern_mismatch": _bad_name,
    "plan_input": _validator_error,
}


def _example(location: Location, otherwise: str = "") -> str:
    key = next((part for part in reversed(location) if isinstance(part, str)), "")
    if key in _EXAMPLES:
        return f"Write, for example, {_EXAMPLES[key]}."
    return otherwise or f"Add {key} = ..., or remove the whole table."


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _keys_at(location: Location, loc: Location) -> set[str]:
    """Return the keys that the pydantic models allow in the table at a location. If the table is a member of
    a union, `loc` contains the name of the member."""
    tables: list[type[InputTable]] = [PlanInput]
    for key in location:
        if isinstance(key, str):
            fields = [table.model_fields[key] for table in tables if key in table.model_fields]
            tables = [table for one in fields for table in _tables(one.annotation)]
    meant = [table for table in tables if _tag(table) in loc]
    return {key for table in meant or tables for key in table.model_fields}


def _tag(table: type[InputTable]) -> str | None:
    named = next((tag for tag, model in _LENGTH_TAGS.items() if model is table), None)
    kind = table.model_fields.get("kind")
    return named or (str(kind.default) if kind is not None else None)


def _tables(annotation: Any) -> Iterator[type[InputTable]]:
    if isinstance(annotation, type) and issubclass(annotation, InputTable):
        yield annotation
    for inner in get_args(annotation):
        yield from _tables(inner)


def key_lines(text: str) -> dict[Location, int]:
    """Return the line of each location in the text, counted from 1. A table that dotted keys create has the
    line of the first of these keys."""
    return _KeyScanner(text).scan()


def key_line(lines: dict[Location, int], location: Location) -> int:
    """Return the line of a location, or of the innermost table around the location that the file contains.
    Returns 1 if the file contains no such table."""
    while location and location not in lines:
        location = location[:-1]
    return lines.get(location, 1)


class _KeyScanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._offset = 0
        self._newlines = [m.start() for m in re.finditer("\n", text)]
        self._lines: dict[Location, int] = {}
        self._element_counts: dict[Location, int] = {}
        """Number of [[tables]] before the current position, by the location of their list."""

    def scan(self) -> dict[Location, int]:
        table: Location = ()
        while self._skip(_BLANK) and self._offset < len(self._text):
            line = self._line
            if self._take("[["):
                table = self._next_element(self._key())
                self._take("]]")
            elif self._take("["):
                table = self._table_location(self._key())
                self._take("]")
            else:
                self._pair(table)
                continue
            self._record_line(table, line)
        return self._lines

    @property
    def _line(self) -> int:
        return bisect_right(self._newlines, self._offset - 1) + 1

    def _record_line(self, location: Location, line: int) -> None:
        for end in range(1, len(location) + 1):
            self._lines.setdefault(location[:end], line)

    def _table_location(self, keys: Location) -> Location:
        """Return the location of a header's table. The key of a [[list]] refers to the last element so
        far."""
        place: Location = ()
        for key in keys:
            place += (key,)
            if place in self._element_counts:
                place += (self._element_counts[place] - 1,)
        return place

    def _next_element(self, keys: Location) -> Location:
        elements = (*self._table_location(keys[:-1]), keys[-1])
        number = self._element_counts.get(elements, 0)
        self._element_counts[elements] = number + 1
        return (*elements, number)

    def _pair(self, table: Location) -> None:
        line = self._line
        place = table + self._key()
        self._record_line(place, line)
        self._skip(_BLANK)
        self._take("=")
        self._value(place)

    def _key(self) -> Location:
        keys: list[str] = []
        while True:
            self._skip(_BLANK)
            if found := BARE_KEY.match(self._text, self._offset):
                keys.append(found[0])
            else:
                found = _STRING.match(self._text, self._offset)
                assert found, "a key, as tomllib has seen"
                keys.append(tomllib.loads(f"key = {found[0]}")["key"])
            self._offset = found.end()
            if not (dot := _DOT.match(self._text, self._offset)):
                self._skip(_BLANK)
                return tuple(keys)
            self._offset = dot.end()

    def _value(self, location: Location) -> None:
        self._skip(_BLANK)
        self._record_line(location, self._line)
        if self._take("["):
            self._array(location)
        elif self._take("{"):
            self._inline_table(location)
        else:
            self._skip(_STRING) or self._skip(_SCALAR)

    def _array(self, location: Location) -> None:
        number = 0
        while self._skip(_BLANK) and not self._take("]"):
            self._value((*location, number))
            number += 1
            self._skip(_BLANK)
            self._take(",")

    def _inline_table(self, location: Location) -> None:
        while self._skip(_BLANK) and not self._take("}"):
            self._pair(location)
            self._skip(_BLANK)
            self._take(",")

    def _take(self, token: str) -> bool:
        found = self._text.startswith(token, self._offset)
        self._offset += len(token) if found else 0
        return found

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Advance past a match of the pattern, and return whether it matched. `_BLANK` always matches."""
        found = pattern.match(self._text, self._offset)
        self._offset = found.end() if found else self._offset
        return found is not None
