"""State of a store: entries by key, leases, and entries that are being written.

The index has no clock, socket or memory. `now_s` is an argument and growth of the arena is a function, so
that the same rules apply to the reference store and the daemon, and tests simulate years in milliseconds. An
`owner` is the number of a connection.

    entries      key -> entry    all entries that lookups can find
    placement                    locations of entries, and memory for new entries (`placement.py`)
    open entries                 entries being written (`reservations.py`)
    watchers                     the table that clients read, the disk (`entry_watchers.py`)
    LeaseLimits                  bytes that the leases of each client keep in place
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from cornplug.errors import CodecError
from cornplug.settings import NamespaceConfig
from cornplug.store.arena import NO_SLOT, WriteFences, align_up
from cornplug.store.base import (
    NO_LOCATION,
    PROMOTED,
    Leases,
    PayloadLocation,
    Reservation,
    ReserveRefusal,
    ReserveTerms,
    encode_location,
)
from cornplug.store.daemon.entry_watchers import EntryWatchers
from cornplug.store.daemon.placement import EntryPlacement, EvictableEntry, Grow, StoredEntry
from cornplug.store.daemon.purges import PurgeJobs
from cornplug.store.daemon.reservations import (
    ExpiryBuckets,
    OpenEntries,
    OpenEntry,
    ReservationTimes,
    Sightings,
)
from cornplug.store.daemon.store_counters import AppBytes, RemovalCause, StoreCounters
from cornplug.store.entry_table import NotedReads
from cornplug.store.store_stats import StoreStat

E = TypeVar("E", bound=EvictableEntry)
LEASE_BYTES: Final = 128
"""Minimum size in bytes of a lease in a reply, without the entry's meta."""
SWEEP_LIMIT: Final = 1024
"""Maximum number of expired leases and reservations that one call ends. This takes about 2 ms."""
_log = logging.getLogger("cornplug.store")


@dataclass(frozen=True, slots=True)
class LeaseGroup(Generic[E]):
    """Leases of one call, which end together."""

    owner: int
    entries: list[E]
    expiry_bucket: int


class LeaseLimits(Generic[E]):
    """Limits on the leased bytes of each owner in one index. An `owner` is one connection."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lease_counts: dict[int, dict[E, int]] = {}
        self._bytes: Counter[int] = Counter()

    def try_add(self, owner: int, entry: E) -> bool:
        """Count one more lease and return True if this owner may lease the entry, otherwise return False. An
        owner may always lease one entry."""
        held = self._lease_counts.get(owner)
        if held is None:
            held = self._lease_counts[owner] = {}
        count = held.get(entry, 0)
        if not count:
            if held and self._bytes[owner] + entry.aligned_bytes > self._max_bytes:
                return False
            self._bytes[owner] += entry.aligned_bytes
        held[entry] = count + 1
        return True

    def remove(self, owner: int, entry: E) -> None:
        """Stop counting one of this owner's leases of the entry."""
        held = self._lease_counts[owner]
        count = held[entry] - 1
        if count:
            held[entry] = count
            return
        del held[entry]
        self._bytes[owner] -= entry.aligned_bytes
        if not held:
            del self._lease_counts[owner], self._bytes[owner]


class StoreIndex:
    """State of one store. It is not thread-safe, so call it from one thread or with a lock."""

    def __init__(
        self,
        arena_id: bytes,
        capacity_bytes: int,
        *,
        times: ReservationTimes,
        grow: Grow,
        fences: WriteFences | None = None,
        watchers: EntryWatchers | None = None,
        namespaces: Mapping[str, NamespaceConfig] | None = None,
    ) -> None:
        self.arena_id = arena_id
        self.placement = EntryPlacement(capacity_bytes, grow=grow, evict=self._evict, namespaces=namespaces)
        self._policy = self.placement.policy
        self.counters = StoreCounters(self._policy.names, self._policy.namespace_of)
        self.capacity_bytes = self.placement.capacity_bytes
        self._fences = fences or WriteFences()
        self._watchers = watchers or EntryWatchers()
        self._sightings = Sightings()
        self._entries: dict[bytes, StoredEntry] = {}
        self._open_entries = OpenEntries(
            times, on_end=self._end_open_entry, free=self._free_open_entry, forget_token=self._forget_token
        )
        self._lease_groups: dict[int, LeaseGroup[StoredEntry]] = {}
        self._lease_limits: LeaseLimits[StoredEntry] = LeaseLimits(self.capacity_bytes * 3 // 4)
        self._tokens_by_owner: dict[int, set[int]] = {}
        self._expiries: ExpiryBuckets[int] = ExpiryBuckets()
        self._app_bytes = AppBytes()
        # Tokens of different arenas are distinct. If a client keeps a token over a daemon's restart, the new
        # daemon does not have this token.
        self._last_token = int.from_bytes(arena_id[:5]) << 22
        self._lease_count = 0
        self.purges = PurgeJobs(self._entries, self._open_entries, self._drop, self._watchers)
        self._now_s = 0.0
        """`now_s` of the latest call that had this argument."""

    def contains(self, keys: Sequence[bytes]) -> bytes:
        """Return one byte per key: 1 if the key is present, otherwise 0. Changes nothing."""
        entries = self._entries
        return bytes([key in entries for key in keys])

    def find(self, key: bytes) -> StoredEntry | None:
        """Return the entry of a key, or None. Changes nothing."""
        return self._entries.get(key)

    def lease(
        self,
        owner: int,
        keys: Sequence[bytes],
        *,
        ttl_s: float,
        now_s: float,
        reply_bytes: int | None = None,
    ) -> Leases:
        """Return a lease per present key, which `owner` holds until `now_s + ttl_s`. All leases of a call
        have the same token. A key whose lease would exceed the `LeaseLimits` is reported as absent.

        If the leases take more than `reply_bytes`, only results for the first keys are returned, at least
        one.
        """
        self.sweep(now_s)
        found: list[StoredEntry | None] = []
        pin, known, left_bytes = self._policy.pin, self._entries, reply_bytes or math.inf
        for key in keys:
            entry = known.get(key)
            if entry is not None:
                left_bytes -= len(entry.meta) + LEASE_BYTES
                if left_bytes < 0 and found:
                    break
                if self._lease_limits.try_add(owner, entry):
                    entry.readers += 1
                    pin(entry)
                else:
                    entry = None
            found.append(entry)
        entries = [entry for entry in found if entry is not None]
        self.counters.count_reads(entries)
        self.counters.misses += len(found) - len(entries)
        token = 0
        if entries:
            token = self._new_token(owner)
            self._watchers.on_read(entries, now_s)
            self._lease_groups[token] = LeaseGroup(owner, entries, self._expiries.add(token, now_s + ttl_s))
        self._lease_count += len(entries)
        metas = [None if entry is None else entry.meta for entry in found]
        places = b"".join(
            [NO_LOCATION if entry is None else encode_location(entry.location) for entry in found]
        )
        return Leases(self.arena_id, keys[: len(found)], metas, places, [token] * len(found))

    def reserve(
        self,
        owner: int,
        entries: Sequence[tuple[bytes, int]],
        terms: ReserveTerms,
        *,
        now_s: float,
        truncate_after: int | None = None,
        is_promotion: bool = False,
    ) -> list[Reservation | ReserveRefusal]:
        """Reserve memory for each (key, size), or return the reason why there is no memory. Grow the arena
        and evict entries as needed.

        If more than `truncate_after` entries were examined to find memory, only the first results are
        returned, at least one. `is_promotion` is set for recalls by the disk and far tiers, which are not
        counted.
        """
        self.sweep(now_s)
        self.placement.begin_call()
        out: list[Reservation | ReserveRefusal] = []
        for key, size in entries:
            if truncate_after is not None and self.placement.examined_entries > truncate_after:
                break
            open_entry = self._join_or_open(key, size, terms, now_s, is_promotion=is_promotion)
            if isinstance(open_entry, OpenEntry):
                out.append(
                    self._open_entries.add_writer(open_entry, owner, self._new_token(owner), terms.part)
                )
            else:
                out.append(open_entry)
        self.placement.end_call()
        if not is_promotion:
            self.counters.count_reservations(terms.app, out)
        return out

    def commit(self, owner: int, token: int, meta: bytes, *, age_s: float = 0.0) -> bool:
        """Commit this owner's part of an entry that was written `age_s` seconds ago. The last part publishes
        the entry.

        Returns False if the owner has no reservation with this token, or the parts do not fit together.
        """
        open_entry = (
            self._open_entries.commit_part(token, meta) if self._open_entries.owns(owner, token) else None
        )
        if open_entry is None or not open_entry.is_complete:
            return open_entry is not None
        try:
            meta = open_entry.meta()
        except CodecError as e:
            _log.warning("an entry is not stored, because its parts do not fit together: %s", e)
            self._open_entries.end(open_entry)
            return False
        self._open_entries.remove_published(open_entry)
        location = open_entry.location
        self._fences.free_slot(location.fence)
        entry = StoredEntry(
            open_entry.key, meta, open_entry.app, location, open_entry.aligned_bytes, open_entry.cost_s,
            written_s=self._now_s - age_s, used_s=self._now_s,
        )  # fmt: skip
        self._entries[entry.key] = entry
        self.counters.count_added(entry.app)
        self.placement.add(entry, now_s=entry.written_s)
        self._watchers.on_added(entry, self._now_s)
        return True

    def release(self, owner: int, tokens: Sequence[int], *, now_s: float) -> None:
        """End this owner's leases and reservations. The memory of reservations is quarantined."""
        for token in tokens:
            reading = self._lease_groups.get(token)
            if reading is not None and reading.owner == owner:
                self._end_leases(token)
            elif self._open_entries.owns(owner, token):
                self._open_entries.end_reservation(token, now_s=now_s)

    def count_reads(self, reads: NotedReads) -> None:
        """Count reads that a client made through the table, and refresh LRU. Invalid record numbers are
        ignored."""
        keys = self._watchers.keys_of(reads.records)
        entries = [entry for key in keys if (entry := self._entries.get(key)) is not None]
        self.counters.count_noted_reads(reads, entries)
        for entry in entries:
            entry.used_s = self._now_s
            self._policy.touch(entry)
            self._watchers.on_read([entry], self._now_s)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Make entries invisible and return their number. The memory of an entry is freed when it has no
        lease."""
        dropped = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                self._drop(entry, "deleted")
                dropped += 1
            else:
                dropped += self._watchers.delete_from_tiers(key)
        return dropped

    def end_owner(self, owner: int, *, now_s: float, limit: int | None = None) -> bool:
        """End about `limit` leases and reservations of a closed connection, and return whether all have
        ended. The memory of reservations is quarantined."""
        owned, ended = self._tokens_by_owner.get(owner, set()), 0
        while owned and (limit is None or ended < limit):
            token = next(iter(owned))
            if token in self._lease_groups:
                ended += self._end_leases(token)
            elif self._open_entries.owns(owner, token):
                self._open_entries.end_reservation(token, now_s=now_s)
                ended += 1
            owned.discard(token)
        if owned:
            return False
        self._tokens_by_owner.pop(owner, None)
        self.purges.forget(owner)
        return True

    def sweep(self, now_s: float) -> None:
        """End expired leases, reservations and entries. A call ends about SWEEP_LIMIT of each kind, and the
        next call continues."""
        self._now_s = now_s
        left = SWEEP_LIMIT
        while left > 0 and (due := self._expiries.pop_due(now_s, 1)):
            left -= self._end_leases(due[0])
        self._open_entries.sweep(now_s, SWEEP_LIMIT)
        for entry in self._policy.pop_expired(now_s, SWEEP_LIMIT):
            self._drop(entry, "expired")

    def stat(self) -> StoreStat:
        """Return a snapshot of the statistics. `used_bytes` is the sum of aligned sizes, and includes
        reservations and quarantined memory."""
        counted = self.counters
        return StoreStat(
            capacity_bytes=self.capacity_bytes, used_bytes=self.placement.used_bytes,
            entries=len(self._entries), reservations=len(self._open_entries), leases=self._lease_count,
            bytes_by_app=self._app_bytes.largest_apps(), evictions=self.placement.evictions,
            hits=counted.hits, misses=counted.misses, refusals=counted.refusals, found=counted.found,
            absent=counted.absent, namespaces=counted.namespace_stats(self._policy),
            disk=self._watchers.disk_stat(), far=self._watchers.far_stat(),
        )  # fmt: skip

    def _join_or_open(
        self, key: bytes, size: int, terms: ReserveTerms, now_s: float, *, is_promotion: bool
    ) -> OpenEntry | ReserveRefusal:
        """Return the open entry that this writer may join, or the reason for a refusal. If the key has no
        open entry, create it."""
        if key in self._entries:
            return ReserveRefusal.PRESENT
        app, part = terms.app, terms.part
        found = self._open_entries.find(key, size, part)
        if found is not None:
            return found
        if terms.only_seen and not self._sightings.check_and_record(key, part):
            return ReserveRefusal.FIRST_SIGHT
        reserved_bytes = align_up(size)
        if reserved_bytes > self.capacity_bytes:
            return ReserveRefusal.TOO_LARGE
        offset = self.placement.allocate(reserved_bytes, app)
        if isinstance(offset, ReserveRefusal):
            return offset
        # This is the token of the entry's first writer, which is assigned next.
        generation = self._last_token + 1 | (PROMOTED if is_promotion else 0)
        fence = self._fences.open_slot(generation)
        if fence == NO_SLOT:
            self.placement.free(offset, reserved_bytes)
            return ReserveRefusal.FULL
        self._charge(app, reserved_bytes)
        location = PayloadLocation(self.arena_id, offset, size, generation, fence)
        return self._open_entries.create(
            key, location, reserved_bytes, app=app, part=part, now_s=now_s, cost_s=terms.cost_s
        )

    def _evict(self, entry: StoredEntry) -> None:
        self.counters.record_eviction_age(entry.app, self._now_s - entry.used_s)
        self._drop(entry, "evicted")

    def _drop(self, entry: StoredEntry, cause: RemovalCause) -> None:
        del self._entries[entry.key]
        self.counters.count_removed(entry.app, cause)
        self._policy.remove(entry)
        entry.visible = False
        self._watchers.on_removed(entry, cause)
        if not entry.readers:
            self._free_memory(entry)

    def _free_memory(self, entry: StoredEntry) -> None:
        self.placement.remove(entry)
        self._charge(entry.app, -entry.aligned_bytes)

    def _charge(self, app: str, size_bytes: int) -> None:
        self._policy.charge(app, size_bytes)
        self._app_bytes.charge(app, size_bytes)

    def _end_leases(self, token: int) -> int:
        """End the leases that have this token, and return their number."""
        reading = self._lease_groups.pop(token)
        self._forget_token(reading.owner, token)
        self._expiries.discard(token, reading.expiry_bucket)
        self._lease_count -= len(reading.entries)
        # The tail of a prefix is useless without its head, so it is released first, as if it were older.
        for entry in reversed(reading.entries):
            entry.readers -= 1
            entry.used_s = self._now_s
            self._lease_limits.remove(reading.owner, entry)
            if entry.readers:
                continue
            if entry.visible:
                self.placement.unpin(entry)
            else:
                self._free_memory(entry)
        return len(reading.entries)

    def _end_open_entry(self, open_entry: OpenEntry) -> None:
        self._fences.free_slot(open_entry.location.fence)
        self._charge(open_entry.app, -open_entry.aligned_bytes)

    def _free_open_entry(self, open_entry: OpenEntry) -> None:
        self.placement.free(open_entry.location.offset, open_entry.aligned_bytes)

    def _forget_token(self, owner: int, token: int) -> None:
        if owner in self._tokens_by_owner:
            self._tokens_by_owner[owner].discard(token)

    def _new_token(self, owner: int) -> int:
        self._last_token += 1
        self._tokens_by_owner.setdefault(owner, set()).add(self._last_token)
        return self._last_token
