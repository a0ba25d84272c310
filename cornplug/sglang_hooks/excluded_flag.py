"""Description of an SGLang setting that excludes KV sharing."""

from __future__ import annotations

from typing import NamedTuple


class ExcludedFlag(NamedTuple):
    """An SGLang setting that excludes KV sharing."""

    field: str
    plain: object
    """Value of the field that does not exclude sharing."""
    flag: str
    why: str
    also: tuple[object, ...] = ()
    """Further values that do not exclude sharing."""
