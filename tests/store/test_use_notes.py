"""Pages in which clients note their reads, and what the daemon makes of them."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Iterator

import pytest

from cornplug.store.base import Reservation, ReserveTerms
from cornplug.store.daemon.entry_watchers import EntryTableWriter, EntryWatchers
from cornplug.store.daemon.index import StoreIndex
from cornplug.store.daemon.reservations import ReservationTimes
from cornplug.store.entry_table import (
    MAX_COUNT_INCREASE,
    NO_NOTES_PAGE,
    NOTES_PAGE_BYTES,
    NOTES_PAGES,
    RING_NOTES,
    ClientNotes,
    NotedReads,
    TableShape,
    UseNotes,
)
from cornplug.testing.store import key_of


@pytest.fixture
def notes() -> Iterator[UseNotes]:
    made = UseNotes()
    yield made
    made.close()


def test_notes_reads_are_taken_once_in_order(notes: UseNotes) -> None:
    page, other = notes.open_page(), notes.open_page()
    mine, theirs = ClientNotes(notes.fd, page), ClientNotes(notes.fd, other)
    assert notes.collect_reads(page) is None
    for record in (3, 1, 3):
        mine.record_hit(record)
    theirs.record_miss()
    assert notes.collect_reads(page) == NotedReads(3, 0, [3, 1, 3])
    assert notes.collect_reads(page) is None
    assert notes.collect_reads(other) == NotedReads(0, 1, [])
    mine.record_hit(7)
    assert notes.collect_reads(page) == NotedReads(1, 0, [7])


def test_notes_keys_looked_up_are_taken_once_and_wrap(notes: UseNotes) -> None:
    page = notes.open_page()
    mine = ClientNotes(notes.fd, page)
    mine.record_lookup(3, 5)
    assert notes.collect_reads(page) == NotedReads(0, 0, [], found=3, absent=5)
    assert notes.collect_reads(page) is None
    for _ in range(1 << 9):
        mine.record_lookup((1 << 23) - 1, 0)
        notes.collect_reads(page)
    mine.record_lookup(1 << 10, 1)
    assert notes.collect_reads(page) == NotedReads(0, 0, [], found=1 << 10, absent=1)


def test_notes_that_say_more_than_a_client_can_read_are_clamped(notes: UseNotes) -> None:
    page = notes.open_page()
    with mmap.mmap(notes.fd, 0) as memory:  # as a client maps it
        memory[page * NOTES_PAGE_BYTES : page * NOTES_PAGE_BYTES + 32] = b"\xfe" * 32
    reads = notes.collect_reads(page)
    assert reads is not None
    assert (reads.hits, reads.misses, reads.found, reads.absent) == (MAX_COUNT_INCREASE,) * 4


def test_notes_beyond_the_ring_lose_the_oldest(notes: UseNotes) -> None:
    page = notes.open_page()
    mine = ClientNotes(notes.fd, page)
    for record in range(3 * RING_NOTES + 5):
        mine.record_hit(record)
    assert notes.collect_reads(page) == NotedReads(
        3 * RING_NOTES + 5, 0, list(range(2 * RING_NOTES + 5, 3 * RING_NOTES + 5))
    )


def test_notes_page_of_a_gone_client_is_empty_for_the_next(notes: UseNotes) -> None:
    page = notes.open_page()
    ClientNotes(notes.fd, page).record_hit(1)
    notes.free_page(page)
    assert notes.open_page() == page
    assert notes.collect_reads(page) is None


def test_notes_client_without_a_page_has_none(notes: UseNotes) -> None:
    pages = [notes.open_page() for _ in range(NOTES_PAGES + 2)]
    assert pages[NOTES_PAGES:] == [NO_NOTES_PAGE, NO_NOTES_PAGE]
    assert notes.collect_reads(NO_NOTES_PAGE) is None
    notes.free_page(NO_NOTES_PAGE)
    notes.free_page(pages[0])
    assert notes.open_page() == pages[0]


def test_notes_of_several_threads_are_all_counted(notes: UseNotes) -> None:
    page = notes.open_page()
    mine = ClientNotes(notes.fd, page)
    threads = [threading.Thread(target=lambda: [mine.record_hit(1) for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert notes.collect_reads(page) == NotedReads(400, 0, [1] * 400)


def test_notes_hostile_bytes_change_only_counts_and_order(notes: UseNotes) -> None:
    table = EntryTableWriter(TableShape.for_capacity(1 << 20))
    watchers = EntryWatchers(table)
    index = StoreIndex(
        b"\1" * 16, 64 * 8, times=ReservationTimes(1.0), grow=lambda missing: missing, watchers=watchers
    )
    for room in index.reserve(1, [(key_of(n), 64) for n in range(8)], ReserveTerms("a"), now_s=0.0):
        assert isinstance(room, Reservation)
        index.commit(1, room.token, b"")
    page = notes.open_page()
    source = random.Random(1)
    memory = mmap.mmap(notes.fd, 0)  # as a client maps it
    for _ in range(200):
        memory[page * NOTES_PAGE_BYTES : (page + 1) * NOTES_PAGE_BYTES] = source.randbytes(NOTES_PAGE_BYTES)
        reads = notes.collect_reads(page)
        assert reads is not None
        assert len(reads.records) <= RING_NOTES
        index.count_reads(reads)
    assert index.contains([key_of(n) for n in range(8)]) == b"\1" * 8
    assert 0 <= index.stat().hits < 1 << 64
    for n in range(8, 20):
        (room,) = index.reserve(1, [(key_of(n), 64)], ReserveTerms("a"), now_s=0.0)
        assert isinstance(room, Reservation)
        index.commit(1, room.token, b"")
    table.close()
