"""Trace of requests, each with the entries that it looks up and, if they are missing, writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceAccess:
    """One entry that a request needs."""

    key: int
    """Less than 2**64."""
    size_bytes: int
    cost_s: float
    """Seconds to recompute the entry."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request."""

    time_s: float
    app: str
    accesses: tuple[TraceAccess, ...]
    is_prefix: bool
    """Whether each entry continues the previous entry, as KV pages do, and saves nothing without it."""


def distinct_bytes(requests: Iterable[TraceRequest]) -> int:
    """Return the bytes of all distinct entries of a trace."""
    return sum({access.key: access.size_bytes for one in requests for access in one.accesses}.values())
