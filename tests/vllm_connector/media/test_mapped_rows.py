"""A worker's end of the memory of rows: copies in registered runs, places given back once they are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from collaborators import recorded

from cornplug.vllm_connector.kv_copies import registered_memory
from cornplug.vllm_connector.media.metadata import RowLocation, RowMemory
from cornplug.vllm_connector.media.worker import CpuCopies, MappedRows
from devkit.engines import wait_until

MIB = 1 << 20


class SlowCopies(CpuCopies):
    """Copies whose ends a test gives, and the pieces that they had."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.sources: list[list[int]] = []
        self.ended = 0

    def copy(self, runs: list[torch.Tensor], size_bytes: int) -> tuple[torch.Tensor, Any]:
        self.pieces.append([len(run) for run in runs])
        self.sources.append([run.data_ptr() for run in runs])
        there, _ = super().copy(runs, size_bytes)
        assert len(there) == size_bytes
        return there, len(self.pieces)

    def is_done(self, end: Any) -> bool:
        return int(end) <= self.ended

    def wait(self, end: Any) -> None:
        self.ended = max(self.ended, end)


@pytest.fixture
def memory() -> Iterator[RowMemory]:
    memory = RowMemory(1, capacity_bytes=256 * MIB)
    yield memory
    memory.close()


def written(memory: RowMemory, data: bytes) -> RowLocation:
    memory.record_mapped(0)
    found = memory.allocate(len(data))
    assert found is not None
    memory.view(found)[:] = data
    return found


def test_mapped_rows_are_a_copy(memory: RowMemory) -> None:
    rows = MappedRows(CpuCopies())
    assert rows.map_memory(memory.address)
    at = written(memory, b"abcdefgh")
    there = rows.copy_rows(at)
    memory.view(at)[:] = b"overhaul"
    assert bytes(there.numpy()) == b"abcdefgh"
    assert rows.take_copied() == [at.offset]
    assert rows.take_copied() == []
    rows.close()


def test_mapped_rows_out_of_reach_are_not_mapped(memory: RowMemory) -> None:
    pid, fd, inode = memory.address.split(":")
    assert not MappedRows(CpuCopies()).map_memory(f"{pid}:{fd}:{int(inode) + 1}")


def test_mapped_rows_place_is_given_back_after_its_copy_in_order(memory: RowMemory) -> None:
    copies = SlowCopies()
    rows = MappedRows(copies)
    assert rows.map_memory(memory.address)
    places = [written(memory, bytes([i]) * 100) for i in range(3)]
    for one in places:
        rows.copy_rows(one)
    assert rows.take_copied() == []
    copies.ended = 2
    assert rows.take_copied() == [one.offset for one in places[:2]]
    rows.close()
    assert copies.ended == 3, "closing waits"


def reaches(registered: registered_memory.RegisteredMemory, place: RowLocation) -> bool:
    return registered.can_access(b"rows", place.offset + place.size_bytes)


class Driver:
    """Registers at most `limit` bytes."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.runs: list[tuple[int, int]] = []
        self.limit = limit
        self.news = threading.Condition()

    def register(self, address: int, size: int) -> bool:
        with self.news:
            if sum(n for _, n in self.runs) + size > self.limit:
                return False
            self.runs.append((address, size))
            self.news.notify_all()
        return True

    def unregister(self, address: int) -> None:
        self.runs = [one for one in self.runs if one[0] != address]

    def wait(self, size_bytes: int) -> None:
        with self.news:
            assert self.news.wait_for(lambda: sum(n for _, n in self.runs) >= size_bytes, 30)


def test_mapped_rows_copies_follow_registered_runs(
    memory: RowMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registered_memory.RegisteredMemory.__init__, "__kwdefaults__", {
        "min_bytes": MIB, "max_bytes": 2 * MIB,
    })  # fmt: skip
    driver, copies = Driver(), SlowCopies()
    with recorded(registered_memory, "RegisteredMemory") as registered:
        rows = MappedRows(copies, driver.register, driver.unregister)
    assert rows.map_memory(memory.address)
    large = written(memory, bytes(range(256)) * (5 * MIB // 256))
    first = rows.copy_rows(large)
    driver.wait(4 * MIB)
    base = min(address for address, _ in driver.runs)
    assert copies.sources[0] != [base + large.offset], "not registered yet: other host memory"
    wait_until(lambda: reaches(registered[0], large), deadline_s=60, what="all registered")
    again = rows.copy_rows(large)
    assert torch.equal(first, again)
    assert len(copies.pieces[1]) > 1, "one copy a run"
    assert sum(copies.pieces[1]) == 5 * MIB
    assert copies.sources[1][0] == base + large.offset
    ends = {address + size for address, size in driver.runs}
    at = base + large.offset
    for piece in copies.pieces[1][:-1]:
        at += piece
        assert at in ends, "a copy ends where its run does"
    rows.close()
    assert driver.runs == [], "unregistered"


def test_mapped_rows_device_that_registers_nothing_copies_all_the_same(memory: RowMemory) -> None:
    rows = MappedRows(CpuCopies(), lambda *_: False)
    assert rows.map_memory(memory.address)
    at = written(memory, b"x" * (65 * MIB))
    for _ in range(2):
        assert bytes(rows.copy_rows(at)[:3].numpy()) == b"xxx"
    assert rows.take_copied() == [at.offset, at.offset]
    rows.close()
