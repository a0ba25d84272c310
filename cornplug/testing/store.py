"""The contract of `cornplug.store.base.Store`, as tests that every implementation runs.

class TestMine(StoreContract):
    capacity_bytes = 1 << 20

    @pytest.fixture
    def stage(self) -> Iterator[StoreStage]: ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest

from cornplug import codec
from cornplug.codec import Kind
from cornplug.errors import CodecError, StoreUnavailable
from cornplug.store import entry
from cornplug.store.base import Lease, Location, Part, Refusal, Reservation, Store

DEADLINE_S = 5.0


@dataclass(frozen=True)
class StoreStage:
    """What a test acts on. One store of `capacity_bytes`, whose times are below."""

    connect: Callable[[], Store]
    """A new connection to the one store; the stage closes it."""
    advance: Callable[[float], None]
    """Let so many seconds pass for the store: by a clock, or by waiting."""
    quarantine_s: float
    reservation_s: float
    """When a reservation ends by itself."""
    reclaim_s: float
    """When its room is given to others although its writer, alive, has said nothing."""
    raw: Callable[[Store, Location], memoryview]
    """The bytes of a location, writable, past all checks of `view`: what a stray write would reach."""


def key(name: object) -> bytes:
    """A key for a test."""
    return hashlib.sha256(repr(name).encode()).digest()


def reserve(store: Store, name: object, size_bytes: int, app: str = "test") -> Reservation | Refusal:
    return store.reserve([(key(name), size_bytes)], app=app, deadline_s=DEADLINE_S)[0]


def reserve_part(
    store: Store, name: object, size_bytes: int, index: int, count: int = 2, group: bytes = b"g" * 16
) -> Reservation | Refusal:
    part = Part(group, index, count)
    return store.reserve([(key(name), size_bytes)], app="test", part=part, deadline_s=DEADLINE_S)[0]


def write_part(store: Store, room: Reservation, payload: bytes, segments: int, mine: range) -> bool:
    """Write and commit the segments `mine` of a payload; whether they are in."""
    step = len(payload) // segments
    view = store.view(room.location, writable=True)
    view[mine.start * step : mine.stop * step] = payload[mine.start * step : mine.stop * step]
    sums = {i: codec.checksum(payload[i * step : (i + 1) * step]) for i in mine}
    meta = codec.encode_part(Kind.KV_PAGE, room.key, "float16", (len(payload) // 2,), segments, sums)
    return store.commit([(room, meta)], deadline_s=DEADLINE_S) == [True]


def fill(store: Store, name: object, payload: bytes, app: str = "test") -> None:
    """Reserve, write and commit one entry with meta b"meta"; fails the test if refused."""
    room = reserve(store, name, len(payload), app)
    assert isinstance(room, Reservation), room
    store.view(room.location, writable=True)[:] = payload
    assert store.commit([(room, b"meta")], deadline_s=DEADLINE_S) == [True]


def lease(store: Store, name: object, ttl_s: float = 60.0) -> Lease | None:
    return store.lease([key(name)], ttl_s=ttl_s, deadline_s=DEADLINE_S)[0]


def present(store: Store, *names: object) -> bytes:
    return store.contains([key(name) for name in names], deadline_s=DEADLINE_S)


class StoreContract:
    """Inherit, set `capacity_bytes` to the store's and give the fixture `stage`."""

    capacity_bytes: ClassVar[int] = 1 << 20

    @pytest.fixture
    def store(self, stage: StoreStage) -> Store:
        return stage.connect()

    @pytest.fixture
    def other(self, stage: StoreStage) -> Store:
        return stage.connect()

    @property
    def quarter(self) -> int:
        return self.capacity_bytes // 4

    def test_nothing_is_visible_before_commit(self, store: Store, other: Store) -> None:
        room = reserve(store, "a", 100)
        assert isinstance(room, Reservation)
        assert present(other, "a") == b"\0"
        assert lease(other, "a") is None
        store.view(room.location, writable=True)[:] = b"x" * 100
        assert store.commit([(room, b"m")], deadline_s=DEADLINE_S) == [True]
        assert present(other, "a") == b"\1"

    def test_what_was_written_is_read_elsewhere(self, store: Store, other: Store) -> None:
        fill(store, "a", b"payload")
        held = lease(other, "a")
        assert held is not None
        assert (held.key, held.meta, bytes(other.view(held.location))) == (key("a"), b"meta", b"payload")
        assert held.location.size == 7
        assert held.location.offset % 64 == 0

    def test_views_of_readers_are_read_only(self, store: Store) -> None:
        fill(store, "a", b"payload")
        held = lease(store, "a")
        assert held is not None
        assert store.view(held.location).readonly

    def test_mask_answers_each_key(self, store: Store) -> None:
        for name in (0, 1, 3):
            fill(store, name, b"x")
        assert present(store, 0, 1, 2, 3) == b"\1\1\0\1"
        assert present(store) == b""

    def test_an_empty_payload_is_an_entry(self, store: Store) -> None:
        fill(store, "empty", b"")
        held = lease(store, "empty")
        assert held is not None
        assert bytes(store.view(held.location)) == b""

    def test_first_writer_wins(self, store: Store, other: Store) -> None:
        room = reserve(store, "a", 10)
        assert isinstance(room, Reservation)
        assert reserve(other, "a", 10) is Refusal.PENDING
        assert reserve(store, "a", 10) is Refusal.PENDING
        assert store.commit([(room, b"")], deadline_s=DEADLINE_S) == [True]
        assert reserve(other, "a", 10) is Refusal.PRESENT

    def test_one_key_twice_in_a_batch(self, store: Store) -> None:
        answers = store.reserve([(key("a"), 8), (key("a"), 8)], app="test", deadline_s=DEADLINE_S)
        assert isinstance(answers[0], Reservation)
        assert answers[1] is Refusal.PENDING

    def test_a_reservation_commits_once_and_only_for_its_owner(self, store: Store, other: Store) -> None:
        room = reserve(store, "a", 10)
        assert isinstance(room, Reservation)
        assert other.commit([(room, b"")], deadline_s=DEADLINE_S) == [False]
        assert store.commit([(room, b""), (room, b"")], deadline_s=DEADLINE_S) == [True, False]

    def test_a_released_reservation_is_gone(self, stage: StoreStage, store: Store) -> None:
        """Its room a little later: another process of its owner's may be in the middle of writing."""
        room = reserve(store, "a", self.capacity_bytes)
        assert isinstance(room, Reservation)
        store.release([room.token], deadline_s=DEADLINE_S)
        assert store.commit([(room, b"")], deadline_s=DEADLINE_S) == [False]
        assert reserve(store, "b", self.capacity_bytes) is Refusal.FULL
        stage.advance(stage.quarantine_s + 0.1)
        assert isinstance(reserve(store, "b", self.capacity_bytes), Reservation)

    @pytest.mark.parametrize("how", ["committed", "released", "expired", "gone"])
    def test_a_late_writer_damages_nobody(self, stage: StoreStage, store: Store, how: str) -> None:
        """A worker process that writes where the scheduler's process has reserved, and is late."""
        size, scheduler, worker = self.capacity_bytes, stage.connect(), stage.connect()
        room = reserve(scheduler, "a", size)
        assert isinstance(room, Reservation)
        worker.view(room.location, writable=True)[:8] = b"in time!"
        if how == "committed":
            assert scheduler.commit([(room, b"meta")], deadline_s=DEADLINE_S) == [True]
            assert store.delete([key("a")], deadline_s=DEADLINE_S) == 1
        elif how == "released":
            scheduler.release([room.token], deadline_s=DEADLINE_S)
            assert scheduler.stat(deadline_s=DEADLINE_S).reservations == 0
            stage.advance(stage.quarantine_s + 0.1)
        elif how == "expired":
            stage.advance(stage.reservation_s + 0.1)
            store.lease([key("a")], ttl_s=1, deadline_s=DEADLINE_S)
            assert scheduler.commit([(room, b"meta")], deadline_s=DEADLINE_S) == [False]
        else:
            scheduler.close()
            stage.advance(0.1)
            store.lease([key("a")], ttl_s=1, deadline_s=DEADLINE_S)
            stage.advance(stage.quarantine_s + 0.1)
        fill(store, "b", b"x" * size)
        with pytest.raises(StoreUnavailable) as e:
            worker.view(room.location, writable=True)
        assert e.value.reason == "stale_location"
        held = lease(store, "b")
        assert held is not None
        with pytest.raises(StoreUnavailable):
            worker.view(held.location, writable=True)
        assert bytes(store.view(held.location)) == b"x" * size

    def test_unknown_tokens_are_ignored(self, store: Store, other: Store) -> None:
        fill(store, "a", b"x" * self.capacity_bytes)
        held = lease(store, "a")
        assert held is not None
        other.release([held.token, 1, 2**60], deadline_s=DEADLINE_S)
        assert reserve(other, "b", 64) is Refusal.FULL

    def test_too_large(self, store: Store) -> None:
        assert reserve(store, "a", self.capacity_bytes + 1) is Refusal.TOO_LARGE
        assert store.stat(deadline_s=DEADLINE_S).refusals == 1

    def test_the_least_recently_used_goes_first(self, store: Store) -> None:
        for name in range(4):
            fill(store, name, b"x" * self.quarter)
        held = lease(store, 0)
        assert held is not None
        store.release([held.token], deadline_s=DEADLINE_S)
        fill(store, 4, b"x" * self.quarter)
        assert present(store, 0, 1, 2, 3, 4) == b"\1\0\1\1\1"
        assert store.stat(deadline_s=DEADLINE_S).evictions == 1

    def test_questions_do_not_refresh(self, store: Store) -> None:
        for name in range(4):
            fill(store, name, b"x" * self.quarter)
        before = store.stat(deadline_s=DEADLINE_S)
        assert present(store, 0) == b"\1"
        assert store.stat(deadline_s=DEADLINE_S) == before
        fill(store, 4, b"x" * self.quarter)
        assert present(store, 0) == b"\0"

    def test_leased_entries_stay_and_a_refusal_costs_nothing(self, store: Store, other: Store) -> None:
        for name in range(4):
            fill(store, name, b"x" * self.quarter)
        held = [lease(store, name) for name in (0, 2)]
        assert reserve(other, "big", self.quarter * 2) is Refusal.FULL
        assert present(store, 0, 1, 2, 3) == b"\1\1\1\1"
        store.release([each.token for each in held if each], deadline_s=DEADLINE_S)
        assert isinstance(reserve(other, "big", self.quarter * 2), Reservation)

    def test_one_client_keeps_three_quarters_in_place_and_no_more(self, store: Store, other: Store) -> None:
        for name in range(4):
            fill(store, name, b"x" * self.quarter)
        held = [lease(store, name) for name in range(3)]
        assert None not in held
        assert lease(store, 3) is None
        assert lease(store, 0) is not None, "what it has it may have twice"
        assert isinstance(reserve(store, "new", self.quarter), Reservation), "writers have the rest"
        assert lease(other, 0) is not None
        store.release([each.token for each in held[1:] if each], deadline_s=DEADLINE_S)
        assert isinstance(reserve(store, "newer", self.quarter), Reservation)

    def test_two_leases_need_two_releases(self, store: Store, other: Store) -> None:
        fill(store, "a", b"x" * self.capacity_bytes)
        first, second = lease(store, "a"), lease(other, "a")
        assert first is not None
        assert second is not None
        store.release([first.token], deadline_s=DEADLINE_S)
        assert reserve(store, "b", 64) is Refusal.FULL
        other.release([second.token], deadline_s=DEADLINE_S)
        assert isinstance(reserve(other, "b", 64), Reservation)

    def test_a_lease_expires(self, store: Store, stage: StoreStage) -> None:
        fill(store, "a", b"x" * self.capacity_bytes)
        assert lease(store, "a", ttl_s=0.2) is not None
        assert reserve(store, "b", 64) is Refusal.FULL
        stage.advance(0.25)
        assert isinstance(reserve(store, "b", 64), Reservation)

    def test_leases_end_with_their_connection(self, stage: StoreStage, store: Store) -> None:
        fill(store, "a", b"x" * self.capacity_bytes)
        gone = stage.connect()
        assert lease(gone, "a") is not None
        gone.close()
        stage.advance(0.05)
        assert isinstance(reserve(store, "b", 64), Reservation)

    def test_a_dead_writers_room_is_kept_from_others(self, stage: StoreStage, store: Store) -> None:
        gone = stage.connect()
        assert isinstance(reserve(gone, "a", self.capacity_bytes), Reservation)
        gone.close()
        stage.advance(0.05)
        assert reserve(store, "a", self.capacity_bytes) is Refusal.FULL
        stage.advance(stage.quarantine_s)
        assert isinstance(reserve(store, "a", self.capacity_bytes), Reservation)

    def test_a_forgotten_reservation_expires_and_its_room_waits_for_its_writer(
        self, stage: StoreStage, store: Store, other: Store
    ) -> None:
        """A stopped or hung client: its key must not stay taken for ever, nor its room be given away
        under a write of its own."""
        room = reserve(store, "a", self.capacity_bytes)
        assert isinstance(room, Reservation)
        assert reserve(other, "a", 64) is Refusal.PENDING
        stage.advance(stage.reservation_s + 0.1)
        assert reserve(other, "a", 64) is Refusal.FULL
        assert other.stat(deadline_s=DEADLINE_S).reservations == 0
        assert store.commit([(room, b"late")], deadline_s=DEADLINE_S) == [False]
        assert present(other, "a") == b"\0"
        assert isinstance(reserve(other, "a", self.capacity_bytes), Reservation)

    def test_room_of_a_silent_writer_comes_back_in_the_end(
        self, stage: StoreStage, store: Store, other: Store
    ) -> None:
        assert isinstance(reserve(store, "a", self.capacity_bytes), Reservation)
        for passed_s, answer in ((stage.reservation_s, False), (stage.reclaim_s, True)):
            stage.advance(passed_s + 0.1)
            present(other, "a")
            assert isinstance(reserve(other, "b", self.capacity_bytes), Reservation) == answer

    def test_parts_make_the_entry_that_one_writer_would(self, store: Store, other: Store) -> None:
        payload = bytes(range(256)) * 16
        rooms = [reserve_part(each, "a", len(payload), i) for i, each in enumerate((store, other))]
        assert isinstance(rooms[0], Reservation)
        assert isinstance(rooms[1], Reservation)
        assert rooms[0].location == rooms[1].location
        assert rooms[0].token != rooms[1].token
        assert write_part(other, rooms[1], payload, 8, range(4, 8))
        assert present(store, "a") == b"\0"
        assert other.commit([(rooms[0], b"theirs")], deadline_s=DEADLINE_S) == [False]
        assert write_part(store, rooms[0], payload, 8, range(4))
        found = entry.get(other, key("a"), deadline_s=DEADLINE_S)
        assert found is not None
        assert found[1] == payload
        assert len(found[0].checksums) == 8
        assert reserve_part(store, "a", len(payload), 0) is Refusal.PRESENT

    def test_only_the_same_group_shares_a_reservation(self, store: Store, other: Store) -> None:
        assert isinstance(reserve_part(store, "a", 128, 0), Reservation)
        assert reserve(other, "a", 128) is Refusal.PENDING
        assert reserve_part(other, "a", 128, 1, group=b"h" * 16) is Refusal.PENDING
        assert reserve_part(other, "a", 128, 1, count=3) is Refusal.PENDING
        assert reserve_part(other, "a", 64, 1) is Refusal.PENDING
        assert reserve_part(store, "a", 128, 0) is Refusal.PENDING, "this part has its writer"
        assert isinstance(reserve_part(other, "a", 128, 1), Reservation)
        assert store.stat(deadline_s=DEADLINE_S).reservations == 1

    @pytest.mark.parametrize("how", ["overlap", "hole", "meta"])
    def test_parts_that_make_no_whole_are_no_entry(self, store: Store, other: Store, how: str) -> None:
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
        assert present(store, "a") == b"\0"
        stat = store.stat(deadline_s=DEADLINE_S)
        assert (stat.used_bytes, stat.reservations) == (0, 0)

    def test_a_part_that_is_given_up_ends_all(self, stage: StoreStage, store: Store, other: Store) -> None:
        size = self.capacity_bytes
        first, second = reserve_part(store, "a", size, 0), reserve_part(other, "a", size, 1)
        assert isinstance(first, Reservation)
        assert isinstance(second, Reservation)
        store.release([first.token], deadline_s=DEADLINE_S)
        assert store.stat(deadline_s=DEADLINE_S).reservations == 0
        with pytest.raises(StoreUnavailable):
            write_part(other, second, b"x" * size, 4, range(2, 4))
        stage.advance(stage.quarantine_s + 0.1)
        assert reserve(other, "b", 64) is Refusal.FULL, "the other part's writer may be writing"
        assert other.commit([(second, b"")], deadline_s=DEADLINE_S) == [False]
        assert isinstance(reserve(other, "b", size), Reservation)

    def test_a_part_whose_connection_ends_ends_all(self, stage: StoreStage, store: Store) -> None:
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

    def test_a_part_that_nobody_joins_expires(self, stage: StoreStage, store: Store) -> None:
        size = self.capacity_bytes
        room = reserve_part(store, "a", size, 0)
        assert isinstance(room, Reservation)
        assert write_part(store, room, b"x" * size, 2, range(1))
        stage.advance(stage.reservation_s + 0.1)
        assert isinstance(reserve(store, "a", size), Reservation), "nobody writes there any more"

    def test_a_part_of_nothing_is_the_callers_fault(self, store: Store) -> None:
        for group, index, count in (
            (b"short", 0, 2),
            (b"g" * 16, 2, 2),
            (b"g" * 16, -1, 2),
            (b"g" * 16, 0, 0),
        ):
            with pytest.raises(ValueError, match=r"group|part"):
                reserve_part(store, "a", 64, index, count, group)

    def test_deleted_is_invisible_at_once_but_stays_for_its_reader(self, store: Store, other: Store) -> None:
        fill(store, "a", b"old" * 10)
        held = lease(other, "a")
        assert held is not None
        assert store.delete([key("a"), key("absent")], deadline_s=DEADLINE_S) == 1
        assert present(store, "a") == b"\0"
        assert lease(store, "a") is None
        fill(store, "a", b"new" * 10)
        assert bytes(other.view(held.location)) == b"old" * 10
        used = store.stat(deadline_s=DEADLINE_S).used_bytes
        other.release([held.token], deadline_s=DEADLINE_S)
        assert other.stat(deadline_s=DEADLINE_S).used_bytes == used - 64

    def test_room_given_anew_has_another_generation(self, store: Store) -> None:
        fill(store, "a", b"x" * self.capacity_bytes)
        first = lease(store, "a")
        assert first is not None
        store.release([first.token], deadline_s=DEADLINE_S)
        second = reserve(store, "b", self.capacity_bytes)
        assert isinstance(second, Reservation)
        assert second.location.offset == first.location.offset
        assert second.location.generation != first.location.generation

    def test_a_location_of_elsewhere_never_resolves(self, store: Store) -> None:
        fill(store, "a", b"x")
        held = lease(store, "a")
        assert held is not None
        here = held.location
        beyond = Location(here.arena_id, self.capacity_bytes, self.capacity_bytes, here.generation)
        for wrong in (Location(b"\0" * 16, here.offset, here.size, here.generation), beyond):
            with pytest.raises(StoreUnavailable) as e:
                store.view(wrong)
            assert e.value.reason == "stale_location"

    def test_stat_counts(self, store: Store, other: Store) -> None:
        fill(store, "a", b"x" * 100, app="one")
        fill(store, "b", b"x" * 64, app="two")
        assert isinstance(reserve(store, "c", 1, app="two"), Reservation)
        lease(other, "a")
        lease(other, "nothing")
        stat = store.stat(deadline_s=DEADLINE_S)
        assert (stat.entries, stat.reservations, stat.leases, stat.hits, stat.misses) == (2, 1, 1, 1, 1)
        assert (stat.capacity_bytes, stat.used_bytes) == (self.capacity_bytes, 256)
        assert stat.bytes_by_app == {"one": 128, "two": 128}

    def test_bad_requests_are_the_callers_fault(self, store: Store) -> None:
        with pytest.raises(ValueError, match="32 bytes"):
            store.contains([b"short"], deadline_s=DEADLINE_S)
        with pytest.raises(ValueError, match="-1 bytes"):
            reserve(store, "a", -1)
        assert present(store, "a") == b"\0"

    def test_a_closed_connection_is_off(self, stage: StoreStage) -> None:
        gone = stage.connect()
        gone.close()
        gone.close()
        with pytest.raises(StoreUnavailable) as e:
            present(gone, "a")
        assert e.value.reason == "store_down"

    @pytest.mark.parametrize("segments", [1, 4])
    def test_put_and_get(self, store: Store, other: Store, segments: int) -> None:
        payload = bytes(range(256)) * 256
        assert put(store, payload, segments) == "stored"
        assert put(other, payload, segments) == "present"
        found = entry.get(other, key("e"), deadline_s=DEADLINE_S)
        assert found is not None
        assert found[1] == payload
        assert (found[0].shape, found[0].dtype) == ((64, 512), "float16")
        target = bytearray(len(payload))
        header = entry.get_into(other, key("e"), memoryview(target), deadline_s=DEADLINE_S)
        assert header == found[0]
        assert target == payload
        assert entry.get(other, key("none"), deadline_s=DEADLINE_S) is None
        assert store.stat(deadline_s=DEADLINE_S).leases == 0

    def test_a_corrupt_byte_is_found_and_the_entry_dropped(
        self, stage: StoreStage, store: Store, other: Store
    ) -> None:
        for read in (_read, _read_into):
            assert put(store, b"abcd" * 16384, 2) == "stored"
            held = lease(store, "e")
            assert held is not None
            stage.raw(store, held.location)[40000] ^= 4
            store.release([held.token], deadline_s=DEADLINE_S)
            with pytest.raises(CodecError) as e:
                read(other)
            assert e.value.reason == "corrupt"
            assert present(store, "e") == b"\0"


def put(store: Store, payload: bytes, segments: int) -> str:
    """Store `payload` under key("e") as 64 float16 rows."""
    shape = (64, len(payload) // 128)
    return entry.put(
        store, payload, kind=Kind.EMBEDDING, key=key("e"), dtype="float16", shape=shape, app="test",
        deadline_s=DEADLINE_S, segments=segments,
    )  # fmt: skip


def _read(store: Store) -> None:
    entry.get(store, key("e"), deadline_s=DEADLINE_S)


def _read_into(store: Store) -> None:
    entry.get_into(store, key("e"), memoryview(bytearray(65536)), deadline_s=DEADLINE_S)
