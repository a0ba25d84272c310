"""A trace: requests, each with the entries that it looks up and, where they are missing, writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceAccess:
    """One entry that a request needs."""

    key: int
    """Below 2**64."""
    size_bytes: int
    cost_s: float
    """Seconds that its recomputation takes."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request."""

    time_s: float
    app: str
    accesses: tuple[TraceAccess, ...]
    is_prefix: bool
    """Each entry continues the one before it, as KV pages do: without that one it saves nothing."""


def distinct_bytes(requests: Iterable[TraceRequest]) -> int:
    """Bytes of all entries of a trace, each once."""
    return sum({access.key: access.size_bytes for one in requests for access in one.accesses}.values())
