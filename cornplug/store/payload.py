"""Copies of whole payloads into and out of any store, with checksums.

Measured on one core of an EPYC (benchmarks/store_vs_memcpy.py): slices of memoryviews copy as fast as memmove
or numpy. Each piece is hashed with XXH3 right after it is copied, while it is still in the CPU cache. Pieces
are 1 MiB, because the C library uses non-temporal stores only from this size on. With smaller pieces, every
written cache line is first read from memory (8 GB/s instead of 13).

`reserve_with_retry` retries for callers that can wait until memory is allocated. `recall_and_wait` and
`look_up_far` wait for entries on disk or in far stores. If the store has no disk or far stores, they return
without waiting.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, TypeVar, cast

import msgspec
import xxhash

from cornplug import codec
from cornplug.errors import CodecError, StoreUnavailable
from cornplug.store.base import (
    Lease,
    LookupMiss,
    PayloadLocation,
    Reservation,
    ReserveRefusal,
    ReserveTerms,
    Store,
    Tier,
    UnleasedEntry,
)

_FIRST_PAUSE_S: Final = 0.5e-3
_LAST_PAUSE_S: Final = 5e-3
"""Maximum pause in seconds between lookups in the table. These lookups send no message."""
MAX_FAR_LOOKUP_KEYS: Final = 512
"""Maximum number of absent entries that one request looks up in far stores. Computing their keys takes 1 ms.
"""
FAR_WAIT_S: Final = 5e-3
"""Maximum time that a reader waits for a lookup in far stores, in seconds. If the result arrives later, the
next request can use it."""
_GROW_RETRY_S: Final = 0.005
PIECE_BYTES: Final = 1 << 20
LEASE_S: Final = 30.0
"""Time in seconds that an engine has to copy a leased entry. After that, the entry can be evicted."""
_Found = TypeVar("_Found")
Outcome = Literal["stored", "present", "pending", "growing", "full", "too_large", "lost"]
"""Result of `put_payload`. "lost" means that the reservation ended before the commit."""


def start_recall(store: Store, keys: Sequence[bytes], tiers: bytes) -> bool:
    """Start to read into memory the entries of `keys` that are on disk only, according to `tiers`. Return
    whether there are any such entries.

    Raises StoreUnavailable if the store cannot be used.
    """
    on_disk = [key for key, tier in zip(keys, tiers, strict=True) if tier == Tier.DISK]
    if on_disk:
        store.recall(on_disk)
    return bool(on_disk)


def look_up_far(store: Store, keys: Sequence[bytes], *, within_s: float, deadline_s: float) -> bytes:
    """Look up absent keys in far stores, and return a `Tier` per key as soon as far stores have replied, or
    after `within_s` seconds. For background threads. Raises StoreUnavailable if the store cannot be used.

    Args:
        deadline_s: Time limit of each request to the store.
    """
    tiers = store.tiers(keys, deadline_s=deadline_s)
    if Tier.ABSENT not in tiers or not store.is_far_up:
        return tiers
    absent = [key for key, tier in zip(keys, tiers, strict=True) if tier == Tier.ABSENT]
    ticket = store.start_far_lookup(absent[:MAX_FAR_LOOKUP_KEYS])
    if not ticket:
        # The lookup of another caller may have completed since the first check.
        return store.tiers(keys, deadline_s=deadline_s)
    end_s, over = time.monotonic() + within_s, False
    while not over and Tier.ABSENT in tiers and time.monotonic() < end_s:
        time.sleep(_FIRST_PAUSE_S)
        # The daemon shows found entries before the ticket, so check the ticket first.
        over = store.is_far_lookup_done(ticket)
        tiers = store.tiers(keys, deadline_s=deadline_s)
    return tiers


def recall_and_wait(store: Store, keys: Sequence[bytes], *, within_s: float, deadline_s: float) -> bytes:
    """Recall entries from disk into memory, and return a `Tier` per key when no entry is on disk only, or
    after `within_s` seconds. For background threads.

    Absent keys are first looked up in far stores, for at most FAR_WAIT_S. Raises StoreUnavailable if the
    store cannot be used.

    Args:
        deadline_s: Time limit of each request to the store.
    """
    tiers = look_up_far(store, keys, within_s=min(FAR_WAIT_S, within_s), deadline_s=deadline_s)
    if not start_recall(store, keys, tiers):
        return tiers
    end_s, pause_s = time.monotonic() + within_s, _FIRST_PAUSE_S
    while Tier.DISK in tiers and (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        tiers = store.tiers(keys, deadline_s=deadline_s)
    return tiers


def reserve_with_retry(
    store: Store,
    entries: Sequence[tuple[bytes, int]],
    terms: ReserveTerms,
    *,
    deadline_s: float,
) -> list[Reservation | ReserveRefusal]:
    """Reserve memory with `Store.reserve`, and retry entries with the result GROWING until the deadline.

    Raises the same errors as `Store.reserve`.
    """
    end_s = time.monotonic() + deadline_s
    results = store.reserve(entries, terms, deadline_s=deadline_s)
    while growing := [i for i, result in enumerate(results) if result is ReserveRefusal.GROWING]:
        left_s = end_s - time.monotonic() - _GROW_RETRY_S
        if left_s <= 0:
            break
        time.sleep(_GROW_RETRY_S)
        # Reservations so far are valid even if a retry fails.
        with contextlib.suppress(StoreUnavailable):
            again = store.reserve([entries[i] for i in growing], terms, deadline_s=left_s)
            for i, result in zip(growing, again, strict=True):
                results[i] = result
    return results


def copy_checksummed(
    target: memoryview, source: memoryview, segments: int, *, checksum_of: Literal["source", "target"]
) -> tuple[int, ...]:
    """Copy flat bytes and return the XXH3-64 of each of `segments` equal parts.

    Writers compute checksums of the source, so that readers detect a wrong copy. Readers compute checksums of
    the target, whose bytes they use afterwards. Raises ValueError if the lengths differ or are not divisible
    by `segments`.
    """
    if target.nbytes != source.nbytes or segments < 1 or source.nbytes % segments:
        raise ValueError(
            f"cannot copy {source.nbytes} bytes to {target.nbytes} bytes in {segments} equal segments"
        )
    step = source.nbytes // segments
    copy = _copy_and_sum if checksum_of == "target" else _sum_and_copy
    return tuple(copy(target, source, i * step, (i + 1) * step) for i in range(segments))


def get_payload(
    store: Store, key: bytes, *, deadline_s: float, lease_s: float = LEASE_S, recall_s: float | None = None
) -> tuple[codec.PayloadHeader, bytearray] | None:
    """Return the header and a verified copy of a payload, or None if it is absent.

    If the entry is on disk only, this call recalls it and waits for at most `recall_s` seconds. With 0 it
    starts the recall without waiting. With None it does not recall the entry. A lease is used only if the
    store does not support reads without a lease, or if such a read failed.

    If the entry does not match its header, it is deleted from the store and CodecError is raised. Raises
    StoreUnavailable if the store does not reply.
    """
    return _get_with_recall(
        store, key, lambda: _get_copy(store, key, deadline_s, lease_s), recall_s, deadline_s
    )


def _get_copy(
    store: Store, key: bytes, deadline_s: float, lease_s: float
) -> tuple[codec.PayloadHeader, bytearray] | None:
    entry = _find_unleased(store, key)
    if isinstance(entry, tuple):
        copied = _copy_if_verified(*entry)
        if copied is not None:
            return entry[1], copied
    elif entry is LookupMiss.ABSENT:
        return None
    lease = store.lease([key], ttl_s=lease_s, deadline_s=deadline_s)[0]
    if lease is None:
        return None
    with _releasing(store, lease, deadline_s):
        header = _decode_header(store, lease, deadline_s)
        # This allocates and copies in one pass. A bytearray of zeros would need another pass.
        payload = bytearray(store.view(lease.location))
        try:
            codec.verify_checksums(header, memoryview(payload))
        except CodecError:
            _discard(store, key, deadline_s)
            raise
        return header, payload


def get_payload_into(
    store: Store,
    key: bytes,
    target: memoryview,
    *,
    deadline_s: float,
    lease_s: float = LEASE_S,
    recall_s: float | None = None,
) -> codec.PayloadHeader | None:
    """Copy a payload into `target` (flat bytes). This is faster than `get_payload` for large payloads.

    Raises ValueError if `target` does not have the payload's size, and the same errors as `get_payload`.
    After an error, the content of `target` is undefined.
    """
    return _get_with_recall(
        store, key, lambda: _get_into(store, key, target, deadline_s, lease_s), recall_s, deadline_s
    )


def _get_with_recall(
    store: Store, key: bytes, get: Callable[[], _Found | None], recall_s: float | None, deadline_s: float
) -> _Found | None:
    """Return the result of `get`, after a recall from disk if needed."""
    found = get()
    if found is not None or recall_s is None or not store.has_disk:
        return found
    tiers = recall_and_wait(store, [key], within_s=recall_s, deadline_s=deadline_s)
    return get() if tiers[0] == Tier.MEMORY else None


def _get_into(
    store: Store, key: bytes, target: memoryview, deadline_s: float, lease_s: float
) -> codec.PayloadHeader | None:
    entry = _find_unleased(store, key)
    if isinstance(entry, tuple):
        if _copy_into_if_verified(target, *entry):
            return entry[1]
    elif entry is LookupMiss.ABSENT:
        return None
    lease = store.lease([key], ttl_s=lease_s, deadline_s=deadline_s)[0]
    if lease is None:
        return None
    with _releasing(store, lease, deadline_s):
        header = _decode_header(store, lease, deadline_s)
        source = store.view(lease.location)
        if target.nbytes != source.nbytes:
            raise ValueError(f"payload has {source.nbytes} bytes, but target has {target.nbytes}")
        if not _copy_verified(target, source, header):
            _discard(store, key, deadline_s)
            raise CodecError("payload does not match its checksums", reason="corrupt")
        return header


def lease_payload(
    store: Store, key: bytes, *, deadline_s: float, lease_s: float = LEASE_S
) -> tuple[Lease, codec.PayloadHeader] | None:
    """Lease a payload without reading it, for a copy with `copy_leased`. Return the lease and the payload's
    header, or None if the payload is not in memory. If it is on disk only, this call starts to recall it.

    Raises StoreUnavailable if the store does not reply, and CodecError if the header is invalid.
    """

    def lease() -> tuple[Lease, codec.PayloadHeader] | None:
        if store.find_unleased(key) is LookupMiss.ABSENT:
            return None
        found = store.lease([key], ttl_s=lease_s, deadline_s=deadline_s)[0]
        if found is None:
            return None
        try:
            return found, _decode_header(store, found, deadline_s)
        except CodecError:
            with contextlib.suppress(StoreUnavailable):
                store.release([found.token], deadline_s=deadline_s)
            raise

    return _get_with_recall(store, key, lease, 0.0, deadline_s)


def copy_leased(
    store: Store, location: PayloadLocation, checksums: Sequence[int], target: memoryview
) -> None:
    """Copy a leased payload into `target` (flat bytes), in any process that maps the store.

    Raises CodecError("corrupt") if the copy does not match the checksums, and StoreUnavailable if this
    process cannot access the location.
    """
    source, segments = store.view(location), len(checksums)
    if not segments or source.nbytes % segments or target.nbytes != source.nbytes:
        raise CodecError("the size of a payload does not match its header", reason="corrupt")
    if copy_checksummed(target, source, segments, checksum_of="target") != tuple(checksums):
        raise CodecError("payload does not match its checksums", reason="corrupt")


class NewPayload(msgspec.Struct, frozen=True):
    """Payload to store, and the fields of its header except the checksums."""

    data: bytes | bytearray | memoryview
    """C-contiguous data of any item size."""
    kind: codec.PayloadKind
    key: bytes
    dtype: str
    shape: Sequence[int]
    segments: int = 1
    """Number of equal parts, each of which gets a checksum."""


def put_payload(
    store: Store, payload: NewPayload, *, app: str, deadline_s: float, cost_s: float = 0.0
) -> Outcome:
    """Store a payload under its key.

    `cost_s` is the time in seconds that it takes to recompute the payload, or 0 if unknown. Raises
    StoreUnavailable if the store does not reply, and ValueError if the payload cannot be divided into its
    segments.
    """
    source, segments = memoryview(payload.data).cast("B"), payload.segments
    if segments < 1 or source.nbytes % segments:
        raise ValueError(f"{source.nbytes} bytes are not {segments} equal segments")
    reservation = reserve_with_retry(
        store, [(payload.key, source.nbytes)], ReserveTerms(app, cost_s=cost_s), deadline_s=deadline_s
    )[0]
    if isinstance(reservation, ReserveRefusal):
        return cast(Outcome, reservation.value)  # FIRST_SIGHT is returned only for calls with `only_seen`
    with contextlib.ExitStack() as on_error:
        on_error.callback(_release_reservation, store, reservation, deadline_s)
        target = store.view(reservation.location, writable=True)
        checksums = copy_checksummed(target, source, segments, checksum_of="source")
        header = codec.PayloadHeader(
            payload.kind, payload.key, payload.dtype, tuple(payload.shape), checksums
        )
        meta = codec.encode_header(header)
        on_error.pop_all()
    return "stored" if store.commit([(reservation, meta)], deadline_s=deadline_s)[0] else "lost"


def _find_unleased(store: Store, key: bytes) -> tuple[UnleasedEntry, codec.PayloadHeader] | LookupMiss:
    """Return an entry and its header without a lease, or the reason why that is not possible."""
    entry = store.find_unleased(key)
    if isinstance(entry, LookupMiss):
        return entry
    try:
        return entry, codec.decode_header(entry.meta, key=key)
    except CodecError:
        return LookupMiss.UNKNOWN


def _copy_if_verified(entry: UnleasedEntry, header: codec.PayloadHeader) -> bytearray | None:
    payload = bytearray(entry.payload)
    try:
        codec.verify_checksums(header, memoryview(payload))
    except CodecError:
        return None
    return payload if entry.confirm() else None


def _copy_into_if_verified(target: memoryview, entry: UnleasedEntry, header: codec.PayloadHeader) -> bool:
    source = entry.payload
    return target.nbytes == source.nbytes and _copy_verified(target, source, header) and entry.confirm()


def _copy_verified(target: memoryview, source: memoryview, header: codec.PayloadHeader) -> bool:
    """Copy a payload and return whether it matches its checksums."""
    segments = len(header.checksums)
    if source.nbytes % segments:
        return False
    return copy_checksummed(target, source, segments, checksum_of="target") == header.checksums


def _sum_and_copy(target: memoryview, source: memoryview, start: int, end: int) -> int:
    hasher = xxhash.xxh3_64()
    for at in range(start, end, PIECE_BYTES):
        stop = min(at + PIECE_BYTES, end)
        piece = source[at:stop]
        hasher.update(piece)
        target[at:stop] = piece
    return hasher.intdigest()


def _copy_and_sum(target: memoryview, source: memoryview, start: int, end: int) -> int:
    hasher = xxhash.xxh3_64()
    for at in range(start, end, PIECE_BYTES):
        stop = min(at + PIECE_BYTES, end)
        piece = target[at:stop]
        piece[:] = source[at:stop]
        hasher.update(piece)
    return hasher.intdigest()


def _decode_header(store: Store, lease: Lease, deadline_s: float) -> codec.PayloadHeader:
    try:
        return codec.decode_header(lease.meta, key=lease.key)
    except CodecError as e:
        if e.is_damage:
            _discard(store, lease.key, deadline_s)
        raise


@contextlib.contextmanager
def _releasing(store: Store, lease: Lease, deadline_s: float) -> Iterator[None]:
    try:
        yield
    finally:
        # If the store has ended, the lease has ended too. The copy is complete nevertheless.
        with contextlib.suppress(StoreUnavailable):
            store.release([lease.token], deadline_s=deadline_s)


def _discard(store: Store, key: bytes, deadline_s: float) -> None:
    with contextlib.suppress(StoreUnavailable):
        store.delete([key], deadline_s=deadline_s)


def _release_reservation(store: Store, reservation: Reservation, deadline_s: float) -> None:
    with contextlib.suppress(StoreUnavailable):
        store.release([reservation.token], deadline_s=deadline_s)
