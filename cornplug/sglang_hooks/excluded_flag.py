"""A setting of SGLang that excludes the sharing of KV."""

from __future__ import annotations

from typing import NamedTuple


class ExcludedFlag(NamedTuple):
    """A setting of SGLang that excludes the sharing of KV."""

    field: str
    plain: object
    """The field's value that does not."""
    flag: str
    why: str
    also: tuple[object, ...] = ()
    """Further values that do not."""
