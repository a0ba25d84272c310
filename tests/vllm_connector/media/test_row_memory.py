"""Memory of rows: room once all ranks have mapped it, taken back once all have copied."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cornplug.store.arena import ALIGN
from cornplug.vllm_connector.media import metadata as module
from cornplug.vllm_connector.media.metadata import RowLocation, RowMemory, create_row_memory, map_row_memory

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[RowMemory]:
    memory = RowMemory(2, capacity_bytes=4 * MIB)
    yield memory
    memory.close()


def mapped_by_all(memory: RowMemory) -> RowMemory:
    for rank in (0, 1):
        memory.record_mapped(rank)
    return memory


def place(memory: RowMemory, size_bytes: int) -> RowLocation:
    found = memory.allocate(size_bytes)
    assert found is not None
    return found


def test_row_memory_one_unmapped_rank_gets_no_room(memory: RowMemory) -> None:
    assert memory.allocate(64) is None
    assert memory.address
    memory.record_mapped(1)
    assert memory.allocate(64) is None
    assert memory.address
    memory.record_mapped(1)
    assert memory.allocate(64) is None, "one rank twice is not two"
    memory.record_mapped(0)
    assert memory.allocate(64) is not None
    assert memory.address == "", "nobody needs it any more"


def test_row_memory_place_is_free_once_every_rank_has_copied_it(memory: RowMemory) -> None:
    mapped_by_all(memory)
    whole = place(memory, 4 * MIB)
    assert memory.allocate(1) is None
    memory.mark_sent(whole)
    memory.record_copied(0, whole.offset)
    memory.record_copied(0, whole.offset)
    assert memory.allocate(1) is None, "rank 1 still reads it"
    memory.record_copied(7, whole.offset)
    assert memory.allocate(1) is None, "a rank of another stage is not asked"
    memory.record_copied(1, whole.offset)
    assert place(memory, 4 * MIB) == whole


def test_row_memory_report_of_an_earlier_place_frees_no_later_one(memory: RowMemory) -> None:
    mapped_by_all(memory)
    first = place(memory, 64)
    memory.mark_sent(first)
    for rank in (0, 1):
        memory.record_copied(rank, first.offset)
    second = place(memory, 64)
    assert second == first
    memory.record_copied(0, first.offset)
    memory.mark_sent(second)
    memory.record_copied(1, first.offset)
    third = place(memory, 64)
    assert third.offset != second.offset, "rank 0 has not copied the second one"


def test_row_memory_dropped_place_is_free_at_once(memory: RowMemory) -> None:
    mapped_by_all(memory)
    memory.free(place(memory, 3 * MIB))
    assert memory.allocate(4 * MIB) is not None


def test_row_memory_places_are_aligned_and_apart(memory: RowMemory) -> None:
    mapped_by_all(memory)
    places = [place(memory, size) for size in (1, 65, 128, 4096)]
    for one in places:
        assert one.offset % ALIGN == 0
        memory.view(one)[:] = bytes([places.index(one) + 1]) * one.size_bytes
    for i, one in enumerate(places):
        assert bytes(memory.view(one)) == bytes([i + 1]) * one.size_bytes


def test_row_memory_without_room_says_so(memory: RowMemory) -> None:
    mapped_by_all(memory)
    assert memory.allocate(4 * MIB + 1) is None
    assert memory.allocate(0) is None


def test_row_memory_in_another_process_holds_the_rows(memory: RowMemory) -> None:
    address = memory.address
    mapped_by_all(memory)
    at = place(memory, 5)
    memory.view(at)[:] = b"rows!"
    code = (
        "import sys; from cornplug.vllm_connector.media.metadata import map_row_memory; "
        f"print(bytes(map_row_memory(sys.argv[1])[{at.offset}:{at.offset + 5}]).decode())"
    )
    done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True, check=False)
    assert done.stdout.split()[-1:] == ["rows!"], done.stderr


def test_row_memory_that_is_another_file_is_not_mapped(memory: RowMemory) -> None:
    pid, fd, inode = memory.address.split(":")
    with open(os.devnull, "rb") as other:
        assert map_row_memory(f"{pid}:{other.fileno()}:{inode}") is None
    assert map_row_memory(f"{pid}:{fd}:{int(inode) + 1}") is None
    assert map_row_memory(f"{1 << 22}:{fd}:{inode}") is None, "no such process, as in another PID namespace"
    assert map_row_memory(memory.address) is not None


def config(backend: str, device: str, **degrees: int) -> Any:
    parallel = {"tensor_parallel_size": 1, "prefill_context_parallel_size": 1, **degrees}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend=backend, **parallel),
        device_config=SimpleNamespace(device_type=device),
    )


def test_row_memory_of_one_process_on_cpu_is_none() -> None:
    assert create_row_memory(config("uni", "cpu")) is None


@pytest.mark.parametrize(
    ("backend", "device", "tp", "pcp"), [("uni", "cuda", 1, 1), ("mp", "cpu", 2, 1), ("ray", "cuda", 2, 2)]
)
def test_row_memory_waits_for_ranks_of_the_first_stage(backend: str, device: str, tp: int, pcp: int) -> None:
    memory = create_row_memory(
        config(backend, device, tensor_parallel_size=tp, prefill_context_parallel_size=pcp)
    )
    assert memory is not None
    for rank in range(tp * pcp):
        assert memory.allocate(64) is None
        memory.record_mapped(rank)
    assert memory.allocate(64) is not None
    memory.close()


def test_row_memory_that_kernel_refuses_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(module, "create_sealed_memory", refused)
    assert create_row_memory(config("mp", "cpu")) is None
