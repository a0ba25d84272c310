"""Where entries lie in the arena, and room for new ones: by growth first, then by eviction.

policy       which to evict     (`eviction_policy.py`)
by_offset    offset -> entry    all room in use by entries, also of deleted ones with a lease
by_end       end -> entry       the same
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cornplug.settings.store_settings import NamespaceConfig
from cornplug.store.base import PayloadLocation, ReserveRefusal
from cornplug.store.daemon.allocator import ArenaAllocator
from cornplug.store.daemon.eviction import EvictionPlan, LookBudget, plan_eviction
from cornplug.store.daemon.eviction_policy import EvictionPolicy

MAX_LOOKS: Final = 8192
"""Entries that one call of `reserve` looks at in search of victims: about 10 ms."""

Grow = Callable[[int], int | None]
"""Asks for so many bytes more at the arena's end; returns the number of bytes that it added: more, less or 0.
None: they are being made, and `EntryPlacement.extend` will tell."""


@dataclass(slots=True, eq=False)
class StoredEntry:
    """One committed payload. `room` is its aligned size; `readers` the leases on it."""

    key: bytes
    meta: bytes
    app: str
    location: PayloadLocation
    room: int
    cost_s: float = 0.0
    """Seconds that its recomputation takes, as its writer said; 0: it did not."""
    written_s: float = 0.0
    used_s: float = 0.0
    """End of its last lease or copying read, or its writing, to about half a second."""
    readers: int = 0
    visible: bool = True
    last_use: int = 0
    """Of all uses of the store's entries, the number of its last one."""


class EntryPlacement:
    """The room of one arena.

    Args:
        evict: Told of each victim; it removes the entry from the index, and from here by `remove`.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        grow: Grow,
        evict: Callable[[StoredEntry], None],
        namespaces: Mapping[str, NamespaceConfig] | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes // 64 * 64
        self.policy: EvictionPolicy[StoredEntry] = EvictionPolicy(self.capacity_bytes, namespaces)
        self.evictions = 0
        self.shortfall_bytes = 0
        """Room beyond the arena's end that the largest call wanted, and that is being made for it."""
        self._grow = grow
        self._evict = evict
        self._allocator = ArenaAllocator()
        self._by_offset: dict[int, StoredEntry] = {}
        self._by_end: dict[int, StoredEntry] = {}
        self._looks = LookBudget(MAX_LOOKS, MAX_LOOKS)
        self._growing_bytes = 0
        self._refused_bytes: dict[str, int] = {}
        """Namespace -> the room that no eviction makes for it until something is freed."""
        self._gave_up_bytes: int | None = None
        """The room for which this call has ended its search."""

    @property
    def end_bytes(self) -> int:
        """The arena's size so far."""
        return self._allocator.end_bytes

    @property
    def used_bytes(self) -> int:
        """Aligned room that is taken, also by reservations and quarantine."""
        return self._allocator.end_bytes - self._allocator.free_bytes

    @property
    def looks(self) -> int:
        """Entries that this call has looked at in search of victims."""
        return MAX_LOOKS - self._looks.left

    def holes(self) -> list[tuple[int, int]]:
        """All (offset, size) of free room, by offset. For tests and diagnosis."""
        return self._allocator.holes()

    def begin_call(self) -> None:
        """Give the next requests for room a fresh budget of looks."""
        self._growing_bytes = 0
        self._looks, self._gave_up_bytes = LookBudget(MAX_LOOKS, MAX_LOOKS), None

    def end_call(self) -> None:
        """Note the room that this call wanted and that is being made."""
        if self._growing_bytes:
            lacking = self._growing_bytes - self._allocator.hole_ending_at(self.end_bytes)
            self.shortfall_bytes = max(self.shortfall_bytes, lacking)

    def extend(self, grown_bytes: int) -> None:
        """Tell that the arena has grown, which `grow` was not asked for."""
        self._allocator.extend(grown_bytes)
        self.shortfall_bytes = max(0, self.shortfall_bytes - grown_bytes)
        if grown_bytes:
            self._refused_bytes.clear()

    def make_room(self, room: int, app: str) -> int | ReserveRefusal:
        """The offset of `room` free bytes, by growth or eviction; GROWING or FULL without them."""
        name = self.policy.name_of(app)
        refused = self._refused_bytes.get(name)
        if refused is not None and room >= refused:
            return ReserveRefusal.FULL
        beyond = self.policy.ceiling_victims(app, room)
        if beyond is None:
            self._refused_bytes[name] = room
            return ReserveRefusal.FULL
        offset = self._allocator.allocate(room)
        if offset is None:
            if not self._extend_for(room):
                self._growing_bytes += room
                return ReserveRefusal.GROWING
            offset = self._allocator.allocate(room)
        if offset is not None:
            self._evict_all(beyond)
            return offset
        if self._gave_up_bytes is not None and room >= self._gave_up_bytes:
            return ReserveRefusal.FULL
        found = self._evict_for(room, app, only_own=self.policy.at_ceiling(app))
        if not isinstance(found, ReserveRefusal):
            # The victims, which lie side by side, may be fewer bytes than the ceiling asks for.
            self._evict_all(self.policy.ceiling_victims(app, room) or [])
        return found

    def free(self, offset: int, room: int) -> None:
        """Take back room that no entry has."""
        self._allocator.free(offset, room)
        self._refused_bytes.clear()

    def add(self, entry: StoredEntry, *, now_s: float) -> None:
        """A new entry in room that `make_room` gave: the last to be evicted."""
        self.policy.add(entry, now_s=now_s)
        self._by_offset[entry.location.offset] = entry
        self._by_end[entry.location.offset + entry.room] = entry
        self._refused_bytes.clear()

    def unpin(self, entry: StoredEntry) -> None:
        """Allow an entry's eviction, as of the one used last: its leases have ended."""
        self.policy.unpin(entry)
        self._refused_bytes.clear()

    def remove(self, entry: StoredEntry) -> None:
        """Free the room of an entry that the policy has forgotten and no reader has."""
        offset = entry.location.offset
        del self._by_offset[offset]
        del self._by_end[offset + entry.room]
        self.free(offset, entry.room)

    def _extend_for(self, room: int) -> bool:
        """Grow as far as possible; False when that is under way."""
        missing = room - self._allocator.hole_ending_at(self.end_bytes)
        # The rest of the arena may be too little alone, and enough beside an entry that can be evicted.
        missing = min(missing, self.capacity_bytes - self.end_bytes)
        if missing <= 0:
            return True
        grown = self._grow(missing)
        if grown is not None:
            self.extend(grown)
        return grown is not None

    def _evict_for(self, room: int, app: str, *, only_own: bool) -> int | ReserveRefusal:
        plan = self._plan(room, app, only_own=only_own)
        if not plan.enough and self._looks.left > 0 and self.policy.within_share(app, room):
            # It has a right to room, which may lie scattered between entries of others' shares.
            plan = self._plan(room, app, beyond_shares=True)
        self._evict_all(plan.victims)
        if plan.enough:
            offset = self._allocator.allocate(room)
            return ReserveRefusal.FULL if offset is None else offset
        if self._looks.left > 0:
            # Until something is freed, asking for as much again would search in vain again.
            self._refused_bytes[self.policy.name_of(app)] = room
            return ReserveRefusal.FULL
        self._gave_up_bytes = room
        for entry in plan.tried:
            self.policy.touch(entry)
        return ReserveRefusal.FULL

    def _evict_all(self, victims: Sequence[StoredEntry]) -> None:
        for entry in victims:
            self._evict(entry)
        self.evictions += len(victims)

    def _plan(
        self, room: int, app: str, *, beyond_shares: bool = False, only_own: bool = False
    ) -> EvictionPlan[StoredEntry]:
        choice = self.policy.search(app, room, beyond_shares=beyond_shares, only_own=only_own)
        return plan_eviction(room, choice, self._by_offset, self._by_end, self._allocator, self._looks)
