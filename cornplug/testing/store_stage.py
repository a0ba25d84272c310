"""Stage and helpers for contract tests and other tests of stores."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from cornplug import codec
from cornplug.codec import PayloadKind
from cornplug.store.base import Lease, PayloadLocation, Reservation, ReserveRefusal, Store, WriterPart
from cornplug.store.payload import put_payload

DEADLINE_S = 5.0


@dataclass(frozen=True)
class StoreStage:
    """Environment of a test: one store of `StoreContract.capacity_bytes`, with these times."""

    connect: Callable[[], Store]
    """Function that returns a new connection to the store. The stage closes it."""
    advance: Callable[[float], None]
    """Function that lets a number of seconds pass for the store, by a clock or by waiting."""
    quarantine_s: float
    reservation_s: float
    """Seconds after which a reservation expires."""
    reclaim_s: float
    """Seconds after which its space is reused although its writer is connected but silent."""
    raw: Callable[[Store, PayloadLocation], memoryview]
    """Function that returns a location's bytes, writable and without the checks of `view`, as a stray write
    would access them."""


def key(name: object) -> bytes:
    """Return a key for a test."""
    return hashlib.sha256(repr(name).encode()).digest()


def reserve(store: Store, name: object, size_bytes: int, app: str = "test") -> Reservation | ReserveRefusal:
    return store.reserve([(key(name), size_bytes)], app=app, deadline_s=DEADLINE_S)[0]


def reserve_part(
    store: Store, name: object, size_bytes: int, index: int, count: int = 2, group: bytes = b"g" * 16
) -> Reservation | ReserveRefusal:
    part = WriterPart(group, index, count)
    return store.reserve([(key(name), size_bytes)], app="test", part=part, deadline_s=DEADLINE_S)[0]


def write_part(store: Store, room: Reservation, payload: bytes, segments: int, mine: range) -> bool:
    """Write and commit the segments `mine` of a payload, and return whether the commit succeeded."""
    step = len(payload) // segments
    view = store.view(room.location, writable=True)
    view[mine.start * step : mine.stop * step] = payload[mine.start * step : mine.stop * step]
    sums = {i: codec.checksum(payload[i * step : (i + 1) * step]) for i in mine}
    meta = codec.encode_part(PayloadKind.KV_PAGE, room.key, "float16", (len(payload) // 2,), segments, sums)
    return store.commit([(room, meta)], deadline_s=DEADLINE_S) == [True]


def fill(store: Store, name: object, payload: bytes, app: str = "test") -> None:
    """Reserve, write and commit an entry with meta b"meta". Fails the test if the reservation is refused."""
    room = reserve(store, name, len(payload), app)
    assert isinstance(room, Reservation), room
    store.view(room.location, writable=True)[:] = payload
    assert store.commit([(room, b"meta")], deadline_s=DEADLINE_S) == [True]


def lease(store: Store, name: object, ttl_s: float = 60.0) -> Lease | None:
    return store.lease([key(name)], ttl_s=ttl_s, deadline_s=DEADLINE_S)[0]


def present(store: Store, *names: object) -> bytes:
    return store.contains([key(name) for name in names], deadline_s=DEADLINE_S)


def put(store: Store, payload: bytes, segments: int) -> str:
    """Store `payload` under key("e") as 64 float16 rows."""
    shape = (64, len(payload) // 128)
    return put_payload(
        store, payload, kind=PayloadKind.EMBEDDING, key=key("e"), dtype="float16", shape=shape, app="test",
        deadline_s=DEADLINE_S, segments=segments,
    )  # fmt: skip
