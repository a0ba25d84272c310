"""Interface of stores: entries of bytes by key, written and read in place.

A `Store` does not depend on engines, models or tokens. Keys are 32 bytes from `cornplug.identity`, `meta` is
a header from `cornplug.codec`, and the payload is raw bytes in an *arena* that all processes of the host can
map.

    absent ──reserve──> reserved ──commit──> present ──lease──> leased ──release──> present
               │            │                   │
             Refusal     release / death of   evicted, deleted (never while leased)
                         its connection

Contract, which `cornplug.testing.StoreContract` checks for every implementation:

* An entry is visible only after `commit`. After that, `meta` and payload never change.
* If two connections write the same key, the first `reserve` wins. The other connection gets `PENDING`, or
  `PRESENT` after the commit. Entries are never overwritten.
* Several connections can write one entry together (`WriterPart`). Each connection reserves the key as its
  part of a group, gets its own token for the same memory, writes its bytes and commits its checksums of the
  header. The entry is visible when all parts are committed. If one part is released, or its connection ends,
  the reservation ends for all parts.
* A lease keeps its entry in place until the lease is released or expires, or until its connection ends.
  Leases of one call can have the same token. They then end together.
* A reservation ends when it is released, when its connection ends, or after `reservation_s`. Its key can then
  be reserved again immediately. Its memory is not reused yet, because the writer may still be writing. The
  memory is reused after a late commit (which shows that the writer is done), after the quarantine if the
  reservation was released or its connection ended, or after `reclaim_s`. Once a reservation has ended, no
  process gets a writable view of its memory.
* Every call returns or raises `StoreUnavailable` within its `deadline_s`.
* The leases of one connection can hold at most three quarters of the store (and always at least one entry).
  Beyond that, a present key is reported as absent.
* Lookups (`contains`, `stat`) do not refresh LRU. They change only the counts `found` and `absent` of
  `StoreStat`.
* `reserve` with `only_seen` succeeds only for keys that an earlier request reserved with `only_seen`. Other
  keys get FIRST_SIGHT, and the store remembers them for a while in bounded memory. A request must make only
  one call per key (or one per part), because a second call counts as another request. Calls without
  `only_seen` neither use nor change the remembered keys.
* A full store evicts entries without leases. If that is not enough, `reserve` returns `FULL`.
"""

from __future__ import annotations

import enum
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Generic, Protocol, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from cornplug.errors import StoreUnavailable
from cornplug.store.store_stats import StoreStat

KEY_BYTES = 32
PROMOTED = 1 << 63
"""Bit that is set in the generation of an entry that was recalled from disk or from a far store. The
generation then does not show the entry's age."""
LOCATION: Final = struct.Struct("=QQQ")
"""Encoded location of a payload: offset, size, generation. All are 0 if there is no payload."""
NO_LOCATION: Final = bytes(LOCATION.size)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class PayloadLocation(msgspec.Struct, frozen=True, array_like=True):
    """Location of a payload. It can be sent to another process of the host."""

    arena_id: bytes
    """16 random bytes that identify the arena, so that locations in the arena of an ended store are
    detected."""
    offset: int
    """Byte offset of the payload in the arena, a multiple of 64."""
    size: int
    """Payload size in bytes."""
    generation: int
    """Number that increases with every reservation in this arena (apart from the bit PROMOTED), so that it
    changes whenever memory is reused."""
    fence: int = -1
    """Slot in `arena.WriteFences` that shows whether memory of this `generation` can still be written, or -1
    if the location has no slot."""


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """Guarantee that an entry stays in place."""

    token: int
    key: bytes
    meta: bytes
    location: PayloadLocation


class Reservation(msgspec.Struct, frozen=True, array_like=True):
    """Memory for one entry, which only its owner can write."""

    token: int
    key: bytes
    location: PayloadLocation


class WriterPart(msgspec.Struct, frozen=True, array_like=True):
    """One writer's part of entries that a group of connections writes together.

    An example is the heads of one tensor-parallel rank. The writer commits the result of
    `cornplug.codec.encode_partial_header`.
    """

    group: bytes
    """16 to 32 random bytes that only the writers have. An engine creates a new group at each start."""
    index: int
    """Index of this part, from 0."""
    count: int
    """Total number of parts that the group writes."""


class ReserveTerms(msgspec.Struct, frozen=True):
    """Arguments of `Store.reserve` that apply to all entries of the call."""

    app: str
    """App to which the memory is charged."""
    part: WriterPart | None = None
    """Part that this writer writes. Writers of the same group share the memory: they get the same location
    and their own tokens."""
    only_seen: bool = False
    """Whether to reserve memory only for keys that an earlier request with `only_seen` named."""
    cost_s: float = 0.0
    """Seconds to recompute each entry, or 0 if unknown. A full store uses it to choose between namespaces."""


class ReserveRefusal(enum.Enum):
    """Reason why `reserve` did not return memory.

    Only FULL and TOO_LARGE mean that the entry cannot be stored. GROWING means that memory is being
    allocated, and a retry will succeed. FIRST_SIGHT is returned for calls with `only_seen` if no other
    request has reserved this key before.
    """

    PRESENT = "present"
    PENDING = "pending"
    GROWING = "growing"
    FIRST_SIGHT = "first_sight"
    FULL = "full"
    TOO_LARGE = "too_large"


class PurgeRule(msgspec.Struct, frozen=True, array_like=True):
    """Selection of entries for a purge. An entry is selected if it matches all fields."""

    app: str | None = None
    """App that wrote the entry. None: any app."""
    older_s: float = 0.0
    """Minimum time since the entry was written, in seconds."""
    unused_s: float = 0.0
    """Minimum time since the entry was read, in seconds."""
    dry_run: bool = False
    """Whether to only count the matching entries, without deleting them."""


class PurgeCount(msgspec.Struct, frozen=True, array_like=True):
    """Counts of the entries that a purge deleted, or would delete with `PurgeRule.dry_run`."""

    entries: int
    size_bytes: int
    """Bytes of memory that these entries occupied, or of disk for entries that were only on disk."""
    leased: int
    """Number of deleted entries that are leased. Their memory is freed when the leases end."""
    writing: int
    """Number of further entries that were being written. Their reservations end, so the commits fail."""


class LookupMiss(enum.Enum):
    """Reason why `Store.find_unleased` did not return an entry."""

    ABSENT = "absent"
    UNKNOWN = "unknown"
    """This client cannot determine whether the entry is present. Use `Store.lease`."""


class UnleasedEntry(Protocol):
    """An entry that is not leased. Copy its bytes, verify the copy, then call `confirm`."""

    @property
    def meta(self) -> bytes:
        """Header of the entry, or arbitrary bytes if the entry was evicted."""

    @property
    def payload(self) -> memoryview:
        """Read-only payload, or bytes of another entry if this entry was evicted."""

    def confirm(self) -> bool:
        """Return whether the entry has been in place until now. If so, count a hit and refresh LRU."""


class Tier(enum.IntEnum):
    """Fastest tier in which an entry is stored."""

    ABSENT = 0
    MEMORY = 1
    DISK = 2
    """The entry is not in memory, but on disk, or a lookup found it in a far store. It must be recalled
    before it can be read."""


class PostedRequest(Protocol[T_co]):
    """Handle of a request that was sent. The reply is read later."""

    def poll(self) -> T_co | None:
        """Return the reply, or None if it has not arrived. Never waits.

        Raises StoreUnavailable if no reply arrived within the request's deadline, or if no reply can arrive
        any more. Leases and reservations in a late reply are released.
        """


class CompletedRequest(Generic[T]):
    """Reply that has already arrived, as a `PostedRequest`."""

    def __init__(self, reply: T) -> None:
        self._reply = reply

    def poll(self) -> T:
        return self._reply


class Store(ABC):
    """Store of entries. The module's docstring has the contract. Implementations are thread-safe, and inherit
    from this class.

    The abstract methods are required. All other methods are for capabilities that not every store has: reads
    without a lease, lookups that send no message, entries on disk and in far stores, requests that do not
    wait, purges, and copies by a device. The inherited methods are right for a store without the capability.
    """

    @abstractmethod
    def contains(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        """Return one byte per key: 1 if the key is present, otherwise 0. The index of the first absent key is
        `mask.find(0)`, or -1 if all keys are present."""

    @abstractmethod
    def lease(self, keys: Sequence[bytes], *, ttl_s: float, deadline_s: float) -> Leases:
        """Return a lease for each key that is present, and None for each absent key. Refreshes LRU."""

    @abstractmethod
    def reserve(
        self, entries: Sequence[tuple[bytes, int]], terms: ReserveTerms, *, deadline_s: float
    ) -> list[Reservation | ReserveRefusal]:
        """Reserve memory for each (key, size in bytes of the whole entry). Return a Reservation or the reason
        of the refusal for each key.

        If `terms` has a part, the caller writes one part of an entry, and the other ranks of its group write
        the others. PENDING then means that this part is already reserved, or that another group has reserved
        the key.
        """

    @abstractmethod
    def commit(self, written: Sequence[tuple[Reservation, bytes]], *, deadline_s: float) -> list[bool]:
        """Publish the entry of each (reservation, meta), and return one result per entry. A result is False
        if the reservation had ended.

        For a part, True means that the part was accepted. The entry is visible after the last part. The
        result is also False if the parts do not fit together, which ends the reservation.
        """

    @abstractmethod
    def release(self, tokens: Sequence[int], *, deadline_s: float) -> None:
        """Release leases or reservations. Unknown tokens are ignored.

        The release takes effect before the next call of this connection, and a moment later for other
        connections.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        """Delete entries and return their number.

        The entries are invisible immediately. The memory of a leased entry is freed when its leases end.
        """

    @abstractmethod
    def stat(self, *, deadline_s: float) -> StoreStat:
        """Return a snapshot of sizes and counts."""

    @abstractmethod
    def view(self, location: PayloadLocation, *, writable: bool = False) -> memoryview:
        """Return the bytes of a location without copying them and without a message to the daemon.

        Raises StoreUnavailable("stale_location") if the location is in another arena, or if `writable` is set
        and the location's reservation has ended. Get the view right before writing, and do not keep it. A
        reader must hold a lease, which this call does not check.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection. All its leases and reservations end."""

    # -- capabilities -----------------------------------------------------------------------

    def are_writable(self, locations: Sequence[PayloadLocation]) -> list[bool]:
        """Return for each location whether it can be written now, as `view` with `writable` checks."""
        found = []
        for location in locations:
            try:
                self.view(location, writable=True)
            except StoreUnavailable:
                found.append(False)
            else:
                found.append(True)
        return found

    def find_unleased(self, key: bytes) -> UnleasedEntry | LookupMiss:
        """Return the entry of a key without a message and without a lease. ABSENT counts as a miss.

        Raises StoreUnavailable if the store cannot be used.
        """
        return LookupMiss.UNKNOWN

    @property
    def can_peek(self) -> bool:
        """Whether `peek` reports evicted entries as absent."""
        return False

    def peek(self, keys: Sequence[bytes]) -> bytes:
        """Return a `Tier` per key, or MEMORY if a message would be needed to determine the tier. The call is
        not counted as a lookup.

        Raises StoreUnavailable if the store cannot be used.
        """
        return bytes([Tier.MEMORY]) * len(keys)

    @property
    def has_disk(self) -> bool:
        """Whether entries can be on disk only. If False, `tiers` returns the same as `contains`."""
        return False

    def tiers(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        """Return a `Tier` per key. Arguments and errors are the same as for `contains`."""
        return self.contains(keys, deadline_s=deadline_s)

    def recall(self, keys: Sequence[bytes]) -> None:  # noqa: B027 - without a disk there is nothing to do
        """Start to read entries from disk into memory, in this order, and return immediately.

        `tiers` shows when an entry is in memory. Entries for which there is no memory stay on disk.
        """

    @property
    def is_far_up(self) -> bool:
        """Whether a far store is currently responding."""
        return False

    def start_far_lookup(self, keys: Sequence[bytes]) -> int:
        """Start a lookup of absent entries in far stores, and immediately return its ticket for
        `is_far_lookup_done`.

        If all these keys were looked up within the last second, this returns the ticket of the earlier
        lookup, or 0 if the earlier lookup is complete. It also returns 0 if no far store responds. A few
        milliseconds later, `tiers` shows the entries that were found as `Tier.DISK`.
        """
        return 0

    def is_far_lookup_done(self, ticket: int) -> bool:
        """Return whether the lookup with this ticket is complete, so that `tiers` shows all entries that it
        found.

        The result may never become True, so callers must limit their wait. The call sends no message.
        """
        return True

    def post_reserve(
        self, entries: Sequence[tuple[bytes, int]], terms: ReserveTerms, *, deadline_s: float
    ) -> PostedRequest[list[Reservation | ReserveRefusal]]:
        """Send a `reserve` request without waiting for the reply."""
        return CompletedRequest(self.reserve(entries, terms, deadline_s=deadline_s))

    def post_commit(
        self, written: Sequence[tuple[Reservation, bytes]], *, deadline_s: float
    ) -> PostedRequest[list[bool]]:
        """Send a `commit` request without waiting for the reply."""
        return CompletedRequest(self.commit(written, deadline_s=deadline_s))

    def purge(self, rule: PurgeRule, *, deadline_s: float) -> PurgeCount:
        """Delete the entries that match `rule` and that existed when this call began.

        The memory of leased entries is freed when their leases end. `deadline_s` applies to each message.
        Raises NotImplementedError if the store cannot select entries.
        """
        raise NotImplementedError

    def arena_memory(self, arena_id: bytes) -> memoryview | None:
        """Return the writable memory of this arena, for a device that copies payloads itself. Returns None if
        the store has another arena, or does not map its arena.

        Access only locations that the store returned, because other pages may not be allocated. The rules of
        `view` apply to each location: hold a lease to read it, and call `view` right before writing.
        """
        return None


def encode_location(location: PayloadLocation) -> bytes:
    """Encode a location as a `LOCATION`, without its arena."""
    return LOCATION.pack(location.offset, location.size, location.generation)


@dataclass(frozen=True, slots=True)
class Leases(Sequence[Lease | None]):
    """Sequence with one lease per key, or None for each absent key. A slice is also a `Leases`."""

    arena_id: bytes
    keys: Sequence[bytes]
    metas: Sequence[bytes | None]
    """Header of each entry, or None if the key is absent."""
    locations: bytes
    """Concatenated locations, with one `LOCATION` per key."""
    tokens: Sequence[int]
    """One token per key, or 0 if there is no lease."""

    @classmethod
    def concat(cls, arena_id: bytes, replies: Sequence[Leases]) -> Leases:
        """Return the leases of several replies as one sequence. All replies must be for the same arena."""
        keys = list(chain.from_iterable(part.keys for part in replies))
        metas = list(chain.from_iterable(part.metas for part in replies))
        tokens = list(chain.from_iterable(part.tokens for part in replies))
        return cls(arena_id, keys, metas, b"".join([part.locations for part in replies]), tokens)

    @property
    def unique_tokens(self) -> list[int]:
        """Tokens to release, without duplicates."""
        return [token for token in dict.fromkeys(self.tokens) if token]

    @property
    def sizes(self) -> NDArray[np.uint64]:
        """Sizes of the payloads in bytes."""
        return np.frombuffer(self.locations, np.uint64)[1::3]

    @property
    def generations(self) -> NDArray[np.uint64]:
        """Generations of the payloads, or 0 if there is no payload."""
        return np.frombuffer(self.locations, np.uint64)[2::3]

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Lease | None: ...
    @overload
    def __getitem__(self, index: slice) -> Leases: ...
    def __getitem__(self, index: int | slice) -> Lease | Leases | None:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            places = self.locations[start * LOCATION.size : stop * LOCATION.size]
            keys, metas, tokens = self.keys[index], self.metas[index], self.tokens[index]
            return Leases(self.arena_id, keys, metas, places, tokens)
        at = range(len(self))[index]
        return next(iter(self[at : at + 1]))

    def __iter__(self) -> Iterator[Lease | None]:
        rows = zip(self.tokens, self.keys, self.metas, LOCATION.iter_unpack(self.locations), strict=True)
        for token, key, meta, (offset, size, generation) in rows:
            if meta is None:
                yield None
            else:
                yield Lease(token, key, meta, PayloadLocation(self.arena_id, offset, size, generation))


NO_LEASES: Final = Leases(b"", (), (), b"", ())
