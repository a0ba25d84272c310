"""Open entries, which are being written: their writers, their deadlines, and when their memory can be reused.

    absent ──reserve──> writing ──last part committed──> an entry
                           │
                           └─released, expired, a writer's end──> ended ──no writer left──> free

The store cannot revoke a mapping from a writer. An ended entry therefore keeps its memory until all of its
writers are done. A writer is done when it commits, even though the commit is too late. If the writer's
reservation was released, or its connection has ended, the writer is considered done after `quarantine_s`.
After `reclaim_s`, the memory is freed in any case. The key can be reserved again immediately, and no new
write to the entry's memory begins (`WriteFences`).

`ExpiryBuckets` holds items by expiry time in buckets, so that an item that is removed early takes no more
memory. A heap would keep each released lease until its expiry time: a million leases at 50,000 per second.
"""

from __future__ import annotations

import heapq
import math
import secrets
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from cornplug import codec
from cornplug.store.base import PayloadLocation, Reservation, ReserveRefusal, WriterPart

_BUCKETS: Final = 1 << 16
_WAYS: Final = 4
"""Number of sightings (remembered keys) per bucket. All buckets have 262,144 sightings, which take 2 MiB."""
_TAG_BITS: Final = 16
_MAX_TAG: Final = (1 << _TAG_BITS) - 1
_MAX_FINGERPRINT: Final = (1 << 64 - _TAG_BITS) - 1
RESERVATION_S: Final = 30.0
"""Maximum duration of a reservation in seconds, during which no other writer can reserve the key. Mooncake
has the same duration."""
RECLAIM_S: Final = 60.0
"""Seconds for which an ended reservation keeps its memory if its writer is connected but sends no message.
The writer may be suspended during a copy. If the copy continues later, it can damage only the entries that
then use this memory. Readers of these entries detect the damage by the checksums, count a miss and delete the
entries."""
BUCKET_S: Final = 1 / 32
"""Maximum delay of an expiry in seconds."""
T = TypeVar("T")


class Sightings:
    """Keys that were requested while they were not stored, so that the store detects a second request.

    One request names a key once, or once for each part of a group. This is the doorkeeper of TinyLFU
    (Einziger et al., 2017), as a table of fixed size. Each bucket has four sightings, which are exact except
    for their 48-bit fingerprints. A new sighting replaces the least recently named sighting of its bucket, so
    many new keys displace older sightings, but take no more memory.
    """

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * _BUCKETS * _WAYS))
        # Clients choose keys. Without a salt they could choose the buckets as well.
        self._salt = secrets.token_bytes(16)

    def check_and_record(self, key: bytes, part: WriterPart | None) -> bool:
        """Return whether an earlier request named this key, and record this request.

        The parts of one group name the same keys for the same request, in any order. Such a part is a second
        sighting if this part, or a writer outside the group, named the key before.
        """
        tag = 0 if part is None else 1 + hash((self._salt, part.group)) % _MAX_TAG
        first = self._record(hash((self._salt, key)), tag)
        if part is None or (first is not None and first != tag):
            return first is not None
        mine = self._record(hash((self._salt, key, part.index)), tag)
        return first is not None and mine is not None

    def _record(self, hashed: int, tag: int) -> int | None:
        """Record a sighting. Return the tag of the earlier sighting, which is kept, or None if this is the
        first sighting."""
        start = (hashed & (_BUCKETS - 1)) * _WAYS
        fingerprint = hashed >> _TAG_BITS & _MAX_FINGERPRINT
        bucket = self._table[start : start + _WAYS].tolist()
        for i, word in enumerate(bucket):
            if word >> _TAG_BITS == fingerprint:
                del bucket[i]
                self._table[start : start + _WAYS] = array("Q", [word, *bucket])
                return word & _MAX_TAG
        self._table[start : start + _WAYS] = array("Q", [fingerprint << _TAG_BITS | tag, *bucket[:-1]])
        return None


@dataclass(slots=True, eq=False)
class OpenEntry:
    """Entry that is being written: its memory and its committed parts. Without a group, the entry has a
    single part with index 0."""

    key: bytes
    app: str
    aligned_bytes: int
    location: PayloadLocation
    group: bytes
    part_count: int
    cost_s: float = 0.0
    expiry_bucket: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    """Token of the writer, by part."""
    metas: dict[int, bytes] = field(default_factory=dict)
    """Committed meta, by part."""
    writing_tokens: set[int] = field(default_factory=set)
    """Tokens of writers that may be writing."""
    has_ended: bool = False
    free_after_s: float = 0.0
    """End of the quarantine, or 0 without a quarantine."""

    @property
    def is_complete(self) -> bool:
        """Whether all parts are committed."""
        return len(self.metas) == self.part_count

    def meta(self) -> bytes:
        """Return the meta of the whole entry. Raises CodecError if the parts do not fit together."""
        if not self.group:
            return self.metas[0]
        return codec.merge_partial_headers(self.metas.values(), key=self.key)


@dataclass(frozen=True, slots=True)
class _Writer:
    owner: int
    part: int
    open_entry: OpenEntry


@dataclass(frozen=True, slots=True)
class ReservationTimes:
    """Durations that bound reservations, in seconds."""

    quarantine_s: float
    """Time from a writer's release or disconnection until the memory of its reservations can be reused."""
    reservation_s: float = RESERVATION_S
    reclaim_s: float = RECLAIM_S


class OpenEntries:
    """All open entries of one store.

    Args:
        on_end: Called once for each open entry that will not be committed, before its memory is freed.
        free: Frees the memory of such an entry.
        forget_token: Called with (owner, token) for each reservation that has ended.
    """

    def __init__(
        self,
        times: ReservationTimes,
        *,
        on_end: Callable[[OpenEntry], None],
        free: Callable[[OpenEntry], None],
        forget_token: Callable[[int, int], None],
    ) -> None:
        self._quarantine_s = times.quarantine_s
        self._reservation_s = times.reservation_s
        self._reclaim_s = times.reclaim_s
        self._on_end = on_end
        self._free = free
        self._forget_token = forget_token
        self._now_s = 0.0
        self._by_key: dict[bytes, OpenEntry] = {}
        self._writers: dict[int, _Writer] = {}
        self._expiries: ExpiryBuckets[OpenEntry] = ExpiryBuckets()
        self._quarantine: list[tuple[float, int, OpenEntry]] = []

    def __len__(self) -> int:
        """Return the number of open entries that can still be committed."""
        return len(self._by_key)

    def list_open(self) -> list[OpenEntry]:
        """Return the open entries that can still be committed."""
        return list(self._by_key.values())

    def find(self, key: bytes, size: int, part: WriterPart | None) -> OpenEntry | ReserveRefusal | None:
        """Return the key's open entry if a writer can join it as `part`, PENDING if the writer cannot join
        it, or None if the key has no open entry."""
        open_entry = self._by_key.get(key)
        if open_entry is None:
            return None
        if part is None or (open_entry.group, open_entry.part_count) != (part.group, part.count):
            return ReserveRefusal.PENDING
        if open_entry.location.size != size or part.index in open_entry.tokens:
            return ReserveRefusal.PENDING
        return open_entry

    def create(
        self,
        key: bytes,
        location: PayloadLocation,
        aligned_bytes: int,
        *,
        app: str,
        part: WriterPart | None,
        now_s: float,
        cost_s: float = 0.0,
    ) -> OpenEntry:
        """Create an open entry, without a writer."""
        group, count = (b"", 1) if part is None else (part.group, part.count)
        open_entry = self._by_key[key] = OpenEntry(key, app, aligned_bytes, location, group, count, cost_s)
        open_entry.expiry_bucket = self._expiries.add(open_entry, now_s + self._reservation_s)
        return open_entry

    def add_writer(
        self, open_entry: OpenEntry, owner: int, token: int, part: WriterPart | None
    ) -> Reservation:
        """Add `owner` as the writer of one part, and return its reservation. `part` is None for an entry
        without a group."""
        index = 0 if part is None else part.index
        open_entry.tokens[index] = token
        open_entry.writing_tokens.add(token)
        self._writers[token] = _Writer(owner, index, open_entry)
        return Reservation(token, open_entry.key, open_entry.location)

    def owns(self, owner: int, token: int) -> bool:
        writer = self._writers.get(token)
        return writer is not None and writer.owner == owner

    def commit_part(self, token: int, meta: bytes) -> OpenEntry | None:
        """Record a writer's committed part. Return the open entry, or None if the entry has ended or the part
        was committed before."""
        writer = self._writers[token]
        open_entry = writer.open_entry
        if open_entry.has_ended:
            self._end_writer(token)
            return None
        if writer.part in open_entry.metas:
            return None
        open_entry.metas[writer.part] = meta
        open_entry.writing_tokens.discard(token)
        return open_entry

    def remove_published(self, open_entry: OpenEntry) -> None:
        """Remove an open entry that has been published."""
        del self._by_key[open_entry.key]
        self._expiries.discard(open_entry, open_entry.expiry_bucket)
        for token in open_entry.tokens.values():
            self._remove_writer(token)

    def end_reservation(self, token: int, *, now_s: float) -> None:
        """End a reservation that was released, or whose connection has ended. The writer may still be
        writing, so the memory is quarantined."""
        writer = self._writers[token]
        open_entry = writer.open_entry
        if writer.part not in open_entry.metas:
            open_entry.free_after_s = now_s + self._quarantine_s
        self.end(open_entry)
        self._end_writer(token)

    def end(self, open_entry: OpenEntry) -> None:
        """End an open entry. Its key can be reserved immediately, and its memory is freed when it has no
        writer."""
        if open_entry.has_ended:
            return
        open_entry.has_ended = True
        del self._by_key[open_entry.key]
        self._expiries.discard(open_entry, open_entry.expiry_bucket)
        for part in open_entry.metas:
            self._remove_writer(open_entry.tokens[part])
        self._on_end(open_entry)
        if open_entry.writing_tokens:
            open_entry.expiry_bucket = self._expiries.add(open_entry, self._now_s + self._reclaim_s)
        else:
            self._free_or_quarantine(open_entry)

    def sweep(self, now_s: float, limit: int) -> None:
        """End expired open entries, and free memory that no longer has a writer. A call handles at most
        `limit` of each."""
        self._now_s = now_s
        for open_entry in self._expiries.pop_due(now_s, limit):
            if not open_entry.has_ended:
                self.end(open_entry)
                continue
            for token in list(open_entry.writing_tokens):
                self._remove_writer(token)
            open_entry.writing_tokens.clear()
            self._free_or_quarantine(open_entry)
        for _ in range(limit):
            if not self._quarantine or self._quarantine[0][0] > now_s:
                return
            self._free(heapq.heappop(self._quarantine)[2])

    def _end_writer(self, token: int) -> None:
        if token not in self._writers:
            return
        open_entry = self._remove_writer(token)
        if token not in open_entry.writing_tokens:
            return
        open_entry.writing_tokens.discard(token)
        if open_entry.has_ended and not open_entry.writing_tokens:
            self._expiries.discard(open_entry, open_entry.expiry_bucket)
            self._free_or_quarantine(open_entry)

    def _remove_writer(self, token: int) -> OpenEntry:
        writer = self._writers.pop(token)
        self._forget_token(writer.owner, token)
        return writer.open_entry

    def _free_or_quarantine(self, open_entry: OpenEntry) -> None:
        if open_entry.free_after_s > self._now_s:
            heapq.heappush(
                self._quarantine, (open_entry.free_after_s, open_entry.location.offset, open_entry)
            )
        else:
            self._free(open_entry)


class ExpiryBuckets(Generic[T]):
    """Items with their expiry times, which are in seconds of the same clock as the caller's `now_s`."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[T, None]] = {}
        # Each bucket number is listed once until its expiry time, even if its bucket is empty again.
        self._order: list[int] = []
        self._known: set[int] = set()

    def add(self, item: T, at_s: float) -> int:
        """Add an item that expires at `at_s`, and return the bucket number to pass to `discard`."""
        number = math.ceil(at_s / BUCKET_S)
        if number not in self._known:
            self._known.add(number)
            heapq.heappush(self._order, number)
        self._buckets.setdefault(number, {})[item] = None
        return number

    def discard(self, item: T, number: int) -> None:
        """Remove an item, which may have expired already."""
        bucket = self._buckets.get(number)
        if bucket is None:
            return
        bucket.pop(item, None)
        if not bucket:
            del self._buckets[number]

    def pop_due(self, now_s: float, limit: int) -> list[T]:
        """Remove and return at most `limit` expired items."""
        found: list[T] = []
        while self._order and self._order[0] * BUCKET_S <= now_s:
            bucket = self._buckets.get(self._order[0], {})
            while bucket and len(found) < limit:
                found.append(bucket.popitem()[0])
            if bucket:
                break
            number = heapq.heappop(self._order)
            self._known.discard(number)
            self._buckets.pop(number, None)
        return found

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))
