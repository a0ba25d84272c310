"""The store's memory and the device: registered as far as the store has pages, by a thread, in runs."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from collaborators import recorded

from cornplug.engine_common.runtime import NullStore
from cornplug.errors import StoreUnavailable
from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector.kv_copies import registered_memory
from cornplug.vllm_connector.kv_copies.registered_memory import RegisteredMemory

PAGE = mmap.PAGESIZE


class Device:
    """What a driver was asked for."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []
        self.refuses_after = 1 << 30
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.go.set()

    def register(self, address: int, size: int) -> bool:
        assert self.go.wait(10)
        self.threads.add(threading.current_thread().name)
        if len(self.registered) >= self.refuses_after:
            return False
        self.registered.append((address, size))
        return True

    def unregister(self, address: int) -> None:
        (one,) = [one for one in self.registered if one[0] == address]
        self.registered.remove(one)


class Rig:
    def __init__(self, **how: Any) -> None:
        self.device, self.stores = Device(), [MemoryStore(capacity_bytes=64 * PAGE)]
        self.entered: list[str] = []
        with recorded(registered_memory, "ThreadPoolExecutor") as threads:
            self.memory = RegisteredMemory(
                self,  # type: ignore[arg-type]
                self.device.register,
                self.device.unregister,
                lambda: self.entered.append(threading.current_thread().name),
                **({"min_bytes": 4 * PAGE, "max_bytes": 8 * PAGE} | how),
            )
        self.thread = threads[0]
        self.idle = True
        self._is_idle = lambda: self.idle
        self.memory.add_user(self._is_idle)

    def arena_memory(self, arena_id: bytes) -> memoryview | None:
        return self.stores[-1].connect().arena_memory(arena_id)

    @property
    def arena_id(self) -> bytes:
        return self.stores[-1].index.arena_id

    @property
    def address(self) -> int:
        view = self.arena_memory(self.arena_id)
        assert view is not None
        return int(np.frombuffer(view, np.uint8).ctypes.data)

    def reaches(self, end: int) -> bool:
        return self.memory.can_access(self.arena_id, end)

    def settle(self) -> None:
        self.thread.submit(lambda: None).result(60)

    def leave(self) -> None:
        self.memory.remove_user(self._is_idle)


@pytest.fixture
def rig() -> Iterator[Rig]:
    one = Rig()
    yield one
    one.device.go.set()
    one.leave()


def test_registered_memory_follows_locations_and_never_leads(rig: Rig) -> None:
    """A page that the daemon has not set aside yet would be one of this process's."""
    assert not rig.reaches(PAGE)
    assert not rig.reaches(6 * PAGE - 1)
    rig.settle()
    assert sum(size for _, size in rig.device.registered) == 5 * PAGE
    assert rig.reaches(5 * PAGE)
    assert not rig.reaches(6 * PAGE)
    assert rig.device.registered[0][0] == rig.address


def test_registered_memory_small_growth_waits(rig: Rig) -> None:
    assert not rig.reaches(3 * PAGE)
    rig.settle()
    assert not rig.device.registered
    assert not rig.reaches(4 * PAGE)
    rig.settle()
    assert rig.reaches(4 * PAGE)


def test_registered_memory_of_grown_store_is_bounded_runs(rig: Rig) -> None:
    assert not rig.reaches(20 * PAGE)
    rig.settle()
    assert [size // PAGE for _, size in rig.device.registered] == [8, 8, 4]
    base = rig.address
    assert rig.memory.byte_ranges(rig.arena_id, 7 * PAGE, 10 * PAGE) == [
        (base + 7 * PAGE, PAGE),
        (base + 8 * PAGE, 8 * PAGE),
        (base + 16 * PAGE, PAGE),
    ]
    assert rig.memory.byte_ranges(rig.arena_id, 8 * PAGE, 8 * PAGE) == [(base + 8 * PAGE, 8 * PAGE)]
    with pytest.raises(StoreUnavailable):
        rig.memory.byte_ranges(rig.arena_id, 16 * PAGE, 5 * PAGE)


def test_registered_memory_is_asked_without_waiting(rig: Rig) -> None:
    rig.device.go.clear()
    for end in range(4, 12):
        assert not rig.reaches(end * PAGE)
    rig.device.go.set()
    rig.settle()
    rig.settle()
    assert rig.reaches(8 * PAGE)
    assert rig.device.threads == set(rig.entered)
    assert len(rig.entered) == 1
    assert rig.entered != [threading.current_thread().name]


def test_registered_memory_refused_is_said_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.device.refuses_after = 1
    with caplog.at_level(logging.WARNING):
        assert not rig.reaches(16 * PAGE)
        rig.settle()
        assert rig.reaches(8 * PAGE)
        assert not rig.reaches(40 * PAGE)
        rig.settle()
    assert len(caplog.records) == 1
    assert not rig.reaches(9 * PAGE)


def test_registered_memory_of_ended_store_stays_while_copies_run(rig: Rig) -> None:
    assert not rig.reaches(8 * PAGE)
    rig.settle()
    first = rig.arena_id
    rig.stores.append(MemoryStore(capacity_bytes=64 * PAGE))
    assert not rig.reaches(4 * PAGE)
    with pytest.raises(StoreUnavailable):
        rig.memory.byte_ranges(first, 0, PAGE)
    rig.settle()
    rig.idle = False
    rig.memory.unregister_previous()
    rig.settle()
    assert len(rig.device.registered) == 2
    rig.idle = True
    rig.memory.unregister_previous()
    rig.settle()
    assert [address for address, _ in rig.device.registered] == [rig.address]
    # A late question for the old one changes nothing.
    assert not rig.memory.can_access(first, PAGE)
    assert rig.reaches(4 * PAGE)


def test_registered_memory_last_user_unregisters_all() -> None:
    rig = Rig()
    other = lambda: True  # noqa: E731
    rig.memory.add_user(other)
    rig.reaches(20 * PAGE)
    rig.settle()
    rig.memory.remove_user(other)
    assert rig.device.registered
    rig.leave()
    assert not rig.device.registered


def test_registered_memory_of_store_without_mapping_reaches_nothing() -> None:
    memory = RegisteredMemory(NullStore("off"), lambda *_: True, lambda _: None, lambda: None)
    assert not memory.can_access(bytes(16), PAGE)
