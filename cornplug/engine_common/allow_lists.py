"""Where each field of an engine's config class stands: in the key, harmless, or a reason not to share.

An engine gains settings with every release, and a new one may change values. So a field that stands in
none of the tables counts as "refuse" once it is set. The tables are data of the engines' rooms; a test
there asks `misplaced` for every class.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cornplug.errors import CheckpointError

AS_OVERRIDE: Final = "override"
"""In `FieldTables.in_key`: the value itself goes into the key wherever it is not the default."""
_UNKNOWN: Final = "this release of cornplug does not know the setting; leave it at its default to share"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTables:
    """The three tables of one config class. Every field stands in exactly one of them."""

    of: str
    """The config class, as messages name it."""
    in_key: Mapping[str, str]
    """field -> `AS_OVERRIDE`, or in words how else its effect comes into the key."""
    harmless: Mapping[str, str]
    """field -> why no value of it changes shared entries."""
    refused: Mapping[str, str]
    """field -> why nothing is shared where it is not at its default."""
    same_as_default: Mapping[str, frozenset[Any]] = field(default_factory=dict)
    """field -> values equivalent to the default."""
    not_in_all: frozenset[str] = frozenset()
    """Fields that only some of the supported releases have."""


@dataclass(frozen=True, slots=True)
class SettingsVerdict:
    """The overrides and refusals that follow from the settings of one engine."""

    overrides: Mapping[str, Any]
    """"Class.field" -> value, JSON only: part of every key. {} where all is as by default."""
    refusals: Mapping[str, str]
    """"Class.field" -> why the entries that it changes cannot be shared. {} where sharing is right."""

    def __or__(self, other: SettingsVerdict) -> SettingsVerdict:
        return SettingsVerdict({**self.overrides, **other.overrides}, {**self.refusals, **other.refusals})

    def overrides_or_raise(self) -> dict[str, Any]:
        """The overrides. Raises CheckpointError("settings") that names every field in the way."""
        if self.refusals:
            raise CheckpointError(
                "these settings prevent sharing:  "
                + "; ".join(f"{name}: {why}" for name, why in sorted(self.refusals.items())),
                reason="settings",
            )
        return dict(self.overrides)


def judge(tables: FieldTables, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> SettingsVerdict:
    """The verdict on the resolved `values` of every field, of an engine that has these `defaults`.

    A field that has no default counts as set. A value that JSON cannot carry is refused where the key
    would need it.
    """
    overrides: dict[str, Any] = {}
    refusals: dict[str, str] = {}
    for name, value in values.items():
        where = tables.in_key.get(name)
        if name in tables.harmless or (where is not None and where != AS_OVERRIDE):
            continue
        if name in defaults and _same(value, defaults[name]):
            continue
        full = f"{tables.of}.{name}"
        if _means_default(tables, name, value):
            continue
        if where is None:
            refusals[full] = tables.refused.get(
                name,
                "this release of cornplug does not know the setting; leave it at its default to share",
            )
            continue
        try:
            overrides[full] = plain(value)
        except TypeError as e:
            refusals[full] = f"cornplug cannot identify its value: {e}"
    return SettingsVerdict(overrides, refusals)


def misplaced(tables: FieldTables, fields: Iterable[str]) -> dict[str, str]:
    """name -> defect, of fields in none of the tables or in several, and of names that the class no longer
    has. For tests."""
    existing = set(fields)
    places = (tables.in_key, tables.harmless, tables.refused)
    found = {name: sum(name in place for place in places) for name in existing}
    wrong = {name: "not in any table" for name, count in found.items() if count == 0}
    wrong |= {name: "in more than one table" for name, count in found.items() if count > 1}
    listed = {name for place in (*places, tables.same_as_default) for name in place}
    return wrong | dict.fromkeys(listed - existing - tables.not_in_all, f"{tables.of} has no such field")


def defaults_of(config_class: Any) -> dict[str, Any]:
    """The defaults of a dataclass, pydantic's (`Field(default=...)`) too; without those that only an
    instance of it can make."""
    found: dict[str, Any] = {}
    for one in dataclasses.fields(config_class):
        default, factory = one.default, one.default_factory
        if default is not dataclasses.MISSING and hasattr(default, "is_required"):
            if default.is_required():
                continue
            factory = default.default_factory or dataclasses.MISSING
            default = dataclasses.MISSING if default.default_factory else default.default
        made = _default(default, factory)
        if made is not dataclasses.MISSING:
            found[one.name] = made
    return found


def plain(value: Any) -> Any:
    """A value as JSON carries it. Raises TypeError for a value without such a form."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a mapping has keys that are not strings")
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(inner) for inner in value), key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name, None)) for one in dataclasses.fields(value)}
    raise TypeError(f"a {type(value).__name__}")


def _same(value: Any, other: Any) -> bool:
    try:
        # As text: to Python True is 1, and 1 is 1.0.
        return json.dumps(plain(value), sort_keys=True) == json.dumps(plain(other), sort_keys=True)
    except TypeError:
        return value is other


def _means_default(tables: FieldTables, name: str, value: Any) -> bool:
    return any(_same(value, known) for known in tables.same_as_default.get(name, ()))


def _default(default: Any, factory: Callable[[], Any] | Any) -> Any:
    if default is not dataclasses.MISSING:
        return default
    return dataclasses.MISSING if factory is dataclasses.MISSING else factory()
