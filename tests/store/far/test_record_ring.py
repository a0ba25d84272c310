"""Records in a ring: what is found is what was put, and the oldest make room."""

from __future__ import annotations

import threading

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cornplug.store.far import nixl_agent
from cornplug.store.far.nixl_agent import RecordRing

ROOM = 64
Step = tuple[str, int]
steps = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, ROOM)), max_size=40)


def record(name: str, number: int, size: int) -> bytes:
    return bytes((name.encode()[0] * 31 + number + i) % 256 for i in range(size))


@given(steps)
@example([("c", 0), ("a", 1), ("b", ROOM)])
def test_record_ring_has_only_whole_records_and_always_the_newest(made: list[Step]) -> None:
    room = memoryview(bytearray(ROOM))
    ring, newest = RecordRing(room), dict[str, bytes]()
    for number, (name, size) in enumerate(made):
        newest[name] = record(name, number, size)
        ring.put(name, newest[name])
        assert ring.get(name) == newest[name]
        for other, expected in newest.items():
            assert ring.get(other) in (expected, None)
            assert (other in ring) == (ring.get(other) is not None)


@given(st.lists(st.integers(0, 99), unique=True, max_size=20))
def test_record_ring_holds_the_last_records_that_fit(names: list[int]) -> None:
    ring = RecordRing(memoryview(bytearray(ROOM)))
    for name in names:
        ring.put(str(name), record("a", name, 16))
    assert [name for name in names if str(name) in ring] == names[-ROOM // 16 :]


def test_record_ring_deleted_record_is_absent_and_its_room_is_used_again() -> None:
    ring = RecordRing(memoryview(bytearray(ROOM)))
    ring.put("a", b"x" * ROOM)
    ring.delete("a")
    ring.delete("never there")
    assert "a" not in ring
    assert ring.get("a") is None
    ring.put("b", b"y" * ROOM)
    assert ring.get("b") == b"y" * ROOM


def test_record_ring_record_that_is_larger_than_its_room_is_refused_and_costs_nothing() -> None:
    ring = RecordRing(memoryview(bytearray(ROOM)))
    ring.put("a", b"kept")
    with pytest.raises(ValueError, match="a record of 65 bytes exceeds the memory of 64 bytes"):
        ring.put("b", bytes(ROOM + 1))
    assert ring.get("a") == b"kept"


@pytest.mark.parametrize("deleted", [False, True])
def test_record_ring_held_bytes_are_not_written_over(deleted: bool) -> None:
    room = memoryview(bytearray(ROOM))
    ring = RecordRing(room)
    ring.put("a", b"x" * ROOM)
    with ring.hold("a") as place:
        assert place == (0, ROOM)
        if deleted:
            ring.delete("a")
        writing = threading.Thread(target=ring.put, args=("b", b"y" * ROOM))
        writing.start()
        writing.join(0.1)
        assert writing.is_alive()
        assert bytes(room) == b"x" * ROOM
    writing.join(60)
    assert ring.get("b") == b"y" * ROOM


def test_record_ring_put_gives_up_on_bytes_that_stay_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_OVERWRITE_TIMEOUT_S", 0.05)
    room = memoryview(bytearray(ROOM))
    ring = RecordRing(room)
    ring.put("a", b"x" * ROOM)
    with ring.hold("a"), pytest.raises(TimeoutError, match="has taken"):
        ring.put("b", b"y")
    assert bytes(room) == b"x" * ROOM
    assert "b" not in ring
