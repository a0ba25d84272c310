"""Helpers for the contract tests of stores, and the tests of writing: reservations, parts, late writers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest

from cornplug import codec
from cornplug.codec import PayloadKind
from cornplug.errors import StoreUnavailable
from cornplug.store.base import (
    Lease,
    PayloadLocation,
    Reservation,
    ReserveRefusal,
    ReserveTerms,
    Store,
    WriterPart,
)
from cornplug.store.payload import NewPayload, get_payload, put_payload

DEADLINE_S = 5.0


@dataclass(frozen=True)
class StoreStage:
    """Environment of a test: one store with a capacity of `StoreContract.capacity_bytes`, and its time
    limits."""

    connect: Callable[[], Store]
    """Function that opens a new connection to the store. The stage closes it after the test."""
    advance: Callable[[float], None]
    """Function that lets this number of seconds pass for the store, by setting a clock or by waiting."""
    quarantine_s: float
    reservation_s: float
    """Seconds after which a reservation expires."""
    reclaim_s: float
    """Seconds after which the memory of an expired reservation is reused, even if the writer is still
    connected and has sent nothing."""
    raw_view: Callable[[Store, PayloadLocation], memoryview]
    """Function that returns the bytes of a location, writable and without the checks of `view`, as a stray
    write would access them.
    """


def key_of(name: object) -> bytes:
    """Return the store key for a name in a test."""
    return hashlib.sha256(repr(name).encode()).digest()


def reserve(store: Store, name: object, size_bytes: int, app: str = "test") -> Reservation | ReserveRefusal:
    return store.reserve([(key_of(name), size_bytes)], ReserveTerms(app), deadline_s=DEADLINE_S)[0]


def reserve_part(
    store: Store, name: object, size_bytes: int, index: int, count: int = 2, group: bytes = b"g" * 16
) -> Reservation | ReserveRefusal:
    part = WriterPart(group, index, count)
    return store.reserve(
        [(key_of(name), size_bytes)], ReserveTerms("test", part=part), deadline_s=DEADLINE_S
    )[0]


def write_part(
    store: Store, reservation: Reservation, payload: bytes, segments: int, own_segments: range
) -> bool:
    """Write and commit the segments `own_segments` of a payload. Return whether the store accepted the
    commit."""
    step = len(payload) // segments
    view = store.view(reservation.location, writable=True)
    view[own_segments.start * step : own_segments.stop * step] = payload[
        own_segments.start * step : own_segments.stop * step
    ]
    sums = {i: codec.checksum(payload[i * step : (i + 1) * step]) for i in own_segments}
    meta = codec.encode_partial_header(
        PayloadKind.KV_PAGE, reservation.key, "float16", (len(payload) // 2,), segments, sums
    )
    return store.commit([(reservation, meta)], deadline_s=DEADLINE_S) == [True]


def fill(store: Store, name: object, payload: bytes, app: str = "test") -> None:
    """Reserve, write and commit one entry with meta b"meta". Fails the test if the store refuses it."""
    reservation = reserve(store, name, len(payload), app)
    assert isinstance(reservation, Reservation), reservation
    store.view(reservation.location, writable=True)[:] = payload
    assert store.commit([(reservation, b"meta")], deadline_s=DEADLINE_S) == [True]


def lease(store: Store, name: object, ttl_s: float = 60.0) -> Lease | None:
    return store.lease([key_of(name)], ttl_s=ttl_s, deadline_s=DEADLINE_S)[0]


def contains(store: Store, *names: object) -> bytes:
    return store.contains([key_of(name) for name in names], deadline_s=DEADLINE_S)


def put(store: Store, payload: bytes, segments: int) -> str:
    """Put `payload` into the store under key("e"), as 64 float16 rows."""
    shape = (64, len(payload) // 128)
    return put_payload(
        store,
        NewPayload(
            payload, PayloadKind.EMBEDDING, key=key_of("e"), dtype="float16", shape=shape, segments=segments
        ),
        app="test",
        deadline_s=DEADLINE_S,
    )


class WritingContract:
    """Tests of writing, part of `StoreContract`."""

    capacity_bytes: ClassVar[int]

    def test_store_released_reservation_is_gone(self, stage: StoreStage, store: Store) -> None:
        """The memory is not reused immediately, because another process of the owner may still be writing."""
        reservation = reserve(store, "a", self.capacity_bytes)
        assert isinstance(reservation, Reservation)
        store.release([reservation.token], deadline_s=DEADLINE_S)
        assert store.commit([(reservation, b"")], deadline_s=DEADLINE_S) == [False]
        assert reserve(store, "b", self.capacity_bytes) is ReserveRefusal.FULL
        stage.advance(stage.quarantine_s + 0.1)
        assert isinstance(reserve(store, "b", self.capacity_bytes), Reservation)

    @pytest.mark.parametrize("how", ["committed", "released", "expired", "gone"])
    def test_store_late_writer_damages_no_entry(self, stage: StoreStage, store: Store, how: str) -> None:
        """A worker process writes late to memory that the scheduler's process reserved."""
        size, scheduler, worker = self.capacity_bytes, stage.connect(), stage.connect()
        reservation = reserve(scheduler, "a", size)
        assert isinstance(reservation, Reservation)
        worker.view(reservation.location, writable=True)[:8] = b"in time!"
        if how == "committed":
            assert scheduler.commit([(reservation, b"meta")], deadline_s=DEADLINE_S) == [True]
            assert store.delete([key_of("a")], deadline_s=DEADLINE_S) == 1
        elif how == "released":
            scheduler.release([reservation.token], deadline_s=DEADLINE_S)
            assert scheduler.stat(deadline_s=DEADLINE_S).reservations == 0
            stage.advance(stage.quarantine_s + 0.1)
        elif how == "expired":
            stage.advance(stage.reservation_s + 0.1)
            store.lease([key_of("a")], ttl_s=1, deadline_s=DEADLINE_S)
            assert scheduler.commit([(reservation, b"meta")], deadline_s=DEADLINE_S) == [False]
        else:
            scheduler.close()
            stage.advance(0.1)
            store.lease([key_of("a")], ttl_s=1, deadline_s=DEADLINE_S)
            stage.advance(stage.quarantine_s + 0.1)
        fill(store, "b", b"x" * size)
        with pytest.raises(StoreUnavailable) as e:
            worker.view(reservation.location, writable=True)
        assert e.value.reason == "stale_location"
        held = lease(store, "b")
        assert held is not None
        with pytest.raises(StoreUnavailable):
            worker.view(held.location, writable=True)
        assert bytes(store.view(held.location)) == b"x" * size

    def test_store_quarantines_dead_writer_memory(self, stage: StoreStage, store: Store) -> None:
        gone = stage.connect()
        assert isinstance(reserve(gone, "a", self.capacity_bytes), Reservation)
        gone.close()
        stage.advance(0.05)
        assert reserve(store, "a", self.capacity_bytes) is ReserveRefusal.FULL
        stage.advance(stage.quarantine_s)
        assert isinstance(reserve(store, "a", self.capacity_bytes), Reservation)

    def test_store_expired_memory_waits_for_writer(
        self, stage: StoreStage, store: Store, other: Store
    ) -> None:
        """The key that a stopped or hung client reserved must become available, but the memory must not be
        reused while the client may still write."""
        reservation = reserve(store, "a", self.capacity_bytes)
        assert isinstance(reservation, Reservation)
        assert reserve(other, "a", 64) is ReserveRefusal.PENDING
        stage.advance(stage.reservation_s + 0.1)
        assert reserve(other, "a", 64) is ReserveRefusal.FULL
        assert other.stat(deadline_s=DEADLINE_S).reservations == 0
        assert store.commit([(reservation, b"late")], deadline_s=DEADLINE_S) == [False]
        assert contains(other, "a") == b"\0"
        assert isinstance(reserve(other, "a", self.capacity_bytes), Reservation)

    def test_store_reclaims_silent_writer_memory(self, stage: StoreStage, store: Store, other: Store) -> None:
        assert isinstance(reserve(store, "a", self.capacity_bytes), Reservation)
        for passed_s, is_reserved in ((stage.reservation_s, False), (stage.reclaim_s, True)):
            stage.advance(passed_s + 0.1)
            contains(other, "a")
            assert isinstance(reserve(other, "b", self.capacity_bytes), Reservation) == is_reserved

    def test_store_parts_equal_one_writers_entry(self, store: Store, other: Store) -> None:
        payload = bytes(range(256)) * 16
        reservations = [reserve_part(each, "a", len(payload), i) for i, each in enumerate((store, other))]
        assert isinstance(reservations[0], Reservation)
        assert isinstance(reservations[1], Reservation)
        assert reservations[0].location == reservations[1].location
        assert reservations[0].token != reservations[1].token
        assert write_part(other, reservations[1], payload, 8, range(4, 8))
        assert contains(store, "a") == b"\0"
        assert other.commit([(reservations[0], b"theirs")], deadline_s=DEADLINE_S) == [False]
        assert write_part(store, reservations[0], payload, 8, range(4))
        found = get_payload(other, key_of("a"), deadline_s=DEADLINE_S)
        assert found is not None
        assert found[1] == payload
        assert len(found[0].checksums) == 8
        assert reserve_part(store, "a", len(payload), 0) is ReserveRefusal.PRESENT

    def test_store_reservation_is_shared_in_one_group_only(self, store: Store, other: Store) -> None:
        assert isinstance(reserve_part(store, "a", 128, 0), Reservation)
        assert reserve(other, "a", 128) is ReserveRefusal.PENDING
        assert reserve_part(other, "a", 128, 1, group=b"h" * 16) is ReserveRefusal.PENDING
        assert reserve_part(other, "a", 128, 1, count=3) is ReserveRefusal.PENDING
        assert reserve_part(other, "a", 64, 1) is ReserveRefusal.PENDING
        assert reserve_part(store, "a", 128, 0) is ReserveRefusal.PENDING, "this part already has a writer"
        assert isinstance(reserve_part(other, "a", 128, 1), Reservation)
        assert store.stat(deadline_s=DEADLINE_S).reservations == 1

    @pytest.mark.parametrize("how", ["overlap", "hole", "meta"])
    def test_store_incomplete_parts_make_no_entry(self, store: Store, other: Store, how: str) -> None:
        payload = b"abcdefgh" * 16
        first, second = reserve_part(store, "a", 128, 0), reserve_part(other, "a", 128, 1)
        assert isinstance(first, Reservation)
        assert isinstance(second, Reservation)
        assert write_part(store, first, payload, 4, range(2))
        if how == "meta":
            assert other.commit([(second, b"no part")], deadline_s=DEADLINE_S) == [False]
        else:
            mine = range(1, 4) if how == "overlap" else range(3, 4)
            assert not write_part(other, second, payload, 4, mine)
        assert contains(store, "a") == b"\0"
        stat = store.stat(deadline_s=DEADLINE_S)
        assert (stat.used_bytes, stat.reservations) == (0, 0)

    def test_store_released_part_ends_all_parts(self, stage: StoreStage, store: Store, other: Store) -> None:
        size = self.capacity_bytes
        first, second = reserve_part(store, "a", size, 0), reserve_part(other, "a", size, 1)
        assert isinstance(first, Reservation)
        assert isinstance(second, Reservation)
        store.release([first.token], deadline_s=DEADLINE_S)
        assert store.stat(deadline_s=DEADLINE_S).reservations == 0
        with pytest.raises(StoreUnavailable):
            write_part(other, second, b"x" * size, 4, range(2, 4))
        stage.advance(stage.quarantine_s + 0.1)
        assert reserve(other, "b", 64) is ReserveRefusal.FULL, (
            "the writer of the other part may still be writing"
        )
        assert other.commit([(second, b"")], deadline_s=DEADLINE_S) == [False]
        assert isinstance(reserve(other, "b", size), Reservation)

    def test_store_lost_part_writer_ends_all_parts(self, stage: StoreStage, store: Store) -> None:
        size = self.capacity_bytes
        gone = stage.connect()
        mine, theirs = reserve_part(store, "a", size, 0), reserve_part(gone, "a", size, 1)
        assert isinstance(mine, Reservation)
        assert isinstance(theirs, Reservation)
        assert write_part(gone, theirs, b"x" * size, 2, range(1, 2))
        gone.close()
        stage.advance(0.05)
        with pytest.raises(StoreUnavailable):
            write_part(store, mine, b"x" * size, 2, range(1))
        assert store.commit([(mine, b"")], deadline_s=DEADLINE_S) == [False]
        assert isinstance(reserve(store, "a", size), Reservation)

    def test_store_part_without_others_expires(self, stage: StoreStage, store: Store) -> None:
        size = self.capacity_bytes
        reservation = reserve_part(store, "a", size, 0)
        assert isinstance(reservation, Reservation)
        assert write_part(store, reservation, b"x" * size, 2, range(1))
        stage.advance(stage.reservation_s + 0.1)
        assert isinstance(reserve(store, "a", size), Reservation), "no process writes there any more"

    def test_store_bad_part_raises_value_error(self, store: Store) -> None:
        for group, index, count in (
            (b"short", 0, 2),
            (b"g" * 16, 2, 2),
            (b"g" * 16, -1, 2),
            (b"g" * 16, 0, 0),
        ):
            with pytest.raises(ValueError, match=r"group|part"):
                reserve_part(store, "a", 64, index, count, group)
