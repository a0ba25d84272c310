"""The table of entries as clients read it: against a dict, full, damaged, and in the middle of a change."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
from collections.abc import Iterator

import pytest
from expected_errors import expect_error
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cornplug.errors import StoreUnavailable
from cornplug.store.base import PayloadLocation
from cornplug.store.daemon.entry_watchers import EntryTableWriter
from cornplug.store.entry_table import (
    ABSENT,
    MAX_META_BYTES,
    PRESENT,
    SERVING,
    TAGS_PER_BUCKET,
    UNLISTED,
    WORD_BYTES,
    EntryRecord,
    MappedEntryTable,
    TableShape,
)
from cornplug.testing.store import key_of

SHAPE = TableShape(buckets=4, records=24)
"""Small, so that buckets and records run out."""


def at(generation: int, offset: int = 0, size: int = 8) -> PayloadLocation:
    return PayloadLocation(b"a" * 16, offset, size, generation)


@pytest.fixture
def writer() -> Iterator[EntryTableWriter]:
    made = EntryTableWriter(TableShape.for_capacity(1 << 20))
    yield made
    made.close()


class TableAgainstDict(RuleBasedStateMachine):
    """A client may be told to ask the daemon; what it is told otherwise is so."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = EntryTableWriter(SHAPE)
        self.table = MappedEntryTable(self.writer.fd)
        self.entries: dict[bytes, tuple[PayloadLocation, bytes]] = {}
        self.generation = 0

    @rule(name=st.integers(0, 60), meta=st.sampled_from([b"", b"meta", b"m" * MAX_META_BYTES, b"m" * 300]))
    def add(self, name: int, meta: bytes) -> None:
        if key_of(name) not in self.entries:
            self.generation += 1
            self.entries[key_of(name)] = at(self.generation, 64 * name, name), meta
            self.writer.add(key_of(name), *self.entries[key_of(name)])

    @precondition(lambda self: self.entries)
    @rule(which=st.integers(0, 60))
    def remove(self, which: int) -> None:
        gone = sorted(self.entries)[which % len(self.entries)]
        self.writer.remove(gone)
        del self.entries[gone]

    @precondition(lambda self: self.entries)
    @rule()
    def remove_all(self) -> None:
        for gone in self.entries:
            self.writer.remove(gone)
        self.entries.clear()
        assert self.table.contains([key_of(name) for name in range(61)]) == bytes(61)

    @invariant()
    def says_nothing_wrong(self) -> None:
        names = [key_of(name) for name in range(61)]
        mask = self.table.contains(names)
        assert mask == b"".join(self.table.contains([each]) for each in names), "one by one as all together"
        assert mask.count(PRESENT) == len(self.writer)
        for each, answer in zip(names, mask, strict=True):
            found = self.table.find_record(each)
            if answer != UNLISTED:
                assert (answer == PRESENT) == (each in self.entries)
                assert (answer == PRESENT) == (found > 0)
            if answer == PRESENT:
                assert self.writer.key_of(found) == each
                location, meta = self.entries[each]
                expected = EntryRecord(found, location.generation, location.offset, location.size, meta)
                assert self.table.read_record(found) == (None if len(meta) > MAX_META_BYTES else expected)

    def teardown(self) -> None:
        self.writer.close()


TestTableAgainstDict = TableAgainstDict.TestCase
TestTableAgainstDict.settings = settings(max_examples=60, stateful_step_count=60)


def test_entry_table_full_one_leaves_entries_to_the_daemon(writer: EntryTableWriter) -> None:
    table = MappedEntryTable(writer.fd)
    for name in range(3 * writer.shape.records):
        writer.add(key_of(name), at(name + 1), b"")
    assert len(writer) <= writer.shape.records
    mask = table.contains([key_of(name) for name in range(3 * writer.shape.records)])
    assert mask.count(PRESENT) == len(writer)
    assert ABSENT not in mask
    for name in range(3 * writer.shape.records):
        writer.remove(key_of(name))
    assert table.contains([key_of(name) for name in range(512)]) == bytes(512)


@pytest.mark.parametrize("capacity_bytes", [1, 1 << 20, 4 << 30, 64 << 30, 1 << 44])
def test_table_shape_any_arena_takes_at_most_a_hundredth(capacity_bytes: int) -> None:
    shape = TableShape.for_capacity(capacity_bytes)
    assert shape.buckets & (shape.buckets - 1) == 0
    assert shape.buckets >= 2 * shape.records > shape.buckets // 2
    assert shape.size_bytes < max(capacity_bytes // 100, 512 << 10)


def test_entry_table_full_of_64_kib_entries_needs_no_message() -> None:
    writer = EntryTableWriter(TableShape.for_capacity(1 << 30))
    table = MappedEntryTable(writer.fd)
    entries = (1 << 30) // (64 << 10)
    for name in range(entries):
        writer.add(key_of(name), at(name + 1), b"")
    assert len(writer) == entries
    for first in range(0, 64 * 256, 256):
        absent = [key_of(("absent", name)) for name in range(first, first + 256)]
        assert table.contains(absent) == bytes([ABSENT]) * 256
    writer.close()


def test_entry_table_freed_records_are_used_again(writer: EntryTableWriter) -> None:
    for name in range(20 * writer.shape.records):
        writer.add(key_of(name), at(name + 1), b"m")
        writer.remove(key_of(name))
    assert MappedEntryTable(writer.fd).find_record(key_of(0)) == 0
    writer.add(key_of("last"), at(1), b"m")
    assert MappedEntryTable(writer.fd).find_record(key_of("last")) == 1


def test_entry_table_record_changed_since_it_was_read_is_noticed(writer: EntryTableWriter) -> None:
    table = MappedEntryTable(writer.fd)
    writer.add(key_of("a"), at(1), b"m")
    found = table.read_record(table.find_record(key_of("a")))
    assert found is not None
    assert table.is_unchanged(found)
    writer.remove(key_of("a"))
    assert not table.is_unchanged(found)
    writer.add(key_of("b"), at(2), b"m")
    assert table.find_record(key_of("b")) == found.number, "the record has another entry"
    assert not table.is_unchanged(found)


def test_entry_table_record_in_the_middle_of_a_change_is_not_believed(writer: EntryTableWriter) -> None:
    """A record of which any so many bytes are of another entry: a reader asks the daemon."""
    table = MappedEntryTable(writer.fd)
    writer.add(key_of("a"), at(1, 64, 8), b"a" * 90)
    number = table.find_record(key_of("a"))
    start = writer.shape.record_offset(number)
    whole = bytes(writer._bytes[start : start + 200])
    writer.remove(key_of("a"))
    writer.add(key_of("b"), at(2, 128, 16), b"b" * 100)
    later = bytes(writer._bytes[start : start + 200])
    meanings = set()
    for cut in range(0, 200, WORD_BYTES):
        for torn in (whole[:cut] + later[cut:], later[:cut] + whole[cut:]):
            writer._bytes[start : start + 200] = torn
            meanings.add(table.read_record(number))
    a, b = b"a" * 90, b"b" * 100
    assert meanings == {None, EntryRecord(number, 1, 64, 8, a), EntryRecord(number, 2, 128, 16, b)}


def test_entry_table_damaged_bytes_raise_no_error_and_show_no_other_entry(writer: EntryTableWriter) -> None:
    source = random.Random(5)
    table = MappedEntryTable(writer.fd)
    metas = {key_of(name): hashlib.sha256(key_of(name)).digest() for name in range(200)}
    for number, (each, meta) in enumerate(metas.items()):
        writer.add(each, at(number + 1, 64 * number, 64), meta)
    shape = writer.shape
    for _ in range(3000):
        spot = source.randrange(shape.record_offset(1) - 64 * shape.buckets, shape.record_offset(201))
        writer._bytes[spot] = source.randrange(256)
    for each in metas:
        assert table.contains([each] * 10)[0] == table.contains([each])[0]
        record = table.read_record(table.find_record(each))
        assert record is None or record.meta in metas.values()


def test_entry_table_of_ended_daemon_answers_nothing(writer: EntryTableWriter) -> None:
    table = MappedEntryTable(writer.fd)
    writer.add(key_of("a"), at(1), b"")
    writer._words[SERVING] = 0
    for ask in (lambda: table.contains([key_of("a")]), lambda: table.find_record(key_of("a"))):
        with expect_error(StoreUnavailable, reason="store_down"):
            ask()


def test_entry_table_other_memory_is_refused(writer: EntryTableWriter) -> None:
    fd = os.memfd_create("test")
    try:
        os.truncate(fd, writer.shape.size_bytes)
        with pytest.raises(ValueError, match="not a table"):
            MappedEntryTable(fd)
    finally:
        os.close(fd)


def test_entry_table_clients_cannot_write_it(writer: EntryTableWriter) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(writer.fd, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(writer.fd, 4096)
    with pytest.raises(TypeError):
        MappedEntryTable(writer.fd)._words[TAGS_PER_BUCKET] = 1


@pytest.fixture
def disk_writer() -> Iterator[EntryTableWriter]:
    made = EntryTableWriter(SHAPE, has_disk=True)
    yield made
    made.close()


def _of_one_bucket(count: int) -> list[bytes]:
    return [key for i in range(1000) if SHAPE.bucket_word(key := hashlib.sha256(b"%d" % i).digest()) == 512][
        :count
    ]


@pytest.mark.parametrize("asked", [1, 40])
def test_entry_table_entry_on_disk_only_is_absent_and_on_disk(
    disk_writer: EntryTableWriter, asked: int
) -> None:
    """For one key and for many, which are looked up otherwise."""
    table = MappedEntryTable(disk_writer.fd)
    a, b, others = key_of("a"), key_of("b"), [key_of(i) for i in range(asked - 1)]
    disk_writer.show_on_disk(a)
    disk_writer.add(b, at(1), b"meta")
    assert table.contains([a, *others])[0] == ABSENT
    assert table.contains([b, *others])[0] == PRESENT
    assert (table.find_record(a), table.on_disk_mask([a, b, *others])) == (0, b"\1\0" + bytes(asked - 1))
    disk_writer.add(a, at(2), b"meta")
    assert table.contains([a, *others])[0] == PRESENT
    assert table.on_disk_mask([a]) == b"\0"
    disk_writer.remove(a)
    assert (table.contains([a]), table.on_disk_mask([a])) == (b"\0", b"\0")
    disk_writer.show_on_disk(a)
    disk_writer.hide_on_disk(a)
    disk_writer.hide_on_disk(a)
    assert table.on_disk_mask([a, *others]) == bytes(asked)
    assert len(disk_writer) == 1


def test_entry_table_entry_in_memory_displaces_one_on_disk_in_a_full_bucket(
    disk_writer: EntryTableWriter,
) -> None:
    table, keys = MappedEntryTable(disk_writer.fd), _of_one_bucket(TAGS_PER_BUCKET + 3)
    for one in keys[: TAGS_PER_BUCKET + 1]:
        disk_writer.show_on_disk(one)
    assert table.on_disk_mask(keys) == b"\1" * TAGS_PER_BUCKET + bytes(3), "no room for more"
    disk_writer.add(keys[-1], at(1), b"meta")
    assert table.contains(keys) == bytes(len(keys) - 1) + b"\1"
    assert sum(table.on_disk_mask(keys)) == TAGS_PER_BUCKET - 1
    for i, one in enumerate(keys[:TAGS_PER_BUCKET]):
        disk_writer.add(one, at(2 + i), b"meta")
    assert table.contains(keys[:1]) == bytes([PRESENT])
    assert sum(table.on_disk_mask(keys)) == 0
    assert table.contains(keys[TAGS_PER_BUCKET:-1]) == bytes([UNLISTED]) * 2
    disk_writer.remove(keys[0])
    disk_writer.show_on_disk(keys[0])
    assert (table.on_disk_mask(keys[:1]), table.find_record(keys[0])) == (b"\1", -1)


def test_entry_table_without_disk_shows_nothing_on_disk(writer: EntryTableWriter) -> None:
    table = MappedEntryTable(writer.fd)
    assert not table.has_disk
    assert table.on_disk_mask([key_of("a")]) == b"\0"


def test_entry_table_shape_has_room_for_tags_of_the_disk() -> None:
    memory, both = TableShape.for_capacity(1 << 30), TableShape.for_capacity(1 << 30, 4 << 30)
    assert both.records == memory.records
    assert both.buckets >= 2 * memory.buckets
