"""Checks of arguments, which raise ValueError in the caller before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from cornplug.store.base import KEY_BYTES, PurgeRule, WriterPart

MAX_META_BYTES: Final = 1 << 20
"""Maximum size of a header. A header of 65535 segments takes half of it."""
MAX_TTL_S: Final = 3600.0
MAX_APP_BYTES: Final = 256
MAX_COST_S: Final = 3600.0
MAX_PARTS: Final = 1024
"""Maximum number of writers of one entry."""


def check_keys(keys: Sequence[bytes]) -> None:
    """Raises ValueError unless every key is 32 bytes."""
    # Without a loop in Python, as there may be hundreds.
    if others := set(map(len, keys)) - {KEY_BYTES}:
        raise ValueError(f"a key must have {KEY_BYTES} bytes, not {min(others)}")


def check_entries(entries: Sequence[tuple[bytes, int]]) -> None:
    """Raises ValueError for a bad key or a size below zero."""
    check_keys([key for key, _ in entries])
    for _, size in entries:
        if size < 0:
            raise ValueError(f"a payload cannot have {size} bytes")


def check_part(part: WriterPart | None) -> None:
    """Raises ValueError for a part that no group can have."""
    if part is None:
        return
    if not 16 <= len(part.group) <= 32:
        raise ValueError(f"a group must have 16 to 32 bytes, not {len(part.group)}")
    if not 0 <= part.index < part.count <= MAX_PARTS:
        raise ValueError(f"part {part.index} of {part.count}; at most {MAX_PARTS}")


def check_ttl(ttl_s: float) -> None:
    """Raises ValueError for a lease that would end before it begins, or never."""
    if not 0 < ttl_s <= MAX_TTL_S:
        raise ValueError(f"ttl_s is {ttl_s}; it must be above 0 and at most {MAX_TTL_S:g}")


def check_app(app: str) -> None:
    """Raises ValueError for a name that is too long for a label."""
    if len(app.encode()) > MAX_APP_BYTES:
        raise ValueError(
            f"the name of an app must have at most {MAX_APP_BYTES} bytes, not {len(app.encode())}"
        )


def check_cost(cost_s: float) -> None:
    """Raises ValueError for a time of recomputation that no entry can have."""
    if not 0 <= cost_s <= MAX_COST_S:
        raise ValueError(f"cost_s is {cost_s}; it must be between 0 and {MAX_COST_S:g}")


def check_purge(rule: PurgeRule) -> None:
    """Raises ValueError for a rule of an app or age that no entry can have."""
    if rule.app is not None:
        check_app(rule.app)
    for age_s in (rule.older_s, rule.unused_s):
        if not 0 <= age_s < math.inf:
            raise ValueError(f"age is {age_s} s; it must be at least 0 s")


def check_meta(meta: bytes) -> None:
    """Raises ValueError for a meta larger than MAX_META_BYTES."""
    if len(meta) > MAX_META_BYTES:
        raise ValueError(f"meta has {len(meta)} bytes, the maximum is {MAX_META_BYTES}")
