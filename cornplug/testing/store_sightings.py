"""Contract tests of reservations for keys that an earlier request named (`only_seen`)."""

from __future__ import annotations

from typing import ClassVar

import pytest

from cornplug.store.base import Reservation, ReserveRefusal, Store, WriterPart
from cornplug.testing.store_stage import DEADLINE_S, StoreStage, fill, key, present, reserve

_GROUP = b"g" * 16


def reserve_seen(
    store: Store, name: object, size_bytes: int = 64, part: WriterPart | None = None
) -> Reservation | ReserveRefusal:
    """Return the result of reserving space only if another request has named the key."""
    entries = [(key(name), size_bytes)]
    return store.reserve(entries, app="test", part=part, deadline_s=DEADLINE_S, only_seen=True)[0]


class SightingContract:
    """Tests of `only_seen`, part of `StoreContract`."""

    capacity_bytes: ClassVar[int]

    @pytest.mark.parametrize("elsewhere", [False, True])
    def test_the_second_request_for_a_key_gets_room(
        self, store: Store, other: Store, elsewhere: bool
    ) -> None:
        assert reserve_seen(store, "a") is ReserveRefusal.FIRST_SIGHT
        assert reserve_seen(store, "b") is ReserveRefusal.FIRST_SIGHT
        assert isinstance(reserve_seen(other if elsewhere else store, "a"), Reservation)
        assert reserve_seen(store, "a") is ReserveRefusal.PENDING

    def test_a_key_twice_in_a_batch_is_of_two_requests(self, store: Store) -> None:
        entries = [(key("a"), 64), (key("a"), 64)]
        answers = store.reserve(entries, app="test", deadline_s=DEADLINE_S, only_seen=True)
        assert answers[0] is ReserveRefusal.FIRST_SIGHT
        assert isinstance(answers[1], Reservation)

    def test_other_questions_are_no_sightings(self, store: Store) -> None:
        assert present(store, "a") == b"\0"
        room = reserve(store, "a", 64)
        assert isinstance(room, Reservation)
        store.release([room.token], deadline_s=DEADLINE_S)
        assert reserve_seen(store, "a") is ReserveRefusal.FIRST_SIGHT

    def test_a_present_key_is_present_seen_or_not(self, store: Store) -> None:
        fill(store, "a", b"payload")
        assert reserve_seen(store, "a") is ReserveRefusal.PRESENT
        assert reserve_seen(store, "big", self.capacity_bytes + 1) is ReserveRefusal.FIRST_SIGHT
        assert reserve_seen(store, "big", self.capacity_bytes + 1) is ReserveRefusal.TOO_LARGE

    def test_a_key_that_was_stored_and_is_gone_is_still_seen(self, store: Store) -> None:
        assert reserve_seen(store, "a") is ReserveRefusal.FIRST_SIGHT
        room = reserve_seen(store, "a")
        assert isinstance(room, Reservation)
        assert store.commit([(room, b"")], deadline_s=DEADLINE_S) == [True]
        assert store.delete([key("a")], deadline_s=DEADLINE_S) == 1
        assert isinstance(reserve_seen(store, "a"), Reservation)

    @pytest.mark.parametrize("order", [(0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0, 1)])
    def test_parts_of_one_request_are_one_sighting(
        self, store: Store, other: Store, order: tuple[int, ...]
    ) -> None:
        ranks = store, other
        answers = [reserve_seen(ranks[i], "a", 128, WriterPart(_GROUP, i, 2)) for i in order]
        assert answers[:2] == [ReserveRefusal.FIRST_SIGHT] * 2
        assert all(isinstance(answer, Reservation) for answer in answers[2:])

    def test_a_part_is_seen_once_a_writer_outside_its_group_was(self, stage: StoreStage) -> None:
        ranks = [stage.connect(), stage.connect()]
        assert reserve_seen(stage.connect(), "a", 128) is ReserveRefusal.FIRST_SIGHT
        for i in range(2):
            assert isinstance(reserve_seen(ranks[i], "a", 128, WriterPart(_GROUP, i, 2)), Reservation)

    def test_a_group_counts_for_other_writers(self, store: Store, other: Store) -> None:
        assert reserve_seen(store, "a", 128, WriterPart(_GROUP, 0, 2)) is ReserveRefusal.FIRST_SIGHT
        assert isinstance(reserve_seen(other, "a", 128), Reservation)
