"""Checks of a store's arguments. They raise ValueError before a client sends a request, and in the daemon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from cornplug.store.base import KEY_BYTES, PurgeRule, ReserveTerms

MAX_META_BYTES: Final = 1 << 20
"""Maximum size of a header in bytes. A header with checksums of 65535 segments has half of this size."""
MAX_TTL_S: Final = 3600.0
MAX_APP_BYTES: Final = 256
MAX_COST_S: Final = 3600.0
MAX_PARTS: Final = 1024
"""Maximum number of writers of one entry."""


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise ValueError unless every key has 32 bytes."""
    # Do not loop in Python, because there may be hundreds of keys.
    if others := set(map(len, keys)) - {KEY_BYTES}:
        raise ValueError(f"a key must have {KEY_BYTES} bytes, not {min(others)}")


def check_entries(entries: Sequence[tuple[bytes, int]]) -> None:
    """Raise ValueError if a key is invalid or a size is negative."""
    check_keys([key for key, _ in entries])
    for _, size in entries:
        if size < 0:
            raise ValueError(f"a payload cannot have {size} bytes")


def check_ttl(ttl_s: float) -> None:
    """Raise ValueError if `ttl_s` is not above 0 and at most MAX_TTL_S."""
    if not 0 < ttl_s <= MAX_TTL_S:
        raise ValueError(f"ttl_s is {ttl_s}; it must be above 0 and at most {MAX_TTL_S:g}")


def check_app(app: str) -> None:
    """Raise ValueError if the name has more than MAX_APP_BYTES bytes."""
    if len(app.encode()) > MAX_APP_BYTES:
        raise ValueError(
            f"the name of an app must have at most {MAX_APP_BYTES} bytes, not {len(app.encode())}"
        )


def check_terms(terms: ReserveTerms) -> None:
    """Raise ValueError if the app's name is too long, or if the part or the recomputation time is out of
    bounds."""
    check_app(terms.app)
    if not 0 <= terms.cost_s <= MAX_COST_S:
        raise ValueError(f"cost_s is {terms.cost_s}; it must be between 0 and {MAX_COST_S:g}")
    part = terms.part
    if part is None:
        return
    if not 16 <= len(part.group) <= 32:
        raise ValueError(f"a group must have 16 to 32 bytes, not {len(part.group)}")
    if not 0 <= part.index < part.count <= MAX_PARTS:
        raise ValueError(f"part {part.index} of {part.count}; at most {MAX_PARTS}")


def check_purge(rule: PurgeRule) -> None:
    """Raise ValueError if the app or an age is invalid."""
    if rule.app is not None:
        check_app(rule.app)
    for age_s in (rule.older_s, rule.unused_s):
        if not 0 <= age_s < math.inf:
            raise ValueError(f"age is {age_s} s; it must be at least 0 s")


def check_meta(meta: bytes) -> None:
    """Raise ValueError if `meta` is larger than MAX_META_BYTES."""
    if len(meta) > MAX_META_BYTES:
        raise ValueError(f"meta has {len(meta)} bytes, the maximum is {MAX_META_BYTES}")
