"""Reference store in one process, with one lock and no socket. It serves as an executable specification.

store = MemoryStore(capacity_bytes=64 << 20)
writer, reader = store.connect(), store.connect()
"""

from __future__ import annotations

import itertools
import mmap
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from cornplug.errors import StoreUnavailable
from cornplug.settings import NamespaceConfig
from cornplug.store.arena import WriteFences
from cornplug.store.base import (
    Leases,
    PayloadLocation,
    Reservation,
    ReserveRefusal,
    ReserveTerms,
    Store,
)
from cornplug.store.daemon.index import StoreIndex
from cornplug.store.daemon.reservations import RECLAIM_S, RESERVATION_S, ReservationTimes
from cornplug.store.messages import (
    check_entries,
    check_keys,
    check_meta,
    check_terms,
    check_ttl,
)
from cornplug.store.store_stats import StoreStat


class MemoryStore:
    """Entries in this process's memory, shared by all connections. `clock` returns seconds."""

    def __init__(
        self,
        *,
        capacity_bytes: int,
        quarantine_s: float = 5.0,
        reservation_s: float = RESERVATION_S,
        reclaim_s: float = RECLAIM_S,
        clock: Callable[[], float] = time.monotonic,
        namespaces: Mapping[str, NamespaceConfig] | None = None,
    ) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        # Anonymous memory takes no time until it is written. A bytearray would be zeroed immediately.
        self.arena = mmap.mmap(-1, max(capacity_bytes, mmap.PAGESIZE))
        self.fences = WriteFences()
        self.index = StoreIndex(
            secrets.token_bytes(16),
            capacity_bytes,
            times=ReservationTimes(quarantine_s, reservation_s, reclaim_s),
            grow=lambda missing: missing,
            fences=self.fences,
            namespaces=namespaces,
        )
        self._owners = itertools.count(1)

    def connect(self) -> MemoryConnection:
        """Return a new connection. Closing it ends its leases and reservations."""
        return MemoryConnection(self, next(self._owners))


class MemoryConnection(Store):
    """Connection to a `MemoryStore`. It never waits, so no deadline is missed."""

    def __init__(self, store: MemoryStore, owner: int) -> None:
        self._store = store
        self._owner = owner
        self._closed = False

    def contains(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        check_keys(keys)
        with self._store.lock:
            return self._require_index().contains(keys)

    def lease(self, keys: Sequence[bytes], *, ttl_s: float, deadline_s: float) -> Leases:
        check_keys(keys)
        check_ttl(ttl_s)
        with self._store.lock:
            return self._require_index().lease(self._owner, keys, ttl_s=ttl_s, now_s=self._store.clock())

    def reserve(
        self, entries: Sequence[tuple[bytes, int]], terms: ReserveTerms, *, deadline_s: float
    ) -> list[Reservation | ReserveRefusal]:
        check_entries(entries)
        check_terms(terms)
        with self._store.lock:
            index, now_s = self._require_index(), self._store.clock()
            return index.reserve(self._owner, entries, terms, now_s=now_s)

    def commit(self, written: Sequence[tuple[Reservation, bytes]], *, deadline_s: float) -> list[bool]:
        for _, meta in written:
            check_meta(meta)
        with self._store.lock:
            index = self._require_index()
            return [index.commit(self._owner, reservation.token, meta) for reservation, meta in written]

    def release(self, tokens: Sequence[int], *, deadline_s: float) -> None:
        with self._store.lock:
            self._require_index().release(self._owner, tokens, now_s=self._store.clock())

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        check_keys(keys)
        with self._store.lock:
            return self._require_index().delete(keys)

    def stat(self, *, deadline_s: float) -> StoreStat:
        with self._store.lock:
            return self._require_index().stat()

    def view(self, location: PayloadLocation, *, writable: bool = False) -> memoryview:
        index = self._store.index
        end = location.offset + location.size
        if location.arena_id != index.arena_id or location.offset < 0 or end > index.capacity_bytes:
            raise StoreUnavailable("the location is in another arena", reason="stale_location")
        if writable and not self._store.fences.is_writable(location):
            raise StoreUnavailable("this reservation has ended", reason="stale_location")
        view = self.raw(location)
        return view if writable else view.toreadonly()

    @property
    def can_peek(self) -> bool:
        return True

    def peek(self, keys: Sequence[bytes]) -> bytes:
        return self.contains(keys, deadline_s=0)

    def arena_memory(self, arena_id: bytes) -> memoryview | None:
        return memoryview(self._store.arena) if arena_id == self._store.index.arena_id else None

    def raw(self, location: PayloadLocation) -> memoryview:
        """Return the writable bytes of a location without the checks of `view`. For tests that damage
        entries."""
        return memoryview(self._store.arena)[location.offset : location.offset + location.size]

    def close(self) -> None:
        with self._store.lock:
            if not self._closed:
                self._store.index.end_owner(self._owner, now_s=self._store.clock())
            self._closed = True

    def _require_index(self) -> StoreIndex:
        if self._closed:
            raise StoreUnavailable("this connection is closed", reason="store_down")
        return self._store.index
