"""Records of far stores: what was changed on its way does not open, and tells nothing."""

from __future__ import annotations

import random

import pytest

from cornplug.store.disk.record_format import CHUNK_BYTES, FarSealer, RecordDamaged, RecordHead
from cornplug.testing.store import key_of

SECRET = b"s" * 32
SIZES = (0, 1, 4096, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 77)


def sealed(name: object, size_bytes: int = 4096, *, secret: bytes = SECRET) -> tuple[bytes, bytes]:
    payload = random.Random(repr(name)).randbytes(size_bytes)
    head = RecordHead("tenant-a", 0.25, 1000.0, size_bytes, b"meta of " + repr(name).encode())
    return FarSealer(secret).seal(key_of(name), head, memoryview(payload)), payload


def opened(name: object, record: bytes, *, secret: bytes = SECRET) -> tuple[RecordHead, bytes]:
    found = FarSealer(secret).open(key_of(name), record)
    room = bytearray(found.head.payload_bytes)
    found.open_into(memoryview(room))
    return found.head, bytes(room)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_far_record_opens_to_what_was_sealed(size_bytes: int) -> None:
    record, payload = sealed("a", size_bytes)
    head, found = opened("a", record)
    assert found == payload
    assert head == RecordHead("tenant-a", 0.25, 1000.0, size_bytes, b"meta of 'a'")
    assert FarSealer(SECRET).sealed_bytes(head) == len(record)


def test_far_record_flipped_bit_anywhere_does_not_open() -> None:
    record, _ = sealed("a")
    chance = random.Random(1)
    for _ in range(1000):
        changed = bytearray(record)
        changed[chance.randrange(len(record))] ^= 1 << chance.randrange(8)
        with pytest.raises(RecordDamaged):
            opened("a", bytes(changed))


def test_far_record_truncated_or_extended_does_not_open() -> None:
    record, _ = sealed("a")
    chance = random.Random(2)
    for _ in range(1000):
        with pytest.raises(RecordDamaged):
            opened("a", record[: chance.randrange(len(record))])
    with pytest.raises(RecordDamaged):
        opened("a", record + b"\0")


def test_far_record_of_another_key_does_not_open() -> None:
    for number in range(1000):
        record, _ = sealed(number, 64)
        with pytest.raises(RecordDamaged):
            opened(number + 1, record)


def test_far_record_with_pieces_of_two_records_of_one_entry_does_not_open() -> None:
    size_bytes = 3 * CHUNK_BYTES
    (one, _), (two, _) = sealed("a", size_bytes), sealed("a", size_bytes)
    assert len(one) == len(two)
    for at in (30, len(one) // 2, len(one) - 100):
        with pytest.raises(RecordDamaged):
            opened("a", one[:at] + two[at:])


def test_far_record_of_another_secret_has_another_name_and_does_not_open() -> None:
    record, _ = sealed("a")
    with pytest.raises(RecordDamaged):
        opened("a", record, secret=b"o" * 32)
    assert FarSealer(SECRET).record_name(key_of("a")) != FarSealer(b"o" * 32).record_name(key_of("a"))


def test_far_record_is_sealed_by_the_newest_secret_and_opened_by_any() -> None:
    old, new, payload = b"o" * 32, b"n" * 32, b"payload"
    head = RecordHead("chat", 0.5, 1.0, len(payload), b"meta")
    hosts = [FarSealer(SECRET, sealing) for sealing in ([old], [old, new], [new, old], [new])]
    assert len({host.record_name(key_of("a")) for host in hosts}) == 1
    by_old, by_new = (hosts[i].seal(key_of("a"), head, memoryview(payload)) for i in (1, 2))
    opens = {
        (i, record) for i, host in enumerate(hosts) for record in (by_old, by_new) if _opens(host, record)
    }
    assert opens == {(0, by_old), (1, by_old), (1, by_new), (2, by_old), (2, by_new), (3, by_new)}
    # The id of the other secret in its place.
    assert not _opens(hosts[1], by_new[:6] + by_old[6:10] + by_new[10:])


def _opens(host: FarSealer, record: bytes) -> bool:
    try:
        return host.open(key_of("a"), record).head.meta == b"meta"
    except RecordDamaged:
        return False


def test_far_record_tells_neither_key_nor_app_nor_content() -> None:
    record, payload = sealed("a")
    name = FarSealer(SECRET).record_name(key_of("a"))
    for told in (key_of("a"), b"tenant-a", b"meta of", payload[:16]):
        assert told not in record
        assert told.hex() not in name
    again, _ = sealed("a")
    assert again[50:200] != record[50:200], "equal entries do not look equal"


def test_far_names_golden_vector() -> None:
    """Hosts of other releases know records by it: a change needs another domain name and another prefix."""
    assert FarSealer(bytes(range(32))).record_name(bytes(32)) == GOLDEN_NAME


def test_far_record_golden_vector_opens() -> None:
    head = FarSealer(bytes(range(32))).open(bytes(32), bytes.fromhex(GOLDEN_RECORD))
    room = bytearray(5)
    head.open_into(memoryview(room))
    assert (head.head, bytes(room)) == (RecordHead("chat", 0.5, 1.0, 5, b"meta"), b"hello")


GOLDEN_NAME = "cp1/57f476ca2aded2605e2cccd3823e3cba3cb94b79d3802fce4370cd7f1f56853d"
GOLDEN_RECORD = (
    "435046520200682c666323a87950dae3e194d35939818bf767712f000000b785f5f087d5a88d0434ff0bf8b47d6e7351"
    "818948f415fa8f75a6b5a3bb0e732c5badd08448a94d9843b75048aafd186e0f375b757e599735ba700ec0da9fbb98a8"
    "277d"
)
