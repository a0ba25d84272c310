"""The one seam of every store: key -> bytes, written in place, read in place.

A `Store` knows nothing of engines, models or tokens. Keys are 32 bytes from
`cornplug.identity`; `meta` is the envelope header of `cornplug.codec`; the payload is
raw bytes in an *arena* that every process of the host may map.

    absent ──reserve──> reserved ──commit──> present ──lease──> leased ──release──> present
               │            │                   │
             Refusal     release / death of   evicted, deleted (never while leased)
                         its connection

Contract, held by `cornplug.testing.StoreContract` for every implementation:

* Nothing is visible before `commit`; after it, `meta` and payload never change.
* Two writers of one key: the first `reserve` wins, the other is told `PENDING`, and
  `PRESENT` once it is committed. No writer overwrites.
* Several connections may write one entry together (`WriterPart`): each reserves the key as its part of
  one group, gets a separate token for the same room, writes its bytes and commits its checksums
  of the header. The entry is visible when every part is in. Giving up one part, or the end of its
  connection, ends the reservation of all.
* A lease keeps its entry in place until released, until it expires, or until the
  connection that took it ends. Leases of one call may have a token in common: they end together.
* A reservation ends when it is given up, when its connection ends, or after `reservation_s`: its
  key is free for others at once. Its room is not, as its writer may be writing still: not before
  the writer has spoken (a commit that comes too late: it writes no more) or, after a release or
  the end of its connection, the quarantine has passed, or `reclaim_s` has passed. From its end on
  no process gets a writable view of it.
* Every call is answered, or raises `StoreUnavailable`, inside its `deadline_s`.
* One connection's leases keep at most three quarters of the store in place (and one entry always);
  beyond that a present key is answered like an absent one.
* Questions (`contains`, `stat`) change nothing but `found` and `absent` of `StoreStat`; in particular they do
  not refresh LRU.
* `reserve` with `only_seen` gives room for keys that an earlier request named in such a call; the others are
  refused with FIRST_SIGHT and remembered, for a while, in bounded memory. A request makes one call a key, or
  one for each part. Calls without `only_seen` neither ask nor leave sightings.
* A full store evicts unleased entries; when that is not enough it refuses with `FULL`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from cornplug.store.stats.store_stats import StoreStat

if TYPE_CHECKING:
    from cornplug.store.leases import Leases

KEY_BYTES = 32
PROMOTED = 1 << 63
"""Bit of the generation of an entry that came back from disk: when it was written cannot be told from it."""


class PayloadLocation(msgspec.Struct, frozen=True, array_like=True):
    """Where a payload lies; small enough to travel to another process of the host."""

    arena_id: bytes
    """16 random bytes, new for each arena: a location of a dead store never resolves."""
    offset: int
    """Byte offset of the payload in the arena; a multiple of 64."""
    size: int
    """Payload size in bytes."""
    generation: int
    """Greater than of any earlier reservation in this arena, but for PROMOTED: it changes whenever a room is
    given to another entry."""
    fence: int = -1
    """Where the store says whether `generation` may be written still, see `write_fences.py`."""


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """A promise that an entry stays where it is."""

    token: int
    key: bytes
    meta: bytes
    location: PayloadLocation


class Reservation(msgspec.Struct, frozen=True, array_like=True):
    """Room for one entry that only its owner may fill."""

    token: int
    key: bytes
    location: PayloadLocation


class WriterPart(msgspec.Struct, frozen=True, array_like=True):
    """One writer's share of entries that a group of connections writes together, such as the
    heads of one tensor-parallel rank. Its `commit` gives a `cornplug.codec.encode_part`."""

    group: bytes
    """16 to 32 bytes that only the writers know: random, new at each start of an engine."""
    index: int
    """Which part this is, from 0."""
    count: int
    """How many parts make an entry, this one included: those that write, not those that only read."""


class ReserveRefusal(enum.Enum):
    """The reason why `reserve` gave no room. Only FULL and TOO_LARGE mean that an entry is lost: GROWING says
    that room is being made, and a caller that asks again in a moment gets it. FIRST_SIGHT: no other request
    has named this key yet, and the caller wanted room only if one had."""

    PRESENT = "present"
    PENDING = "pending"
    GROWING = "growing"
    FIRST_SIGHT = "first_sight"
    FULL = "full"
    TOO_LARGE = "too_large"


class PurgeRule(msgspec.Struct, frozen=True, array_like=True):
    """The entries that a purge ends: those for which all of this is true."""

    app: str | None = None
    """Written in the name of this app; None: of any."""
    older_s: float = 0.0
    """Written at least so long ago."""
    unused_s: float = 0.0
    """Not read for at least so long."""
    dry_run: bool = False
    """They are only counted."""


class PurgeCount(msgspec.Struct, frozen=True, array_like=True):
    """Entries that a purge has ended."""

    entries: int
    size_bytes: int
    """Room of these entries."""
    leased: int
    """Of them: their bytes are free when their leases end."""
    writing: int
    """Entries that were being written, beside them: their writers are told so."""


class Store(Protocol):
    """See the module's contract. Implementations are safe to call from several threads."""

    def contains(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        """One byte a key, 1 where it is present. The longest prefix is `mask.find(0)`."""

    def lease(self, keys: Sequence[bytes], *, ttl_s: float, deadline_s: float) -> Leases:
        """A lease for each key that is present, None for the others; refreshes LRU."""

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
        """Room for each (whole entry's key, size in bytes), charged to `app`, or why not.

        `cost_s`: seconds that the recomputation of one of these entries takes; 0 where that is unknown. A
        full store weighs it between namespaces.

        With `part`, room that a writer of the same group has reserved is shared: same location,
        own token. PENDING then says that this very part is taken, or that it is not this group's."""

    def commit(self, written: Sequence[tuple[Reservation, bytes]], *, deadline_s: float) -> list[bool]:
        """Publish each (reservation, meta). False where the reservation had ended.

        True for a part says that it is in; the entry is visible once the last one is. False also
        where the parts do not make a whole; the reservation then ends."""

    def release(self, tokens: Sequence[int], *, deadline_s: float) -> None:
        """End leases, or give up reservations. Unknown tokens are ignored.

        The next call of this connection sees it done; other connections may see it a moment later."""

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        """Drop entries, leased ones as soon as they are released; the number dropped.

        A dropped entry is invisible at once, even while a lease keeps its bytes."""

    def stat(self, *, deadline_s: float) -> StoreStat:
        """A snapshot of sizes and counts."""

    def view(self, location: PayloadLocation, *, writable: bool = False) -> memoryview:
        """The bytes of a location, without a copy and without asking the daemon.

        Raises StoreUnavailable("stale_location") when the location is of another arena, or, if
        `writable`, its reservation has ended: get the view right before writing, and do not keep
        it. The reader holds a lease; this call does not check that."""

    def close(self) -> None:
        """End the connection: every lease and reservation of it ends."""


class Unfound(enum.Enum):
    """The reason why `UnleasedReads.find_unleased` found no entry."""

    ABSENT = "absent"
    UNKNOWN = "unknown"
    """`Store.lease` knows."""


class UnleasedEntry(Protocol):
    """An entry that nothing keeps in place: copy its bytes, verify the copy, then `confirm`."""

    @property
    def meta(self) -> bytes:
        """Its header, or damaged bytes."""

    @property
    def payload(self) -> memoryview:
        """Its payload, read-only, or the bytes of another entry by now."""

    def confirm(self) -> bool:
        """Whether the entry was in place until now. True counts as a hit, and as a use for LRU."""


@runtime_checkable
class UnleasedReads(Protocol):
    """What a store may offer besides: reads that cost no message and hold no lease."""

    def find_unleased(self, key: bytes) -> UnleasedEntry | Unfound:
        """The entry of a key. ABSENT counts as a miss. Raises StoreUnavailable without a store."""


class Tier(enum.IntEnum):
    """Where an entry is."""

    ABSENT = 0
    MEMORY = 1
    DISK = 2
    """On disk, or in a far store that was asked, and not in memory: to `Store` it is absent until it is
    recalled."""


@runtime_checkable
class TieredReads(Protocol):
    """What a store may offer besides: entries on disk, read into memory before they can be leased."""

    @property
    def has_disk(self) -> bool:
        """Whether entries can be on disk only: without it `tiers` says no more than `contains`."""

    def tiers(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        """A `Tier` a key. Otherwise as `contains`."""

    def recall(self, keys: Sequence[bytes]) -> None:
        """Have entries that are on disk only read into memory, the first ones first; returns at once.

        `tiers` tells when that is done. Those that find no room stay on disk."""


@runtime_checkable
class FarReads(Protocol):
    """An optional part of a store: entries in far stores, shown as on disk once they are found."""

    @property
    def far_answers(self) -> bool:
        """Whether there is a far store that answers now."""

    def seek(self, keys: Sequence[bytes]) -> int:
        """The ticket of a question to far stores for absent entries; returns at once. If all these keys were
        asked for within the last second, it is the ticket of that question. 0 if the question is over, or if
        no far store answers.

        `TieredReads.tiers` tells a few milliseconds later which ones were found."""

    def answered(self, ticket: int) -> bool:
        """Whether `tiers` from now on tells all that this question has found, as no answer is due any more.
        It may stay False: a caller waits for a bounded time. Costs no message."""


@runtime_checkable
class PeekableStore(Protocol):
    """An optional part of a store: looks at its entries without a message and without a count."""

    def peek(self, keys: Sequence[bytes]) -> bytes:
        """A `Tier` a key; MEMORY for one of which only the daemon knows. Raises StoreUnavailable."""


@runtime_checkable
class PurgeableStore(Protocol):
    """What a store may offer besides: purges, for operators."""

    def purge(self, rule: PurgeRule, *, deadline_s: float) -> PurgeCount:
        """End the entries that were there when this call began and that the rule names. Leased ones are
        absent from now on, and keep their bytes until their leases end. `deadline_s` is of each portion."""


@runtime_checkable
class MappedStore(Protocol):
    """What a store may offer besides: its memory as a whole, for a device that copies payloads by itself."""

    def mapped(self, arena_id: bytes) -> memoryview | None:
        """All memory that locations of this arena lie in, writable; None where it is another arena's.

        Behind the locations that the store has given it may have no pages yet: touch nothing there. The rules
        of `view` hold for each location: a lease to read, a look at `view` right before a write."""
