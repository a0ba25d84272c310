"""Conversion of pydantic's errors to messages for the author of the file, with key, problem and remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cornplug.planner.inputs.input_error import InputError, Place, nearest
from cornplug.planner.inputs.schema import Histogram, InputTable, LogNormal, PlanInput

_LENGTH: Final = (
    "{0} = 600, {0} = {{ mean = 600, cv = 1.0 }} or {0} = {{ values = [100, 900], weights = [3, 1] }}"
)
_EXAMPLES: Final[Mapping[str, str]] = {
    **{key: _LENGTH.format(key) for key in ("prompt", "output", "items", "units")},
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
_WORDS: Final[Mapping[str, str]] = {
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


def problems(error: ValidationError, data: Mapping[str, Any]) -> list[InputError]:
    """Convert a validation error of the file with this `data`. Returns at most one error for each location in
    the file, and omits the errors of a table in which another location has an error."""
    found: dict[Place, InputError] = {}
    for detail in error.errors():
        if detail["type"] == "union_tag_not_found" and detail["loc"][-1] == "shape":
            continue  # The shape's kind is that of the component, which has its own error.
        one = _problem(detail, data)
        found.setdefault(one.place, one)
    inner = {place[:end] for place in found for end in range(len(place))}
    return [one for place, one in found.items() if place not in inner]


def _problem(detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    place, kind = _place(detail, data), detail["type"]
    make = _MAKERS.get(kind)
    if make is None and kind.split("_")[0] in _WORDS:
        make = _wrong_type
    if make is None:
        return InputError(place, f"{_shown(detail['input'])}: {detail['msg']}", _example(place))
    return make(place, detail, data)


def _place(detail: ErrorDetails, data: Mapping[str, Any]) -> Place:
    """Return the error's location in the file: pydantic's location without the names of a union's members,
    which the file does not contain."""
    place: Place = ()
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


def _missing(place: Place, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    return InputError(place, "missing", _example(place))


def _unknown_key(place: Place, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    keys = sorted(_keys_at(place[:-1], detail["loc"]))
    return InputError(place, "unknown key", nearest(str(place[-1]), keys))


def _wrong_type(place: Place, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    word = _WORDS[detail["type"].split("_")[0]]
    remedy = _example(place, otherwise=f"Write {word}.")
    return InputError(place, f"{_shown(detail['input'])} is not {word}", remedy)


def _not_one_of(place: Place, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    expected = str(detail.get("ctx", {}).get("expected", "")).replace("'", '"')
    return InputError(place, f"{_shown(detail['input'])} is not an allowed value", f"Write {expected}.")


def _no_tag(place: Place, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    context = detail.get("ctx", {})
    tag = context.get("tag")
    problem = f'"{tag}" is not an allowed value' if tag else "missing"
    return InputError((*place, "kind"), problem, f"Write kind = {_PROFILE_KINDS}.")


def _out_of_range(word: str, key: str) -> Callable[[Place, ErrorDetails, Mapping[str, Any]], InputError]:
    def make(place: Place, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
        bound = detail.get("ctx", {})[key]
        remedy = _example(place, otherwise=f"Write a number {word} {bound:g}.")
        return InputError(place, f"{_shown(detail['input'])} is not {word} {bound:g}", remedy)

    return make


def _empty(place: Place, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    return InputError(place, "empty", _example(place, otherwise="Write at least one."))


def _bad_name(place: Place, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    remedy = "Use letters, digits, '.', '_' and '-', with a letter or digit first."
    return InputError(place, f"{_shown(detail['input'])} is not a valid name", remedy)


def _of_a_validator(place: Place, detail: ErrorDetails, data: Mapping[str, Any]) -> InputError:
    context = detail.get("ctx", {})
    key = context["key"]
    return InputError((*place, key) if key else place, context["problem"], context["remedy"])


_MAKERS: Final[Mapping[str, Callable[[Place, ErrorDetails, Mapping[str, Any]], InputError]]] = {
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
    "plan_input": _of_a_validator,
}


def _example(place: Place, otherwise: str = "") -> str:
    key = next((part for part in reversed(place) if isinstance(part, str)), "")
    if key in _EXAMPLES:
        return f"Write, for example, {_EXAMPLES[key]}."
    return otherwise or f"Add {key} = ..., or remove the whole table."


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _keys_at(place: Place, loc: Place) -> set[str]:
    """Return the keys that the pydantic models allow in the table at a location. If the table is a member of
    a union, `loc` contains the name of the member."""
    tables: list[type[InputTable]] = [PlanInput]
    for key in place:
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
