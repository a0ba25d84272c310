"""Places of records: the bound, the order in which segments go, records that move."""

from __future__ import annotations

import random

from cornplug.store.disk.disk_space import DiskRecord, DiskSpace, DroppedSegment
from cornplug.testing.store import key_of

PAGE = 4096
SIZE = 64 * PAGE
"""Eight segments of eight pages."""


def _put(space: DiskSpace, name: object, pages: int = 1) -> list[DroppedSegment]:
    """Place and add one record, as the tier does once it is written."""
    size_bytes = pages * PAGE
    at, dropped = space.allocate(size_bytes), list[DroppedSegment]()
    if at is None:
        dropped = space.open_segment()
        for one in dropped:
            for record, segment, offset in one.moves:
                assert space.move(record, segment, offset)
        at = space.allocate(size_bytes)
    assert at is not None
    assert space.add(DiskRecord(key_of(name), "app", 0.0, 0.0, size_bytes, *at, size_bytes))
    return dropped


def test_disk_space_records_of_one_segment_do_not_overlap() -> None:
    space = DiskSpace(SIZE)
    for i in range(8):
        _put(space, i)
    places = [space.find(key_of(i)) for i in range(8)]
    assert [(one.segment, one.offset) for one in places if one] == [(1, i * PAGE) for i in range(8)]
    _put(space, 8)
    assert space.segments == [1, 2]


def test_disk_space_full_drops_oldest_segment_whole() -> None:
    space, dropped = DiskSpace(SIZE), list[DroppedSegment]()
    for i in range(64):
        dropped += _put(space, i)
    assert [one.number for one in dropped] == [1]
    assert [record.key for record in dropped[0].lost_records] == [key_of(i) for i in range(8)]
    assert space.find(key_of(0)) is None
    assert space.find(key_of(8)) is not None


def test_disk_space_record_that_was_read_moves_on_once() -> None:
    space, dropped = DiskSpace(SIZE), list[DroppedSegment]()
    for i in range(8):
        _put(space, i)
    read = space.find(key_of(3))
    assert read is not None
    read.was_read = True
    for i in range(8, 64):
        dropped += _put(space, i)
    assert [record.key for record, _, _ in dropped[0].moves] == [key_of(3)]
    assert space.find(key_of(3)) is read
    assert (read.segment, read.was_read) == (8, False)
    for i in range(64, 128):
        _put(space, i)
    assert space.find(key_of(3)) is None


def test_disk_space_files_never_exceed_bound() -> None:
    """Also while records are copied out of a segment that is still there."""
    chosen = random.Random(3)
    space = DiskSpace(SIZE)
    for i in range(3000):
        before = space.used_bytes
        moved = sum(
            record.record_bytes for one in _put(space, i, chosen.randint(1, 4)) for record, _, _ in one.moves
        )
        assert before + moved <= SIZE
        assert space.used_bytes <= SIZE
        for old in range(max(0, i - 30), i):
            found = space.find(key_of(old))
            if found is not None:
                found.was_read = chosen.random() < 0.8
    assert len(space) > 15


def test_disk_space_segments_of_an_earlier_daemon_take_no_record() -> None:
    space = DiskSpace(SIZE, [(7, 3 * PAGE), (4, PAGE)])
    assert space.segments == [4, 7]
    assert space.allocate(PAGE) is None
    assert space.open_segment() == []
    assert space.allocate(PAGE) == (8, 0)


def test_disk_space_smaller_bound_drops_what_an_earlier_daemon_left() -> None:
    space = DiskSpace(SIZE, [(i, 8 * PAGE) for i in range(1, 20)])
    dropped = space.open_segment()
    assert space.used_bytes + space.segment_bytes <= SIZE
    assert [one.number for one in dropped] == list(range(1, 14))


def test_disk_space_written_record_of_dropped_segment_is_not_added() -> None:
    space = DiskSpace(SIZE)
    assert not space.add(DiskRecord(key_of("late"), "app", 0.0, 0.0, PAGE, 3, 0, PAGE))
    assert space.find(key_of("late")) is None


def test_disk_space_removed_record_is_neither_moved_nor_lost_again() -> None:
    space = DiskSpace(SIZE)
    _put(space, "a")
    record = space.find(key_of("a"))
    assert record is not None
    assert space.remove(key_of("a")) is record
    assert space.remove(key_of("a")) is None
    assert not space.move(record, 1, PAGE)
    assert space.remove_unmoved([record]) == []


def test_disk_space_longer_than_half_a_segment_does_not_fit() -> None:
    space = DiskSpace(SIZE)
    assert space.fits_segment(4 * PAGE)
    assert not space.fits_segment(5 * PAGE)
