"""Records of far stores: what was changed on its way does not open, and tells nothing."""

from __future__ import annotations

import random

import pytest

from cornplug.store.disk.record_format import CHUNK_BYTES
from cornplug.store.disk.record_seal import RecordDamaged
from cornplug.store.far.far_record import FarSealer, RecordHead
from cornplug.testing.store import key

SECRET = b"s" * 32
SIZES = (0, 1, 4096, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 77)


def sealed(name: object, size_bytes: int = 4096, *, secret: bytes = SECRET) -> tuple[bytes, bytes]:
    payload = random.Random(repr(name)).randbytes(size_bytes)
    head = RecordHead("tenant-a", 0.25, 1000.0, size_bytes, b"meta of " + repr(name).encode())
    return FarSealer(secret).seal(key(name), head, memoryview(payload)), payload


def opened(name: object, record: bytes, *, secret: bytes = SECRET) -> tuple[RecordHead, bytes]:
    found = FarSealer(secret).open(key(name), record)
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
    assert FarSealer(SECRET).name(key("a")) != FarSealer(b"o" * 32).name(key("a"))


def test_far_record_tells_neither_key_nor_app_nor_content() -> None:
    record, payload = sealed("a")
    name = FarSealer(SECRET).name(key("a"))
    for told in (key("a"), b"tenant-a", b"meta of", payload[:16]):
        assert told not in record
        assert told.hex() not in name
    again, _ = sealed("a")
    assert again[50:200] != record[50:200], "equal entries do not look equal"


def test_far_names_golden_vector() -> None:
    """Hosts of other releases know records by it: a change needs another domain name and another prefix."""
    assert FarSealer(bytes(range(32))).name(bytes(32)) == GOLDEN_NAME


def test_far_record_golden_vector_opens() -> None:
    head = FarSealer(bytes(range(32))).open(bytes(32), bytes.fromhex(GOLDEN_RECORD))
    room = bytearray(5)
    head.open_into(memoryview(room))
    assert (head.head, bytes(room)) == (RecordHead("chat", 0.5, 1.0, 5, b"meta"), b"hello")


GOLDEN_NAME = "cp1/57f476ca2aded2605e2cccd3823e3cba3cb94b79d3802fce4370cd7f1f56853d"
GOLDEN_RECORD = (
    "43504652010065c70b364b3d8f73eba53756062ab0ac2f000000ec3842a9b2bd865c06a35d5e438126f29c9ed0f598c4"
    "f3239336ee6c842951e997a6b82ce213a65a58c02073c9e6b40ee40cb3d39c07c9e3d1eab4d3a3fd2780ad45abf5"
)
