"""Tables that classify each field of an engine's config classes: its value is part of the key, it is
harmless, or it prevents sharing.

Each release of an engine adds settings, and a new setting may change results. A field that is in none of the
tables therefore prevents sharing if it is set. The tables are in the packages for the engines, where a test
calls `misplaced` for every class.
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
"""Value in `FieldTables.in_key` for a field whose value becomes part of the key if it is not the default."""
_UNKNOWN: Final = "the setting is unknown to this release of cornplug; leave it at its default to share"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTables:
    """The three tables (`in_key`, `harmless`, `refused`) of one config class. Every field of the class is in
    exactly one of them."""

    of: str
    """Name of the config class, for messages."""
    in_key: Mapping[str, str]
    """Fields that affect the key, by name: `AS_OVERRIDE`, or a description of how the field's effect enters
    the key."""
    harmless: Mapping[str, str]
    """Fields that do not change shared entries, each with the reason."""
    refused: Mapping[str, str]
    """Fields that prevent sharing if they are not at their default, each with the reason."""
    same_as_default: Mapping[str, frozenset[Any]] = field(default_factory=dict)
    """Values that are equivalent to the default, by field name."""
    not_in_all: frozenset[str] = frozenset()
    """Names of fields that only some of the supported releases have."""


@dataclass(frozen=True, slots=True)
class SettingsVerdict:
    """Result of checking the settings of one engine: settings that are part of every key, and settings that
    prevent sharing."""

    overrides: Mapping[str, Any]
    """Settings that are part of every key, as "Class.field" -> JSON value. Empty if all settings are at their
    defaults."""
    refusals: Mapping[str, str]
    """Settings that prevent sharing, as "Class.field" -> reason. Empty if entries can be shared."""

    def __or__(self, other: SettingsVerdict) -> SettingsVerdict:
        return SettingsVerdict({**self.overrides, **other.overrides}, {**self.refusals, **other.refusals})

    def overrides_or_raise(self) -> dict[str, Any]:
        """Return the overrides. If settings prevent sharing, raises CheckpointError("settings") with the name
        of every such field."""
        if self.refusals:
            raise CheckpointError(
                "these settings prevent sharing:  "
                + "; ".join(f"{name}: {why}" for name, why in sorted(self.refusals.items())),
                reason="settings",
            )
        return dict(self.overrides)


def judge(tables: FieldTables, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> SettingsVerdict:
    """Return the verdict on a config class's fields, from their resolved `values`, their `defaults` and the
    class's tables.

    A field without a default counts as set. A field whose value has no JSON form is refused if its value
    would be part of the key.
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
                _UNKNOWN,
            )
            continue
        try:
            overrides[full] = plain(value)
        except TypeError as e:
            refusals[full] = f"cornplug cannot identify its value: {e}"
    return SettingsVerdict(overrides, refusals)


def misplaced(tables: FieldTables, fields: Iterable[str]) -> dict[str, str]:
    """Return the defects of the tables, by field name: fields that are in no table or in several, and names
    that the class no longer has. Used by tests."""
    existing = set(fields)
    places = (tables.in_key, tables.harmless, tables.refused)
    found = {name: sum(name in place for place in places) for name in existing}
    wrong = {name: "not in any table" for name, count in found.items() if count == 0}
    wrong |= {name: "in more than one table" for name, count in found.items() if count > 1}
    listed = {name for place in (*places, tables.same_as_default) for name in place}
    return wrong | dict.fromkeys(listed - existing - tables.not_in_all, f"{tables.of} has no such field")


def defaults_of(config_class: Any) -> dict[str, Any]:
    """Return the default value of each field of a dataclass, including pydantic's `Field(default=...)`.
    Fields whose default needs an instance are left out."""
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
    """Return the JSON form of a value, with enums, sets and dataclasses converted. Raises TypeError if it has
    none."""
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
        # Compare the JSON text, because Python treats True, 1 and 1.0 as equal.
        return json.dumps(plain(value), sort_keys=True) == json.dumps(plain(other), sort_keys=True)
    except TypeError:
        return value is other


def _means_default(tables: FieldTables, name: str, value: Any) -> bool:
    return any(_same(value, known) for known in tables.same_as_default.get(name, ()))


def _default(default: Any, factory: Callable[[], Any] | Any) -> Any:
    if default is not dataclasses.MISSING:
        return default
    return dataclasses.MISSING if factory is dataclasses.MISSING else factory()
