"""Store of an engine that cannot share. Every lookup is a miss with the same reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from cornplug.errors import StoreUnavailable
from cornplug.store.base import PayloadLocation, Reservation, ReserveRefusal, WriterPart
from cornplug.store.leases import Leases
from cornplug.store.stats.store_stats import StoreStat


class OffStore:
    """A `Store` that is always unavailable. `why` is the text of every error."""

    def __init__(self, why: str) -> None:
        self._why = why

    def contains(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        self._raise()

    def lease(self, keys: Sequence[bytes], *, ttl_s: float, deadline_s: float) -> Leases:
        self._raise()

    def reserve(
        self,
        entries: Sequence[tuple[bytes, int]],
        *,
        app: str,
        deadline_s: float,
        part: WriterPart | None = None,
        only_seen: bool = False,
        cost_s: float = 0.0,
    ) -> list[Reservation | ReserveRefusal]:
        self._raise()

    def commit(self, written: Sequence[tuple[Reservation, bytes]], *, deadline_s: float) -> list[bool]:
        self._raise()

    def release(self, tokens: Sequence[int], *, deadline_s: float) -> None:
        self._raise()

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        self._raise()

    def stat(self, *, deadline_s: float) -> StoreStat:
        self._raise()

    def view(self, location: PayloadLocation, *, writable: bool = False) -> memoryview:
        self._raise()

    def close(self) -> None:
        """Do nothing."""

    def _raise(self) -> NoReturn:
        raise StoreUnavailable(self._why, reason="store_off")
