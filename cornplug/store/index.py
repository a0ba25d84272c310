"""What a store knows: which key lies where, who reads, who writes, who goes first.

Pure: no clock, no socket, no memory. `now_s` is an argument, growth of the arena a function
handed in, so that the same rules serve the reference store and the pool's daemon, and tests
run years in milliseconds. An `owner` is one connection.

    entries   key -> Entry        what lookups see
    lru       key -> Entry        those of them that nobody leases, oldest use first
    placed    offset -> Entry     all room in use by entries, also of deleted ones still leased
    pending   key -> token        reservations not yet committed
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cornplug.store.allocator import Allocator, align_up
from cornplug.store.base import Lease, Location, Refusal, Reservation, StoreStat
from cornplug.store.eviction import plan_eviction

CALL_GROWTH_BYTES: Final = 64 << 20
"""Most that one call may have the arena grow (or one entry, if larger): making 64 MiB of
shared memory takes about 15 ms, and the asker has a deadline."""

Grow = Callable[[int], int]
"""Asked for so many bytes more at the arena's end; answers how many it added: more, less or 0."""


@dataclass(slots=True, eq=False)
class Entry:
    """One committed payload. `room` is its aligned size; `readers` the leases on it."""

    key: bytes
    meta: bytes
    app: str
    location: Location
    room: int
    readers: int = 0
    visible: bool = True


@dataclass(frozen=True, slots=True)
class _Writing:
    owner: int
    app: str
    room: int
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class _Reading:
    owner: int
    entry: Entry


class Index:
    """The state of one store. Not thread-safe: its owner calls from one thread or under a lock."""

    def __init__(self, arena_id: bytes, capacity_bytes: int, *, quarantine_s: float, grow: Grow) -> None:
        self.arena_id = arena_id
        self.capacity_bytes = capacity_bytes // 64 * 64
        self.room = Allocator()
        self.shortfall_bytes = 0
        """Room that a call wanted and the arena had not grown to: what to grow between calls."""
        self._quarantine_s = quarantine_s
        self._grow = grow
        self._entries: dict[bytes, Entry] = {}
        self._lru: OrderedDict[bytes, Entry] = OrderedDict()
        self._placed: dict[int, Entry] = {}
        self._placed_end: dict[int, Entry] = {}
        self._pending: dict[bytes, int] = {}
        self._writing: dict[int, _Writing] = {}
        self._reading: dict[int, _Reading] = {}
        self._owned: dict[int, set[int]] = {}
        self._expiries: list[tuple[float, int]] = []
        self._quarantine: list[tuple[float, int, int]] = []
        self._bytes_by_app: dict[str, int] = {}
        # Tokens of different arenas never meet: one kept over a daemon's restart is unknown, not another's.
        self._last_token = int.from_bytes(arena_id[:5]) << 22
        self._refused_bytes: int | None = None
        self._evictions = self._hits = self._misses = self._refusals = 0

    def contains(self, keys: Sequence[bytes]) -> bytes:
        """One byte a key, 1 where present. Changes nothing."""
        entries = self._entries
        return bytes([key in entries for key in keys])

    def lease(self, owner: int, keys: Sequence[bytes], *, ttl_s: float, now_s: float) -> list[Lease | None]:
        """A lease per present key, held by `owner` until `now_s + ttl_s`."""
        self.sweep(now_s)
        out: list[Lease | None] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                out.append(None)
                continue
            self._hits += 1
            token = self._new_token(owner)
            entry.readers += 1
            self._lru.pop(key, None)
            self._reading[token] = _Reading(owner, entry)
            heapq.heappush(self._expiries, (now_s + ttl_s, token))
            out.append(Lease(token, key, entry.meta, entry.location))
        return out

    def reserve(
        self, owner: int, entries: Sequence[tuple[bytes, int]], *, app: str, now_s: float
    ) -> list[Reservation | Refusal]:
        """Room for each (key, size), growing and evicting as needed, or why not."""
        self.sweep(now_s)
        grown_from = self.room.end_bytes
        return [self._reserve_one(owner, key, size, app, grown_from) for key, size in entries]

    def commit(self, owner: int, token: int, meta: bytes) -> bool:
        """Publish a reservation of this owner; False when it has none by this token."""
        writing = self._writing.get(token)
        if writing is None or writing.owner != owner:
            return False
        self._forget_writing(token)
        location = writing.reservation.location
        entry = Entry(writing.reservation.key, meta, writing.app, location, writing.room)
        self._entries[entry.key] = self._lru[entry.key] = entry
        self._placed[location.offset] = entry
        self._placed_end[location.offset + entry.room] = entry
        self._refused_bytes = None
        return True

    def release(self, owner: int, tokens: Sequence[int]) -> None:
        """End this owner's leases; give up its reservations, whose room is free at once."""
        for token in tokens:
            reading = self._reading.get(token)
            if reading is not None and reading.owner == owner:
                self._end_lease(token)
                continue
            writing = self._writing.get(token)
            if writing is not None and writing.owner == owner:
                self._forget_writing(token)
                self._free(writing.reservation.location.offset, writing.room, writing.app)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Make entries invisible; their room is free once nobody leases it. The number dropped."""
        dropped = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                self._drop(entry)
                dropped += 1
        return dropped

    def end_owner(self, owner: int, *, now_s: float) -> None:
        """The connection is gone: leases end, rooms of reservations go to quarantine."""
        for token in list(self._owned.get(owner, ())):
            if token in self._reading:
                self._end_lease(token)
                continue
            writing = self._writing[token]
            self._forget_writing(token)
            self._charge(writing.app, -writing.room)
            room = (now_s + self._quarantine_s, writing.reservation.location.offset, writing.room)
            heapq.heappush(self._quarantine, room)
        self._owned.pop(owner, None)

    def sweep(self, now_s: float) -> None:
        """End what has expired."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, token = heapq.heappop(self._expiries)
            if token in self._reading:
                self._end_lease(token)
        while self._quarantine and self._quarantine[0][0] <= now_s:
            _, offset, room = heapq.heappop(self._quarantine)
            self.room.free(offset, room)
            self._refused_bytes = None

    def extend(self, grown_bytes: int) -> None:
        """Tell that the arena has grown, which `grow` was not asked for."""
        self.room.extend(grown_bytes)
        if grown_bytes:
            self._refused_bytes = None

    def stat(self) -> StoreStat:
        """A snapshot. `used_bytes` counts aligned room, also of reservations and quarantine."""
        return StoreStat(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.room.end_bytes - self.room.free_bytes,
            entries=len(self._entries),
            reservations=len(self._writing),
            leases=len(self._reading),
            bytes_by_app={app: used for app, used in self._bytes_by_app.items() if used},
            evictions=self._evictions,
            hits=self._hits,
            misses=self._misses,
            refusals=self._refusals,
        )

    def _reserve_one(
        self, owner: int, key: bytes, size: int, app: str, grown_from: int
    ) -> Reservation | Refusal:
        if key in self._entries:
            return Refusal.PRESENT
        if key in self._pending:
            return Refusal.PENDING
        room = align_up(size)
        if room > self.capacity_bytes:
            self._refusals += 1
            return Refusal.TOO_LARGE
        offset = self._make_room(room, grown_from)
        if offset is None:
            self._refusals += 1
            return Refusal.FULL
        token = self._new_token(owner)
        reservation = Reservation(token, key, Location(self.arena_id, offset, size, token))
        self._pending[key] = token
        self._writing[token] = _Writing(owner, app, room, reservation)
        self._charge(app, room)
        return reservation

    def _make_room(self, room: int, grown_from: int) -> int | None:
        offset = self.room.allocate(room)
        if offset is not None:
            return offset
        if self._refused_bytes is not None and room >= self._refused_bytes:
            return None
        if not self._extend_for(room, grown_from):
            return None
        offset = self.room.allocate(room)
        if offset is not None:
            return offset
        victims = plan_eviction(room, self._lru.values(), self._placed, self._placed_end, self.room)
        if victims is None:
            # Until something is freed, asking for as much again would search in vain again.
            self._refused_bytes = room
            return None
        for entry in victims:
            self._drop(entry)
        self._evictions += len(victims)
        return self.room.allocate(room)

    def _extend_for(self, room: int, grown_from: int) -> bool:
        """Grow as far as possible; False when this call may grow no more but a later one may."""
        missing = room - self.room.hole_ending_at(self.room.end_bytes)
        # What is left may be too little alone, and enough beside an entry that can be evicted.
        missing = min(missing, self.capacity_bytes - self.room.end_bytes)
        if missing <= 0:
            return True
        grown = self.room.end_bytes - grown_from
        if grown and grown + missing > CALL_GROWTH_BYTES:
            self.shortfall_bytes += missing
            return False
        self.extend(self._grow(missing))
        return True

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._lru.pop(entry.key, None)
        entry.visible = False
        if not entry.readers:
            self._unplace(entry)

    def _unplace(self, entry: Entry) -> None:
        offset = entry.location.offset
        del self._placed[offset]
        del self._placed_end[offset + entry.room]
        self._free(offset, entry.room, entry.app)

    def _free(self, offset: int, room: int, app: str) -> None:
        self.room.free(offset, room)
        self._charge(app, -room)
        self._refused_bytes = None

    def _charge(self, app: str, room: int) -> None:
        self._bytes_by_app[app] = self._bytes_by_app.get(app, 0) + room
        if not self._bytes_by_app[app]:
            del self._bytes_by_app[app]

    def _end_lease(self, token: int) -> None:
        reading = self._reading.pop(token)
        self._owned[reading.owner].discard(token)
        entry = reading.entry
        entry.readers -= 1
        if entry.readers:
            return
        if entry.visible:
            self._lru[entry.key] = entry
            self._refused_bytes = None
        else:
            self._unplace(entry)

    def _forget_writing(self, token: int) -> None:
        writing = self._writing.pop(token)
        del self._pending[writing.reservation.key]
        self._owned[writing.owner].discard(token)

    def _new_token(self, owner: int) -> int:
        self._last_token += 1
        self._owned.setdefault(owner, set()).add(self._last_token)
        return self._last_token
