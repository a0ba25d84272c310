"""Allocation, eviction and the index, against a model that is too simple to be wrong."""

from __future__ import annotations

import random
import statistics
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from time_limits import TimeLimits

from cornplug.store.arena import ALIGN, ArenaAllocator, align_up
from cornplug.store.base import Reservation, ReserveRefusal, ReserveTerms
from cornplug.store.daemon.entry_watchers import EntryTableWriter, EntryWatchers
from cornplug.store.daemon.index import StoreIndex
from cornplug.store.daemon.reservations import ReservationTimes
from cornplug.store.entry_table import PRESENT, UNLISTED, MappedEntryTable, TableShape
from cornplug.testing.store import key_of

CAPACITY = 4096
QUARANTINE_S = 5.0
NAMES = st.integers(0, 7)
OWNERS = st.integers(1, 3)
SIZES = st.sampled_from([0, 1, 64, 65, 500, 1024, 2048, 4096, 4097])


def make_index(capacity_bytes: int = CAPACITY) -> StoreIndex:
    return StoreIndex(
        b"\1" * 16, capacity_bytes, times=ReservationTimes(QUARANTINE_S), grow=lambda missing: missing
    )


class IndexAgainstModel(RuleBasedStateMachine):
    """The model knows what is visible, leased, reserved and quarantined; not where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.visible: dict[bytes, tuple[bytes, int, int]] = {}
        self.leases: dict[tuple[int, int], tuple[int, int, int, float]] = {}
        self.writing: dict[int, tuple[int, Reservation]] = {}
        self.quarantine: list[tuple[float, int, int]] = []

    @initialize(granted=st.sampled_from([1024, CAPACITY]))
    def begin(self, granted: int) -> None:
        """The arena may stop growing before the capacity, as on a small /dev/shm."""
        self.granted = granted
        self.grown = 0
        # That reservations expire has tests of its own.
        self.writer = EntryTableWriter(TableShape(buckets=2, records=6))
        self.table = MappedEntryTable(self.writer.fd)
        self.index = StoreIndex(
            b"\1" * 16,
            CAPACITY,
            times=ReservationTimes(QUARANTINE_S, reservation_s=1e9),
            grow=self.grow,
            watchers=EntryWatchers(self.writer),
        )

    def grow(self, want_bytes: int) -> int:
        given = min(want_bytes, self.granted - self.grown)
        self.grown += given
        return given

    @rule(owner=OWNERS, name=NAMES, size=SIZES)
    def reserve(self, owner: int, name: int, size: int) -> None:
        wanted = key_of(name)
        (answer,) = self.index.reserve(owner, [(wanted, size)], ReserveTerms("a"), now_s=self.now_s)
        if wanted in self.visible:
            assert answer is ReserveRefusal.PRESENT
        elif any(r.key == wanted for _, r in self.writing.values()):
            assert answer is ReserveRefusal.PENDING
        elif size > CAPACITY:
            assert answer is ReserveRefusal.TOO_LARGE
        elif answer is ReserveRefusal.FULL:
            assert not self.could_fit(align_up(size))
        else:
            assert isinstance(answer, Reservation)
            self.writing[answer.token] = (owner, answer)
            self.forget_evicted()

    def could_fit(self, room: int) -> bool:
        """Whether a hole of `room` is possible when every unleased entry goes."""
        fixed = sorted((offset, offset + size) for offset, size in self.fixed())
        at = 0
        for start, end in [*fixed, (self.granted, self.granted)]:
            if start - at >= room:
                return True
            at = max(at, end)
        return False

    def fixed(self) -> list[tuple[int, int]]:
        rooms = {offset: align_up(size) for _, offset, size, _ in self.leases.values()}
        rooms |= {r.location.offset: align_up(r.location.size) for _, r in self.writing.values()}
        rooms |= {offset: align_up(size) for _, offset, size in self.quarantine}
        return list(rooms.items())

    def forget_evicted(self) -> None:
        leased = {offset for _, offset, _, _ in self.leases.values()}
        for each in list(self.visible):
            if self.index.contains([each]) == b"\0":
                assert self.visible.pop(each)[1] not in leased, "a leased entry was evicted"

    @rule(owner=OWNERS, which=st.integers(0, 5), meta=st.binary(max_size=4))
    def commit(self, owner: int, which: int, meta: bytes) -> None:
        if not self.writing:
            return
        token = list(self.writing)[which % len(self.writing)]
        theirs, reservation = self.writing[token]
        done = self.index.commit(owner, token, meta)
        assert done == (owner == theirs)
        if done:
            del self.writing[token]
            place = reservation.location
            self.visible[reservation.key] = (meta, place.offset, place.size)
        assert not self.index.commit(owner, token + 10_000, meta)

    @rule(owner=OWNERS, names=st.lists(NAMES, max_size=3), ttl_s=st.sampled_from([1.0, 10.0]))
    def lease(self, owner: int, names: list[int], ttl_s: float) -> None:
        leases = self.index.lease(owner, [key_of(name) for name in names], ttl_s=ttl_s, now_s=self.now_s)
        for number, (name, lease) in enumerate(zip(names, leases, strict=True)):
            there = self.visible.get(key_of(name))
            assert (lease is not None) == (there is not None and self.may_lease(owner, *there[1:]))
            if lease is not None:
                place = lease.location
                assert (lease.meta, place.offset, place.size) == self.visible[lease.key]
                self.leases[lease.token, number] = (owner, place.offset, place.size, self.now_s + ttl_s)

    def may_lease(self, owner: int, offset: int, size: int) -> bool:
        """Three quarters of the store each, and one entry always."""
        mine = {at: align_up(length) for by, at, length, _ in self.leases.values() if by == owner}
        return not mine or offset in mine or sum(mine.values()) + align_up(size) <= CAPACITY * 3 // 4

    @rule(owner=OWNERS, which=st.integers(0, 5))
    def release(self, owner: int, which: int) -> None:
        held = {token: each[0] for (token, _), each in self.leases.items()}
        tokens = [*held, *self.writing]
        if not tokens:
            return
        token = tokens[which % len(tokens)]
        self.index.release(owner, [token, 12345], now_s=self.now_s)
        if held.get(token) == owner:
            self.leases = {name: each for name, each in self.leases.items() if name[0] != token}
        elif token in self.writing and self.writing[token][0] == owner:
            place = self.writing.pop(token)[1].location
            self.quarantine.append((self.now_s + QUARANTINE_S, place.offset, place.size))

    @rule(name=NAMES)
    def delete(self, name: int) -> None:
        assert self.index.delete([key_of(name)]) == (key_of(name) in self.visible)
        self.visible.pop(key_of(name), None)

    @rule(owner=OWNERS)
    def end_owner(self, owner: int) -> None:
        self.index.end_owner(owner, now_s=self.now_s)
        self.leases = {t: each for t, each in self.leases.items() if each[0] != owner}
        for token, (theirs, reservation) in list(self.writing.items()):
            if theirs == owner:
                del self.writing[token]
                place = reservation.location
                self.quarantine.append((self.now_s + QUARANTINE_S, place.offset, place.size))

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.index.sweep(self.now_s)
        self.leases = {t: each for t, each in self.leases.items() if each[3] > self.now_s}
        self.quarantine = [each for each in self.quarantine if each[0] > self.now_s]

    @invariant()
    def agrees_with_the_model(self) -> None:
        names = [key_of(name) for name in range(8)]
        assert self.index.contains(names) == bytes([each in self.visible for each in names])
        stat = self.index.stat()
        assert (stat.entries, stat.leases) == (len(self.visible), len(self.leases))
        assert stat.reservations == len(self.writing)

    @invariant()
    def table_shows_what_lookups_find(self) -> None:
        for each, answer in zip(
            map(key_of, range(8)), self.table.contains([key_of(n) for n in range(8)]), strict=True
        ):
            assert answer == UNLISTED or answer == (each in self.visible)
            record = self.table.read_record(self.table.find_record(each))
            if answer == PRESENT:
                assert record is not None
                assert (record.meta, record.offset, record.size) == self.visible[each]

    def teardown(self) -> None:
        self.writer.close()

    @invariant()
    def no_two_share_room_and_none_is_lost(self) -> None:
        rooms = dict(self.fixed()) | {o: align_up(size) for _, o, size in self.visible.values()}
        taken = sorted([*rooms.items(), *self.index.placement.holes()])
        at = 0
        for offset, size in taken:
            assert offset == at
            at += size
        assert at == self.index.placement.end_bytes
        stat = self.index.stat()
        assert stat.used_bytes == sum(rooms.values())
        quarantined = sum(align_up(size) for _, _, size in self.quarantine)
        assert sum(stat.bytes_by_app.values()) == stat.used_bytes - quarantined


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=100, stateful_step_count=40)


def test_holes_melt_whatever_the_order() -> None:
    room = ArenaAllocator()
    room.extend(64 * 1000)
    offsets = [room.allocate(64) for _ in range(1000)]
    assert sorted(o for o in offsets if o is not None) == list(range(0, 64_000, 64))
    random.Random(1).shuffle(offsets)
    for offset in offsets:
        assert offset is not None
        room.free(offset, 64)
    assert room.holes() == [(0, 64_000)]


@pytest.mark.parametrize("size", [64, 128, 64 * 9, 64 * 17, 64 * 1001, 64 * 99_999])
def test_index_hole_of_just_the_size_is_found(size: int) -> None:
    room = ArenaAllocator()
    room.extend(size)
    assert room.allocate(size + ALIGN) is None
    assert room.allocate(size) == 0
    assert room.allocate(ALIGN) is None


def test_index_fragmentation_neither_slows_nor_loses() -> None:
    """After long churn of mixed sizes the store is still well filled, and as quick."""
    index, source = make_index(64 << 20), random.Random(7)
    sizes = [source.choice([4 << 10, 64 << 10, 100_000, 1 << 20]) for _ in range(6000)]
    spent: list[float] = []
    filled: list[float] = []
    for number, size in enumerate(sizes):
        began_s = time.thread_time()
        (room,) = index.reserve(1, [(key_of(number), size)], ReserveTerms("a"), now_s=0.0)
        spent.append(time.thread_time() - began_s)
        assert isinstance(room, Reservation)
        assert index.commit(1, room.token, b"")
        filled.append(index.stat().used_bytes / (64 << 20))
    early, late = sorted(spent[500:1500])[500], sorted(spent[-1000:])[500]
    assert late < 5 * early + 200e-6
    assert min(filled[1000:]) > 0.9


def test_room_for_a_large_one_costs_about_its_size() -> None:
    """Small entries in random order of age: victims by age alone would empty most of the store."""
    index = make_index(1024 * 4096)
    for number in range(1024):
        (room,) = index.reserve(1, [(key_of(number), 4096)], ReserveTerms("a"), now_s=0.0)
        assert isinstance(room, Reservation)
        index.commit(1, room.token, b"")
    order = random.Random(3).sample(range(1024), 1024)
    for number in order:
        (held,) = index.lease(1, [key_of(number)], ttl_s=1.0, now_s=0.0)
        assert held is not None
        index.release(1, [held.token], now_s=0.0)
    (large,) = index.reserve(1, [(key_of("large"), 64 * 4096)], ReserveTerms("a"), now_s=0.0)
    assert isinstance(large, Reservation)
    assert index.stat().evictions == 64
    gone = [age for age, number in enumerate(order) if index.contains([key_of(number)]) == b"\0"]
    assert statistics.mean(gone) < 512, "older ones than anywhere else"


def test_index_full_store_refuses_a_batch_quickly(within: TimeLimits) -> None:
    index = make_index(20_000 * 64)
    keys = [key_of(n) for n in range(20_000)]
    for room in index.reserve(1, [(k, 64) for k in keys], ReserveTerms("a"), now_s=0.0):
        assert isinstance(room, Reservation)
        index.commit(1, room.token, b"")
    index.lease(1, keys[::2], ttl_s=100.0, now_s=0.0)
    with within.cpu(0.5, clock=time.thread_time):
        answers = index.reserve(
            1, [(key_of(("n", i)), 256) for i in range(256)], ReserveTerms("a"), now_s=0.0
        )
    assert set(answers) == {ReserveRefusal.FULL}
    index.release(1, range(10**6), now_s=0.0)
    assert index.stat().evictions == 0


def test_room_that_is_being_made_is_promised_and_nothing_is_evicted_for_it() -> None:
    index = StoreIndex(b"\1" * 16, 1 << 30, times=ReservationTimes(1.0), grow=lambda missing: None)
    index.placement.extend(24 << 20)
    wanted = [(key_of(n), 16 << 20) for n in range(8)]
    first = index.reserve(1, wanted, ReserveTerms("a"), now_s=0.0)
    assert isinstance(first[0], Reservation)
    assert set(first[1:]) == {ReserveRefusal.GROWING}
    assert index.placement.shortfall_bytes == (7 * 16 - 8) << 20, (
        "what is free at the end is part of the next"
    )
    for _ in range(3):
        index.reserve(2, wanted[1:], ReserveTerms("a"), now_s=0.0)
    assert index.placement.shortfall_bytes == (7 * 16 - 8) << 20, "asking again wants no more"
    index.placement.extend(index.placement.shortfall_bytes)
    assert index.placement.shortfall_bytes == 0
    assert all(isinstance(a, Reservation) for a in index.reserve(1, wanted[1:], ReserveTerms("a"), now_s=0.0))
    assert index.stat().refusals == 0
