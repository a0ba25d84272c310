"""Base class of every settings section."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def comma_separated(value: object) -> object:
    """Split a string at commas, for values of flags and variables. Any other value is returned unchanged."""
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())
