"""Segments on disk: cut at any byte, flipped, of another secret, full, in use."""

from __future__ import annotations

import os
import random
import resource
import signal
from pathlib import Path

import pytest
from expected_errors import expect_error

from cornplug.errors import ConfigError
from cornplug.store.disk.record_format import ALIGN_BYTES, CHUNK_BYTES, RecordDamaged, RecordHeader, new_salt
from cornplug.store.disk.segment_files import FoundRecord, SegmentFiles
from cornplug.testing.store import key_of

from .disk_stage import live

SECRET = b"s" * 32
SIZES = (0, 1, 100, 5000, 70_000, CHUNK_BYTES + 3, 2 * CHUNK_BYTES, 4096, 12_345)


def _open(path: Path, secret: bytes = SECRET) -> SegmentFiles:
    return SegmentFiles(path, secret, setting="store.disk_path")


def _payload(i: int) -> bytes:
    return random.Random(i).randbytes(SIZES[i])


def _write(files: SegmentFiles, segment: int, at: int, i: int) -> RecordHeader:
    meta, payload = b"meta%d" % i, memoryview(_payload(i))
    header = files.write(segment, at, _header(i, meta, payload, cost_s=i / 8, written_s=1.5), meta, payload)
    assert header is not None
    return header


def _header(
    name: object, meta: bytes, payload: memoryview, *, cost_s: float = 0.0, written_s: float = 0.0
) -> RecordHeader:
    return RecordHeader(key_of(name), "chat", payload.nbytes, len(meta), cost_s, written_s, new_salt())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[tuple[int, int]]]:
    """A whole segment's bytes, and (offset, end without padding) of its records."""
    path = tmp_path_factory.mktemp("disk") / "tier"
    files, at, places = _open(path), 0, []
    files.create(1)
    for i in range(len(SIZES)):
        header = _write(files, 1, at, i)
        places.append((at, at + header.used_bytes))
        at += header.record_bytes
    files.close()
    return (path / "segment-00000001").read_bytes(), places


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tier"
    path.mkdir(mode=0o700)
    return path


def _content(files: SegmentFiles, found: FoundRecord) -> bytes | None:
    """The payload, None where it is damaged; fails the test unless a whole one is its key's."""
    room = bytearray(found.header.payload_bytes)
    try:
        meta = files.read(found, memoryview(room))
    except RecordDamaged:
        return None
    number = [key_of(i) for i in range(len(SIZES))].index(found.header.key)
    assert (meta, bytes(room)) == (b"meta%d" % number, _payload(number))
    return bytes(room)


def _whole(folder: Path, data: bytes, secret: bytes = SECRET) -> set[int]:
    """Offsets of the records that a scan of these bytes finds and that read as their key's."""
    (folder / "segment-00000001").write_bytes(data)
    files = _open(folder, secret)
    try:
        return {found.offset for found in live(files, 1) if _content(files, found) is not None}
    finally:
        files.close()


def _check_cuts(folder: Path, written: tuple[bytes, list[tuple[int, int]]], cuts: list[int]) -> None:
    data, places = written
    for cut in cuts:
        assert _whole(folder, data[:cut]) == {at for at, end in places if end <= cut}, cut


def test_segment_scan_cut_at_any_byte_finds_every_whole_record(
    folder: Path, written: tuple[bytes, list[tuple[int, int]]]
) -> None:
    edges = [place + d for pair in written[1] for place in pair for d in (-1, 0, 1) if place + d >= 0]
    _check_cuts(folder, written, edges)


@pytest.mark.more
def test_segment_scan_thousand_random_cuts_finds_every_whole_record(
    folder: Path, written: tuple[bytes, list[tuple[int, int]]]
) -> None:
    chosen = random.Random(7)
    _check_cuts(folder, written, [chosen.randrange(len(written[0]) + 1) for _ in range(1000)])


def test_segment_scan_flipped_byte_costs_one_record_at_most(
    folder: Path, written: tuple[bytes, list[tuple[int, int]]]
) -> None:
    data, places = written
    chosen = random.Random(8)
    # A header, a tag or a payload of each record, and bytes of padding.
    at = [start + d for start, _ in places for d in (0, 4, 6, 20, 60)] + [end - 1 for _, end in places]
    for flipped in at + [chosen.randrange(len(data)) for _ in range(20)]:
        damaged = bytearray(data)
        damaged[flipped] ^= 1 << chosen.randrange(8)
        others = {start for start, end in places if not start <= flipped < end}
        found = _whole(folder, bytes(damaged))
        hit = len(others) < len(places)
        assert found == others if hit else found == {start for start, _ in places}, flipped


def test_segment_scan_another_secret_finds_nothing(
    folder: Path, written: tuple[bytes, list[tuple[int, int]]]
) -> None:
    """By its header alone: nothing sealed is read for it."""
    (folder / "segment-00000001").write_bytes(written[0])
    files = _open(folder, b"t" * 32)
    assert live(files, 1) == []
    files.close()


def test_segment_read_record_under_another_header_is_damaged(
    folder: Path, written: tuple[bytes, list[tuple[int, int]]]
) -> None:
    """The header of one record before the sealed bytes of another: right for neither."""
    data, places = written
    (one, _), (other, _) = places[1], places[2]
    swapped = bytearray(data)
    swapped[one : one + 200] = data[other : other + 200]
    assert one not in _whole(folder, bytes(swapped))


def test_segment_kill_record_is_not_found_again(
    folder: Path, written: tuple[bytes, list[tuple[int, int]]]
) -> None:
    (folder / "segment-00000001").write_bytes(written[0])
    files = _open(folder)
    files.mark_dead(1, written[1][3][0])
    files.close()
    assert _whole(folder, (folder / "segment-00000001").read_bytes()) == {
        at for i, (at, _) in enumerate(written[1]) if i != 3
    }


def test_segment_file_holds_no_byte_of_the_payload_in_clear(folder: Path) -> None:
    files = _open(folder)
    files.create(1)
    meta, payload = b"my meta", memoryview(b"my payload " * 100)
    files.write(1, 0, _header("a", meta, payload), meta, payload)
    files.close()
    data = (folder / "segment-00000001").read_bytes()
    assert b"chat" in data
    assert b"my payload" not in data
    assert b"my meta" not in data


def test_segment_same_entry_twice_is_sealed_differently(folder: Path) -> None:
    """One key and one nonce for two payloads would give both away."""
    files = _open(folder)
    files.create(1)
    for at in (0, ALIGN_BYTES):
        payload = memoryview(bytes(1000))
        files.write(1, at, _header("a", b"m", payload), b"m", payload)
    files.close()
    data = (folder / "segment-00000001").read_bytes()
    assert data[200:1000] != data[ALIGN_BYTES + 200 : ALIGN_BYTES + 1000]


def test_segment_write_beyond_file_size_limit_leaves_no_record(folder: Path) -> None:
    files = _open(folder)
    files.create(1)
    first = _write(files, 1, 0, 1)
    before, old = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (first.record_bytes + 20_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            _write(files, 1, first.record_bytes, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert [found.header.key for found in live(files, 1)] == [key_of(1)]
    files.close()


def test_segment_files_folder_in_use_is_refused(folder: Path) -> None:
    files = _open(folder)
    with expect_error(ConfigError, field="store.disk_path", match="is in use"):
        _open(folder)
    files.close()
    _open(folder).close()


def test_segment_files_folder_that_others_may_write_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with expect_error(ConfigError, field="store.disk_path"):
        _open(folder)


def test_segment_drop_removes_its_file_and_descriptor(folder: Path) -> None:
    files = _open(folder)
    files.create(1)
    _write(files, 1, 0, 1)
    found = live(files, 1)[0]
    files.drop(1)
    assert files.list_segments() == []
    assert sorted(os.listdir(folder)) == ["lock"]
    with pytest.raises(RecordDamaged):
        files.read(found, memoryview(bytearray(1)))
    files.close()


def test_segment_copy_record_outlives_its_first_segment(folder: Path) -> None:
    files = _open(folder)
    files.create(1)
    _write(files, 1, 0, 5)
    files.create(2)
    files.copy(live(files, 1)[0], 2, ALIGN_BYTES)
    files.drop(1)
    copied = live(files, 2)
    assert [(one.segment, one.offset, one.header.key) for one in copied] == [(2, ALIGN_BYTES, key_of(5))]
    assert _content(files, copied[0]) == _payload(5)
    files.close()


def test_segment_write_of_payload_that_changed_leaves_no_record(folder: Path) -> None:
    files, asked = _open(folder), list[int]()
    files.create(1)

    def intact() -> bool:
        asked.append(len(live(files, 1)))
        return False

    payload = memoryview(_payload(5))
    written = files.write(1, 0, _header(5, b"m", payload), b"m", payload, is_intact=intact)
    assert (written, asked, live(files, 1)) == (None, [0], [])
    _write(files, 1, 0, 1)
    assert [found.header.key for found in live(files, 1)] == [key_of(1)], "its place is used again"
    files.close()


def test_segment_read_into_room_that_is_anothers_writes_nothing(
    folder: Path, written: tuple[bytes, list[tuple[int, int]]]
) -> None:
    (folder / "segment-00000001").write_bytes(written[0])
    files, room = _open(folder), bytearray(SIZES[6])
    answers = iter([True, False])
    found = files.find(1, written[1][6][0])
    assert files.read(found, memoryview(room), may_write=lambda: next(answers)) is None
    assert bytes(room) == _payload(6)[:CHUNK_BYTES] + bytes(CHUNK_BYTES)
    files.close()


def test_segment_find_place_without_live_record_is_damaged(
    folder: Path, written: tuple[bytes, list[tuple[int, int]]]
) -> None:
    (folder / "segment-00000001").write_bytes(written[0])
    files, (first, second) = _open(folder), (place for place, _ in written[1][1:3])
    assert files.find(1, second).header.key == key_of(2)
    files.mark_dead(1, second)
    for segment, offset in ((1, second), (1, first + 64), (2, first), (1, len(written[0]))):
        with pytest.raises(RecordDamaged):
            files.find(segment, offset)
    files.close()


def test_segment_flush_of_missing_segment_is_an_os_error(folder: Path) -> None:
    files = _open(folder)
    files.create(1)
    _write(files, 1, 0, 1)
    files.flush(1)
    assert files.free_bytes() > 0
    files.drop(1)
    for call in (lambda: files.flush(1), lambda: files.mark_dead(1, 0), lambda: _write(files, 1, 0, 1)):
        with pytest.raises(OSError, match="the segment was deleted"):
            call()
    files.close()
