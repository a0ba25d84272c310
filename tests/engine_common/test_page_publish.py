"""Each page that is offered to the store has one counted outcome, whatever the store does."""

from __future__ import annotations

from typing import Any

import pytest

from cornplug.config import Config
from cornplug.engine_common.page_publish import EntryCost, PageCost, PagePublisher
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.kv_page import PageGeometry
from cornplug.metrics import Tally
from cornplug.store.base import Reservation, ReserveRefusal, WriterPart
from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore

PAGE = PageGeometry(page_tokens=16, heads=2, layers=2, dim=8, dtype="float32")
SUMS = dict.fromkeys(range(PAGE.segments), 7)
KEYS = [bytes([i]) * 32 for i in range(4)]


class Runtime(EngineRuntime):
    def __init__(self, store: Any) -> None:
        self.config, self.app, self.secret, self.store = Config(), "test", bytes(32), store


class Stage:
    """A publisher over a store with faults."""

    def __init__(self, part: WriterPart | None = None, store: MemoryStore | None = None) -> None:
        self.faulty = FaultyStore((store or MemoryStore(capacity_bytes=8 << 20)).connect())
        self.tally = Tally()
        self.publisher = PagePublisher(Runtime(self.faulty), PAGE, self.tally, deadline_s=1, writer_part=part)

    def reserved(self, keys: list[bytes]) -> list[Reservation]:
        replies = self.publisher.reserve(keys)
        assert all(isinstance(reply, Reservation) for reply in replies)
        return [reply for reply in replies if isinstance(reply, Reservation)]

    def counts(self) -> dict[str, float]:
        """Outcome -> pages; the label of bytes -> bytes. Nothing else is counted."""
        drained = self.tally.drain()
        assert drained.keys() <= {"cornplug_saves_total", "cornplug_bytes_total"}, "a failed save is no miss"
        return {labels[2]: sum(values) for rows in drained.values() for labels, values in rows}


def test_page_publisher_commit_counts_stored_pages_and_bytes() -> None:
    stage = Stage()
    stage.publisher.commit([(reserved, SUMS) for reserved in stage.reserved(KEYS)])
    assert stage.counts() == {"stored": 4, "save": 4 * PAGE.page_bytes}
    assert stage.faulty.contains(KEYS, deadline_s=1) == b"\1" * 4


def test_page_publisher_reserve_refused_is_counted_by_its_word() -> None:
    stage = Stage()
    stage.publisher.commit([(stage.reserved(KEYS[:1])[0], SUMS)])
    stage.counts()
    first, second = stage.publisher.reserve(KEYS[:2])
    assert (first, type(second)) == (ReserveRefusal.PRESENT, Reservation)
    assert stage.counts() == {"present": 1}


def test_page_publisher_reserve_growing_is_left_to_caller() -> None:
    stage = Stage()
    stage.faulty.growing = 1
    replies = stage.publisher.reserve(KEYS[:3])
    assert isinstance(replies[0], Reservation)
    assert replies[1:] == [ReserveRefusal.GROWING] * 2
    assert stage.counts() == {}


def test_page_publisher_reserve_without_store_is_outcome_of_each_page() -> None:
    stage = Stage()
    stage.faulty.unavailable = True
    assert stage.publisher.reserve(KEYS) == [None] * 4
    assert stage.counts() == {"store_down": 4}


def test_page_publisher_commit_without_store_is_outcome_of_each_page() -> None:
    stage = Stage()
    reserved = stage.reserved(KEYS)
    stage.faulty.unavailable = True
    stage.publisher.commit([(one, SUMS) for one in reserved])
    assert stage.counts() == {"store_down": 4}


def test_page_publisher_commit_of_ended_reservation_is_counted() -> None:
    stage = Stage()
    one, two = stage.reserved(KEYS[:2])
    stage.faulty.release([one.token], deadline_s=1)
    stage.publisher.commit([(one, SUMS), (two, SUMS)])
    assert stage.counts() == {"reservation_ended": 1, "stored": 1, "save": PAGE.page_bytes}


@pytest.mark.parametrize("down", [False, True])
def test_page_publisher_give_up_counts_and_frees_room(down: bool) -> None:
    stage = Stage()
    reserved = stage.reserved(KEYS)
    stage.faulty.unavailable = down
    stage.publisher.release_unwritten(reserved, "write_failed")
    assert stage.counts() == {"write_failed": 4}
    if not down:
        assert stage.faulty.stat(deadline_s=1).reservations == 0


def test_page_publisher_nothing_to_tell_asks_store_nothing() -> None:
    stage = Stage()
    stage.publisher.commit([])
    stage.publisher.release_unwritten([], "write_failed")
    assert (stage.counts(), stage.faulty.calls) == ({}, {})


def test_page_publisher_parts_are_counted_by_first_rank_only() -> None:
    store = MemoryStore(capacity_bytes=8 << 20)
    ranks = [Stage(WriterPart(b"g" * 16, index, 2), store) for index in range(2)]
    reserved = [rank.reserved(KEYS[:1])[0] for rank in ranks]
    for head, (rank, reservation) in enumerate(zip(ranks, reserved, strict=True)):
        rank.publisher.commit([(reservation, {head: 7})])
    assert ranks[0].counts() == {"stored": 1, "save": PAGE.page_bytes}
    assert ranks[1].counts() == {}
    assert store.connect().contains(KEYS[:1], deadline_s=1) == b"\1", "both parts make the page"


@pytest.mark.parametrize(
    ("seconds", "share", "told"), [(0.5, 1.0, 0.5), (0.5, 0.25, 0.125), (1e6, 1.0, 3600.0)]
)
def test_page_publisher_tells_the_store_its_cost_as_last_measured(
    seconds: float, share: float, told: float
) -> None:
    store, cost = MemoryStore(capacity_bytes=8 << 20), PageCost()
    publisher = PagePublisher(
        Runtime(store.connect()), PAGE, Tally(), deadline_s=1, cost=EntryCost(cost, share)
    )
    before = publisher.reserve(KEYS[:1])
    cost.seconds = seconds
    replies = [*before, *publisher.reserve(KEYS[1:2])]
    publisher.commit([(reservation, SUMS) for reservation in replies if isinstance(reservation, Reservation)])
    entries = [store.index.find(key) for key in KEYS[:2]]
    assert [entry.cost_s for entry in entries if entry is not None] == [0.0, told]
