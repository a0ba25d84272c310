"""A store in memory whose entries a test can list, to damage or delete them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cornplug.store.base import Reservation, ReserveRefusal, ReserveTerms
from cornplug.store.daemon.placement import StoredEntry
from cornplug.store.memory import MemoryConnection, MemoryStore


class KeyedStore(MemoryStore):
    """Notes the keys that its connections reserve."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._reserved: dict[bytes, None] = {}

    def connect(self) -> MemoryConnection:
        connection = super().connect()
        reserve = connection.reserve

        def noted(
            entries: Sequence[tuple[bytes, int]], terms: ReserveTerms, *, deadline_s: float
        ) -> list[Reservation | ReserveRefusal]:
            self._reserved.update(dict.fromkeys(key for key, _ in entries))
            return reserve(entries, terms, deadline_s=deadline_s)

        connection.reserve = noted  # type: ignore[method-assign]
        return connection

    def entries(self) -> list[StoredEntry]:
        """Entries that are stored now, in the order in which they were reserved."""
        return [entry for key in self._reserved if (entry := self.index.find(key)) is not None]

    def damage(self, nth: int) -> None:
        """Flip the last byte of the nth entry."""
        location = self.entries()[nth].location
        self.arena[location.offset + location.size - 1] ^= 1
