"""Replay of a trace against the store's index: the daemon's own code, without memory, sockets or a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

from cornplug.replay.trace import TraceAccess, TraceRequest
from cornplug.settings.store_settings import NamespaceConfig
from cornplug.store.base import KEY_BYTES, Reservation
from cornplug.store.daemon.index import StoreIndex

_OWNER: Final = 1
_BATCH: Final = 64
"""Number of entries that an engine reserves before it commits them: the pages of a step."""


class StoreReplay:
    """Requests as engines send them: a lease on the entries that are present, and reservations for the
    others."""

    def __init__(self, capacity_bytes: int, namespaces: Mapping[str, NamespaceConfig] | None = None) -> None:
        self._index = StoreIndex(
            bytes(16), capacity_bytes, quarantine_s=0.0, grow=lambda missing: missing, namespaces=namespaces
        )

    def serve(self, request: TraceRequest) -> list[bool]:
        """Return whether each access finds its entry, and write the missing entries."""
        keys = [_key(access) for access in request.accesses]
        mask = self._index.contains(keys)
        there = [key for key, is_there in zip(keys, mask, strict=True) if is_there]
        if request.is_prefix and 0 in mask:
            there = keys[: mask.index(0)]
        if there:
            leases = self._index.lease(_OWNER, there, ttl_s=60.0, now_s=request.time_s)
            self._index.release(_OWNER, sorted(set(leases.tokens)), now_s=request.time_s)
        missing = [access for access, is_there in zip(request.accesses, mask, strict=True) if not is_there]
        for start in range(0, len(missing), _BATCH):
            self._write(request, missing[start : start + _BATCH])
        return [bool(each) for each in mask]

    def _write(self, request: TraceRequest, missing: Sequence[TraceAccess]) -> None:
        reserved: list[Reservation] = []
        for cost_s, some in groupby(missing, key=lambda access: access.cost_s):
            entries = [(_key(access), access.size_bytes) for access in some]
            answers = self._index.reserve(
                _OWNER, entries, app=request.app, now_s=request.time_s, cost_s=cost_s
            )
            reserved += [answer for answer in answers if isinstance(answer, Reservation)]
        # As in the daemon, the tail of a message is committed first.
        for one in reversed(reserved):
            self._index.commit(_OWNER, one.token, b"")


def _key(access: TraceAccess) -> bytes:
    return access.key.to_bytes(KEY_BYTES)
