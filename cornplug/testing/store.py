"""Contract tests for implementations of `cornplug.store.base.Store`. A subclass runs them:

class TestMine(StoreContract):
    capacity_bytes = 1 << 20

    @pytest.fixture
    def stage(self) -> Iterator[StoreStage]: ...
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import pytest

from cornplug.codec import PayloadKind
from cornplug.errors import CodecError, StoreUnavailable
from cornplug.store.base import PayloadLocation, Reservation, ReserveRefusal, ReserveTerms, Store, WriterPart
from cornplug.store.payload import NewPayload, get_payload, get_payload_into, put_payload
from cornplug.testing.store_writing import (
    DEADLINE_S,
    StoreStage,
    WritingContract,
    contains,
    fill,
    key_of,
    lease,
    put,
    reserve,
)

_GROUP = b"g" * 16
__all__ = [
    "DEADLINE_S",
    "StoreContract",
    "StoreStage",
    "contains",
    "fill",
    "key_of",
    "lease",
    "put",
    "reserve",
]


def reserve_if_seen(
    store: Store, name: object, size_bytes: int = 64, part: WriterPart | None = None
) -> Reservation | ReserveRefusal:
    """Reserve an entry with `only_seen`, so that the store reserves it only if another request named the key
    before."""
    entries = [(key_of(name), size_bytes)]
    return store.reserve(entries, ReserveTerms("test", part=part, only_seen=True), deadline_s=DEADLINE_S)[0]


class OnlySeenContract:
    """Tests of `reserve` with `only_seen`, part of `StoreContract`."""

    capacity_bytes: ClassVar[int]

    @pytest.mark.parametrize("elsewhere", [False, True])
    def test_second_request_is_reserved(self, store: Store, other: Store, elsewhere: bool) -> None:
        assert reserve_if_seen(store, "a") is ReserveRefusal.FIRST_SIGHT
        assert reserve_if_seen(store, "b") is ReserveRefusal.FIRST_SIGHT
        assert isinstance(reserve_if_seen(other if elsewhere else store, "a"), Reservation)
        assert reserve_if_seen(store, "a") is ReserveRefusal.PENDING

    def test_key_twice_in_batch_counts_twice(self, store: Store) -> None:
        entries = [(key_of("a"), 64), (key_of("a"), 64)]
        results = store.reserve(entries, ReserveTerms("test", only_seen=True), deadline_s=DEADLINE_S)
        assert results[0] is ReserveRefusal.FIRST_SIGHT
        assert isinstance(results[1], Reservation)

    def test_other_calls_do_not_count_as_seen(self, store: Store) -> None:
        assert contains(store, "a") == b"\0"
        reservation = reserve(store, "a", 64)
        assert isinstance(reservation, Reservation)
        store.release([reservation.token], deadline_s=DEADLINE_S)
        assert reserve_if_seen(store, "a") is ReserveRefusal.FIRST_SIGHT

    def test_stored_key_is_reported_present(self, store: Store) -> None:
        fill(store, "a", b"payload")
        assert reserve_if_seen(store, "a") is ReserveRefusal.PRESENT
        assert reserve_if_seen(store, "big", self.capacity_bytes + 1) is ReserveRefusal.FIRST_SIGHT
        assert reserve_if_seen(store, "big", self.capacity_bytes + 1) is ReserveRefusal.TOO_LARGE

    def test_deleted_key_is_still_seen(self, store: Store) -> None:
        assert reserve_if_seen(store, "a") is ReserveRefusal.FIRST_SIGHT
        reservation = reserve_if_seen(store, "a")
        assert isinstance(reservation, Reservation)
        assert store.commit([(reservation, b"")], deadline_s=DEADLINE_S) == [True]
        assert store.delete([key_of("a")], deadline_s=DEADLINE_S) == 1
        assert isinstance(reserve_if_seen(store, "a"), Reservation)

    @pytest.mark.parametrize("order", [(0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0, 1)])
    def test_parts_of_one_group_count_once(self, store: Store, other: Store, order: tuple[int, ...]) -> None:
        ranks = store, other
        results = [reserve_if_seen(ranks[i], "a", 128, WriterPart(_GROUP, i, 2)) for i in order]
        assert results[:2] == [ReserveRefusal.FIRST_SIGHT] * 2
        assert all(isinstance(result, Reservation) for result in results[2:])

    def test_other_writer_makes_part_seen(self, stage: StoreStage) -> None:
        ranks = [stage.connect(), stage.connect()]
        assert reserve_if_seen(stage.connect(), "a", 128) is ReserveRefusal.FIRST_SIGHT
        for i in range(2):
            assert isinstance(reserve_if_seen(ranks[i], "a", 128, WriterPart(_GROUP, i, 2)), Reservation)

    def test_group_makes_key_seen_for_others(self, store: Store, other: Store) -> None:
        assert reserve_if_seen(store, "a", 128, WriterPart(_GROUP, 0, 2)) is ReserveRefusal.FIRST_SIGHT
        assert isinstance(reserve_if_seen(other, "a", 128), Reservation)


class StoreContract(WritingContract, OnlySeenContract):
    """Contract tests of a store. Subclasses set the store's `capacity_bytes` and define the fixture
    `stage`."""

    capacity_bytes: ClassVar[int] = 1 << 20

    @pytest.fixture
    def store(self, stage: StoreStage) -> Store:
        return stage.connect()

    @pytest.fixture
    def other(self, stage: StoreStage) -> Store:
        return stage.connect()

    @property
    def quarter_bytes(self) -> int:
        return self.capacity_bytes // 4

    def test_store_entry_before_commit_is_invisible(self, store: Store, other: Store) -> None:
        reservation = reserve(store, "a", 100)
        assert isinstance(reservation, Reservation)
        assert contains(other, "a") == b"\0"
        assert lease(other, "a") is None
        store.view(reservation.location, writable=True)[:] = b"x" * 100
        assert store.commit([(reservation, b"m")], deadline_s=DEADLINE_S) == [True]
        assert contains(other, "a") == b"\1"

    def test_store_entry_reads_equal_in_another_client(self, store: Store, other: Store) -> None:
        fill(store, "a", b"payload")
        held = lease(other, "a")
        assert held is not None
        assert (held.key, held.meta, bytes(other.view(held.location))) == (key_of("a"), b"meta", b"payload")
        assert held.location.size == 7
        assert held.location.offset % 64 == 0

    def test_store_lease_view_is_read_only(self, store: Store) -> None:
        fill(store, "a", b"payload")
        held = lease(store, "a")
        assert held is not None
        assert store.view(held.location).readonly

    def test_store_contains_reports_each_key(self, store: Store) -> None:
        for name in (0, 1, 3):
            fill(store, name, b"x")
        assert contains(store, 0, 1, 2, 3) == b"\1\1\0\1"
        assert contains(store) == b""

    def test_store_empty_payload_is_an_entry(self, store: Store) -> None:
        fill(store, "empty", b"")
        held = lease(store, "empty")
        assert held is not None
        assert bytes(store.view(held.location)) == b""

    def test_store_second_writer_is_refused(self, store: Store, other: Store) -> None:
        reservation = reserve(store, "a", 10)
        assert isinstance(reservation, Reservation)
        assert reserve(other, "a", 10) is ReserveRefusal.PENDING
        assert reserve(store, "a", 10) is ReserveRefusal.PENDING
        assert store.commit([(reservation, b"")], deadline_s=DEADLINE_S) == [True]
        assert reserve(other, "a", 10) is ReserveRefusal.PRESENT

    def test_store_reserve_one_key_twice_is_pending(self, store: Store) -> None:
        results = store.reserve(
            [(key_of("a"), 8), (key_of("a"), 8)], ReserveTerms("test"), deadline_s=DEADLINE_S
        )
        assert isinstance(results[0], Reservation)
        assert results[1] is ReserveRefusal.PENDING

    def test_store_reservation_commits_once_for_its_owner_only(self, store: Store, other: Store) -> None:
        reservation = reserve(store, "a", 10)
        assert isinstance(reservation, Reservation)
        assert other.commit([(reservation, b"")], deadline_s=DEADLINE_S) == [False]
        assert store.commit([(reservation, b""), (reservation, b"")], deadline_s=DEADLINE_S) == [True, False]

    def test_store_unknown_tokens_are_ignored(self, store: Store, other: Store) -> None:
        fill(store, "a", b"x" * self.capacity_bytes)
        held = lease(store, "a")
        assert held is not None
        other.release([held.token, 1, 2**60], deadline_s=DEADLINE_S)
        assert reserve(other, "b", 64) is ReserveRefusal.FULL

    def test_store_reserve_beyond_capacity_is_too_large(self, store: Store) -> None:
        assert reserve(store, "a", self.capacity_bytes + 1) is ReserveRefusal.TOO_LARGE
        assert store.stat(deadline_s=DEADLINE_S).refusals == 1

    def test_store_eviction_takes_least_recently_used_first(self, store: Store) -> None:
        for name in range(4):
            fill(store, name, b"x" * self.quarter_bytes)
        held = lease(store, 0)
        assert held is not None
        store.release([held.token], deadline_s=DEADLINE_S)
        fill(store, 4, b"x" * self.quarter_bytes)
        assert contains(store, 0, 1, 2, 3, 4) == b"\1\0\1\1\1"
        assert store.stat(deadline_s=DEADLINE_S).evictions == 1

    def test_store_contains_does_not_refresh(self, store: Store) -> None:
        for name in range(4):
            fill(store, name, b"x" * self.quarter_bytes)
        before = store.stat(deadline_s=DEADLINE_S)
        assert contains(store, 0) == b"\1"
        after = store.stat(deadline_s=DEADLINE_S)
        # Ignore these fields, because entries may be written to a disk or to far stores at the same time.
        same = msgspec.structs.replace(
            after, found=before.found, absent=before.absent, disk=before.disk, far=before.far
        )
        assert same == before
        fill(store, 4, b"x" * self.quarter_bytes)
        assert contains(store, 0) == b"\0"

    def test_store_leased_entries_stay_and_refusal_evicts_nothing(self, store: Store, other: Store) -> None:
        for name in range(4):
            fill(store, name, b"x" * self.quarter_bytes)
        held = [lease(store, name) for name in (0, 2)]
        assert reserve(other, "big", self.quarter_bytes * 2) is ReserveRefusal.FULL
        assert contains(store, 0, 1, 2, 3) == b"\1\1\1\1"
        store.release([each.token for each in held if each], deadline_s=DEADLINE_S)
        assert isinstance(reserve(store, "big", self.quarter_bytes * 2), Reservation)

    def test_store_one_client_holds_at_most_three_quarters(self, store: Store, other: Store) -> None:
        for name in range(4):
            fill(store, name, b"x" * self.quarter_bytes)
        held = [lease(store, name) for name in range(3)]
        assert None not in held
        assert lease(store, 3) is None
        assert lease(store, 0) is not None, "a leased entry can be leased again"
        assert isinstance(reserve(store, "new", self.quarter_bytes), Reservation), "the rest is for writers"
        assert lease(other, 0) is not None
        store.release([each.token for each in held[1:] if each], deadline_s=DEADLINE_S)
        assert isinstance(reserve(store, "newer", self.quarter_bytes), Reservation)

    def test_store_two_leases_need_two_releases(self, store: Store, other: Store) -> None:
        fill(store, "a", b"x" * self.capacity_bytes)
        first, second = lease(store, "a"), lease(other, "a")
        assert first is not None
        assert second is not None
        store.release([first.token], deadline_s=DEADLINE_S)
        assert reserve(store, "b", 64) is ReserveRefusal.FULL
        other.release([second.token], deadline_s=DEADLINE_S)
        assert isinstance(reserve(other, "b", 64), Reservation)

    def test_store_lease_expires_after_its_time(self, store: Store, stage: StoreStage) -> None:
        fill(store, "a", b"x" * self.capacity_bytes)
        assert lease(store, "a", ttl_s=3.0) is not None
        assert reserve(store, "b", 64) is ReserveRefusal.FULL
        stage.advance(3.1)
        assert isinstance(reserve(store, "b", 64), Reservation)

    def test_store_leases_end_with_their_connection(self, stage: StoreStage, store: Store) -> None:
        fill(store, "a", b"x" * self.capacity_bytes)
        gone = stage.connect()
        assert lease(gone, "a") is not None
        gone.close()
        stage.advance(0.05)
        assert isinstance(reserve(store, "b", 64), Reservation)

    def test_store_deleted_entry_is_invisible_but_kept_for_its_reader(
        self, store: Store, other: Store
    ) -> None:
        fill(store, "a", b"old" * 10)
        held = lease(other, "a")
        assert held is not None
        assert store.delete([key_of("a"), key_of("absent")], deadline_s=DEADLINE_S) == 1
        assert contains(store, "a") == b"\0"
        assert lease(store, "a") is None
        fill(store, "a", b"new" * 10)
        assert bytes(other.view(held.location)) == b"old" * 10
        used = store.stat(deadline_s=DEADLINE_S).used_bytes
        other.release([held.token], deadline_s=DEADLINE_S)
        assert other.stat(deadline_s=DEADLINE_S).used_bytes == used - 64

    def test_store_reused_memory_has_new_generation(self, store: Store) -> None:
        fill(store, "a", b"x" * self.capacity_bytes)
        first = lease(store, "a")
        assert first is not None
        store.release([first.token], deadline_s=DEADLINE_S)
        second = reserve(store, "b", self.capacity_bytes)
        assert isinstance(second, Reservation)
        assert second.location.offset == first.location.offset
        assert second.location.generation != first.location.generation

    def test_store_location_of_another_store_never_resolves(self, store: Store) -> None:
        fill(store, "a", b"x")
        held = lease(store, "a")
        assert held is not None
        here = held.location
        beyond = PayloadLocation(here.arena_id, self.capacity_bytes, self.capacity_bytes, here.generation)
        for wrong in (PayloadLocation(b"\0" * 16, here.offset, here.size, here.generation), beyond):
            with pytest.raises(StoreUnavailable) as e:
                store.view(wrong)
            assert e.value.reason == "stale_location"

    def test_store_stat_counts_by_app(self, store: Store, other: Store) -> None:
        fill(store, "a", b"x" * 100, app="one")
        fill(store, "b", b"x" * 64, app="two")
        assert isinstance(reserve(store, "c", 1, app="two"), Reservation)
        lease(other, "a")
        lease(other, "nothing")
        stat = store.stat(deadline_s=DEADLINE_S)
        assert (stat.entries, stat.reservations, stat.leases, stat.hits, stat.misses) == (2, 1, 1, 1, 1)
        assert (stat.capacity_bytes, stat.used_bytes) == (self.capacity_bytes, 256)
        assert stat.bytes_by_app == {"one": 128, "two": 128}

    def test_store_bad_request_raises_value_error(self, store: Store) -> None:
        with pytest.raises(ValueError, match="32 bytes"):
            store.contains([b"short"], deadline_s=DEADLINE_S)
        with pytest.raises(ValueError, match="-1 bytes"):
            reserve(store, "a", -1)
        assert contains(store, "a") == b"\0"

    def test_store_closed_connection_is_unavailable(self, stage: StoreStage) -> None:
        gone = stage.connect()
        gone.close()
        gone.close()
        with pytest.raises(StoreUnavailable) as e:
            contains(gone, "a")
        assert e.value.reason == "store_down"

    @pytest.mark.parametrize("segments", [1, 4])
    def test_store_put_then_get_equals_payload(self, store: Store, other: Store, segments: int) -> None:
        payload = bytes(range(256)) * 256
        assert put(store, payload, segments) == "stored"
        assert put(other, payload, segments) == "present"
        found = get_payload(other, key_of("e"), deadline_s=DEADLINE_S)
        assert found is not None
        assert found[1] == payload
        assert (found[0].shape, found[0].dtype) == ((64, 512), "float16")
        target = bytearray(len(payload))
        header = get_payload_into(other, key_of("e"), memoryview(target), deadline_s=DEADLINE_S)
        assert header == found[0]
        assert target == payload
        assert get_payload(other, key_of("none"), deadline_s=DEADLINE_S) is None
        assert store.stat(deadline_s=DEADLINE_S).leases == 0

    def test_store_copying_reads_count_and_refresh(self, store: Store, other: Store) -> None:
        for name in range(4):
            put_payload(
                store,
                NewPayload(
                    bytes(self.quarter_bytes),
                    PayloadKind.EMBEDDING,
                    key=key_of(name),
                    dtype="float16",
                    shape=(1,),
                ),
                app="test",
                deadline_s=DEADLINE_S,
            )
        target = memoryview(bytearray(self.quarter_bytes))
        assert get_payload(other, key_of(0), deadline_s=DEADLINE_S) is not None
        assert get_payload_into(other, key_of(1), target, deadline_s=DEADLINE_S) is not None
        assert get_payload(other, key_of("none"), deadline_s=DEADLINE_S) is None
        stat = store.stat(deadline_s=DEADLINE_S)
        assert (stat.hits, stat.misses, stat.leases) == (2, 1, 0)
        fill(store, 4, b"x" * self.quarter_bytes)
        fill(store, 5, b"x" * self.quarter_bytes)
        assert contains(store, *range(6)) == b"\1\1\0\0\1\1"

    def test_store_corrupt_byte_is_found_and_entry_deleted(
        self, stage: StoreStage, store: Store, other: Store
    ) -> None:
        for read in (_read_payload, _read_payload_into):
            assert put(store, b"abcd" * 16384, 2) == "stored"
            held = lease(store, "e")
            assert held is not None
            stage.raw_view(store, held.location)[40000] ^= 4
            store.release([held.token], deadline_s=DEADLINE_S)
            with pytest.raises(CodecError) as e:
                read(other)
            assert e.value.reason == "corrupt"
            assert contains(store, "e") == b"\0"


def _read_payload(store: Store) -> None:
    get_payload(store, key_of("e"), deadline_s=DEADLINE_S)


def _read_payload_into(store: Store) -> None:
    get_payload_into(store, key_of("e"), memoryview(bytearray(65536)), deadline_s=DEADLINE_S)
