"""The reference store against the contract, and faults over it."""

from __future__ import annotations

import pytest
from time_limits import TimeLimits

from cornplug.codec import PayloadKind
from cornplug.errors import CodecError, StoreUnavailable
from cornplug.store.base import ReserveRefusal
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import NewPayload, get_payload, put_payload
from cornplug.testing import FaultyStore, StoreContract
from cornplug.testing.store import StoreStage, contains, fill, key_of, put, reserve


class _Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def stage(self) -> StoreStage:
        clock = _Clock()
        shared = MemoryStore(
            capacity_bytes=self.capacity_bytes,
            quarantine_s=5.0,
            reservation_s=30.0,
            reclaim_s=600.0,
            clock=clock,
        )
        return StoreStage(
            shared.connect,
            clock.advance,
            quarantine_s=5.0,
            reservation_s=30.0,
            reclaim_s=600.0,
            raw_view=lambda store, location: store.raw(location),  # type: ignore[attr-defined]
        )


@pytest.fixture
def faulty() -> FaultyStore:
    return FaultyStore(MemoryStore(capacity_bytes=1 << 20).connect())


def test_faulty_store_without_fault_behaves_alike(faulty: FaultyStore) -> None:
    assert put(faulty, b"x" * 1280, 1) == "stored"
    assert get_payload(faulty, key_of("e"), deadline_s=1) is not None
    assert faulty.calls == {"reserve": 1, "view": 2, "commit": 1, "lease": 1, "release": 1}


def test_faulty_store_unavailable_raises_its_reason(faulty: FaultyStore) -> None:
    faulty.unavailable = True
    with pytest.raises(StoreUnavailable) as e:
        contains(faulty, "a")
    assert e.value.reason == "store_down"


def test_faulty_store_slow_keeps_the_deadline(faulty: FaultyStore, within: TimeLimits) -> None:
    faulty.slow_s = 600.0
    with within(30), pytest.raises(StoreUnavailable) as e:
        faulty.stat(deadline_s=0.05)
    assert e.value.reason == "store_timeout"


def test_faulty_store_full_refuses_reservations(faulty: FaultyStore) -> None:
    faulty.full = True
    assert reserve(faulty, "a", 1) is ReserveRefusal.FULL
    assert put(faulty, b"x" * 128, 1) == "full"


def test_get_payload_corrupt_read_is_found(faulty: FaultyStore) -> None:
    assert put(faulty, b"x" * 1280, 1) == "stored"
    faulty.corrupt_reads = True
    with pytest.raises(CodecError):
        get_payload(faulty, key_of("e"), deadline_s=1)
    assert contains(faulty, "e") == b"\0"


def test_get_payload_header_of_another_key_is_dropped(faulty: FaultyStore) -> None:
    fill(faulty, "a", b"payload")
    with pytest.raises(CodecError):
        get_payload(faulty, key_of("a"), deadline_s=1)
    assert contains(faulty, "a") == b"\0"


def test_put_payload_failing_half_way_gives_its_room_back(faulty: FaultyStore) -> None:
    with pytest.raises(ValueError, match="equal segments"):
        put(faulty, b"x" * 1280, 3)
    payload = NewPayload(b"x", PayloadKind.FEATURE, key=key_of("a"), dtype="d" * 300, shape=(1,))
    with pytest.raises(CodecError):
        put_payload(faulty, payload, app="test", deadline_s=1.0)
    stat = faulty.stat(deadline_s=1)
    assert (stat.reservations, stat.bytes_by_app) == (0, {}), "its room is in quarantine"


def test_put_payload_lost_reservation_is_reported(
    faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulty.inner, "commit", lambda written, deadline_s: [False])
    assert put(faulty, b"x" * 1280, 1) == "lost"
