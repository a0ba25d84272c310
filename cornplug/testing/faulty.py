"""Wrapper of a store that injects faults, to test that callers handle them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cornplug.errors import StoreUnavailable
from cornplug.store.base import (
    Leases,
    PayloadLocation,
    Reservation,
    ReserveRefusal,
    ReserveTerms,
    Store,
)
from cornplug.store.store_stats import StoreStat


class FaultyStore(Store):
    """Store that forwards calls to `inner`, except for the faults that are currently set.

    Attributes:
        unavailable: Whether every call raises StoreUnavailable("store_down") immediately.
        slow_s: Delay in seconds of every call. If the delay exceeds the call's deadline, the call raises
            StoreUnavailable("store_timeout") at the deadline, and is not forwarded.
        full: Whether `reserve` returns FULL for all entries.
        growing: Number of entries that a call of `reserve` forwards. It returns GROWING for the other
            entries. None forwards all entries.
        corrupt_reads: Whether a read-only `view` returns a copy with one bit of the last byte flipped.
        calls: Number of calls by method, including calls that failed with a fault.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.unavailable = False
        self.slow_s = 0.0
        self.full = False
        self.growing: int | None = None
        self.corrupt_reads = False
        self.calls: dict[str, int] = {}

    def contains(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        self._inject_fault("contains", deadline_s)
        return self.inner.contains(keys, deadline_s=deadline_s)

    def lease(self, keys: Sequence[bytes], *, ttl_s: float, deadline_s: float) -> Leases:
        self._inject_fault("lease", deadline_s)
        return self.inner.lease(keys, ttl_s=ttl_s, deadline_s=deadline_s)

    def reserve(
        self, entries: Sequence[tuple[bytes, int]], terms: ReserveTerms, *, deadline_s: float
    ) -> list[Reservation | ReserveRefusal]:
        self._inject_fault("reserve", deadline_s)
        if self.full:
            return [ReserveRefusal.FULL for _ in entries]
        there = entries[: self.growing]
        results = self.inner.reserve(there, terms, deadline_s=deadline_s)
        return results + [ReserveRefusal.GROWING for _ in entries[len(there) :]]

    def commit(self, written: Sequence[tuple[Reservation, bytes]], *, deadline_s: float) -> list[bool]:
        self._inject_fault("commit", deadline_s)
        return self.inner.commit(written, deadline_s=deadline_s)

    def release(self, tokens: Sequence[int], *, deadline_s: float) -> None:
        self._inject_fault("release", deadline_s)
        self.inner.release(tokens, deadline_s=deadline_s)

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        self._inject_fault("delete", deadline_s)
        return self.inner.delete(keys, deadline_s=deadline_s)

    def stat(self, *, deadline_s: float) -> StoreStat:
        self._inject_fault("stat", deadline_s)
        return self.inner.stat(deadline_s=deadline_s)

    @property
    def can_peek(self) -> bool:
        return self.inner.can_peek

    def peek(self, keys: Sequence[bytes]) -> bytes:
        self._inject_fault("peek", self.slow_s)
        return self.inner.peek(keys)

    def arena_memory(self, arena_id: bytes) -> memoryview | None:
        # With `corrupt_reads` None, because copies by a device would bypass `view`.
        return None if self.corrupt_reads else self.inner.arena_memory(arena_id)

    def view(self, location: PayloadLocation, *, writable: bool = False) -> memoryview:
        self.calls["view"] = self.calls.get("view", 0) + 1
        view = self.inner.view(location, writable=writable)
        if not self.corrupt_reads or writable or not view.nbytes:
            return view
        damaged = bytearray(view)
        damaged[-1] ^= 1
        return memoryview(damaged).toreadonly()

    def close(self) -> None:
        self.inner.close()

    def _inject_fault(self, method: str, deadline_s: float) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        if self.unavailable:
            raise StoreUnavailable("fault: no store", reason="store_down")
        time.sleep(min(self.slow_s, deadline_s))
        if self.slow_s > deadline_s:
            raise StoreUnavailable("fault: slow store", reason="store_timeout")
