"""Engines whose GPU copies pages to and from the store's memory by itself."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from keyed_store import KeyedStore

pytest.importorskip("triton")

from cornplug.store.base import PayloadLocation, encode_location
from cornplug.store.memory import MemoryConnection, MemoryStore
from cornplug.vllm_connector.kv import arena_moves
from cornplug.vllm_connector.kv.arena_moves import open_arena
from cornplug.vllm_connector.kv_copies.block_copies import CpuBackend
from cornplug.vllm_connector.kv_copies.cache_blocks import BlockSizes, CacheBlocks

from ..conftest import open_in
from ..late_arena import HostRanges, LateArena, NumpyChecksums
from ..rig import Engine

PROMPT = [(7 * i) % 251 for i in range(150)]  # 4 whole pages of 32, and 22 tokens
PAGE_BYTES = 4 * 4 * 2 * 32 * 8 * 4

Make = Callable[..., Engine]


class FewRanges(HostRanges):
    """A device that takes half of the pages' memory."""

    def register(self, address: int, size: int) -> bool:
        return len(self.ranges) < 3 and super().register(address, size)


def arenas(engine: Engine) -> list[LateArena]:
    """Copies of each rank."""
    return [rank.arena for rank in engine.ranks]


def batches(engine: Engine) -> list[list[int]]:
    """Sizes of the copies of each batch of its first rank."""
    arena = arenas(engine)[0]
    return [*arena.out_batch.calls, *arena.into_batch.calls]


def no_cpu_copies(engine: Engine) -> bool:
    """Whether no page was copied through staging memory."""
    return ("staged_pages",) not in engine.counts


@pytest.mark.parametrize("reader", [{}, {"tp": 2}, {"tp": 8}, {"block_size": 64}, {"pp": 2}])
@pytest.mark.parametrize("writer", [{}, {"tp": 2}, {"pp": 2}, {"second_runner": True}])
def test_arena_pages_are_those_of_every_other_engine(
    engine: Make, store: MemoryStore, writer: Any, reader: Any
) -> None:
    """Byte for byte: what a GPU wrote and summed a CPU reads and verifies, and the reverse."""
    first = engine(accelerator="arena", **writer)
    first.run("a", PROMPT)
    assert no_cpu_copies(first)
    assert first.counts["saves", "kv_page", "stored"] == 4
    assert engine(**reader).run("b", PROMPT).external_tokens == 128
    engine(**reader).run("c", PROMPT[1:])
    second = engine(accelerator="arena", **writer)
    request = second.run("d", PROMPT[1:])
    assert no_cpu_copies(second) or reader.get("pp", 1) != writer.get("pp", 1)
    assert request.external_tokens == 128
    assert second.counts["hits", "kv_page", "store"] == 4
    assert second.counts["bytes", "kv_page", "load"] == 4 * PAGE_BYTES
    assert open_in(store) == (0, 0)


def test_arena_save_and_load_are_one_batch_of_a_run_a_page(engine: Make) -> None:
    first, second = engine(accelerator="arena"), engine(accelerator="arena")
    first.run("a", PROMPT)
    second.run("b", PROMPT)
    for one in (first, second):
        assert no_cpu_copies(one)
        (sizes,) = batches(one)
        assert sum(sizes) == 4 * PAGE_BYTES
        # The rig's device has registered 5 pages of memory at once, each run of them is copied by itself.
        assert len(sizes) <= 4 + 4 * PAGE_BYTES // (5 * 4096)


@pytest.mark.parametrize("pages", [1, 2])
def test_arena_saves_of_many_slabs_are_stored(engine: Make, pages: int) -> None:
    first, second = engine(accelerator="arena", blocks=128), engine(accelerator="arena", blocks=128)
    for arena in arenas(first) + arenas(second):
        arena.out.slab_pages = arena.into.slab_pages = pages
    prompt = [(3 * i) % 251 for i in range(650)]  # 20 pages
    first.run("a", prompt)
    assert len(batches(first)) == 20 // pages
    assert second.run("b", prompt).external_tokens == 640
    assert len(batches(second)) == 20 // pages


@pytest.mark.parametrize("nth", [0, 2, 3])
def test_arena_load_of_corrupt_page_recomputes_and_saves_it(
    engine: Make, store: KeyedStore, nth: int
) -> None:
    engine(accelerator="arena").run("a", PROMPT)
    store.damage(nth)
    second = engine(accelerator="arena")
    request = second.run("b", PROMPT)
    assert request.failed
    assert second.counts["misses", "kv_page", "corrupt"] == 1
    assert second.counts["saves", "kv_page", "stored"] == 4 - nth
    assert engine().run("c", PROMPT).external_tokens == 128
    assert open_in(store) == (0, 0)


def test_arena_step_waits_for_no_copy(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a request run before its load has ended."""
    engine().run("a", PROMPT)
    second = engine(accelerator="arena")
    (arena,) = arenas(second)
    done = False
    device = arena.into.backend
    monkeypatch.setattr(device, "is_done", lambda end: done and (device.wait(end) or True))
    monkeypatch.setattr(arena.into, "release_slab", lambda slab: None)
    request = second.add("b", PROMPT)
    for _ in range(4):
        second.step()
        assert request.status == "loading"
    done = True
    second.settle()
    second.check(request)
    assert request.external_tokens == 128


def test_arena_save_of_preempted_request_is_given_up(engine: Make, store: MemoryStore) -> None:
    first = engine(accelerator="arena")
    request = first.add("a", PROMPT)
    first.step()
    first.preempt(request)  # the rig overwrites its blocks at once
    first.settle()
    first.check(request)
    assert first.counts["saves", "kv_page", "preempted"] == 4
    for token in range(3):
        request.all_token_ids.append(token)
        first.step()
    first.settle()
    assert engine().run("b", PROMPT).external_tokens == 128
    assert open_in(store) == (0, 0)


def test_arena_save_into_ended_reservation_writes_nothing(engine: Make, store: MemoryStore) -> None:
    first = engine(accelerator="arena")
    first.add("a", PROMPT)
    step = first.schedule()
    for save in step.meta.saves:
        for page in save.pages:
            store.fences.free_slot(page.location.fence)
    first.update(first.execute(step))
    assert not batches(first)
    first.settle()
    assert first.counts["saves", "kv_page", "write_failed"] == 4


def test_arena_load_past_deadline_is_recomputed(
    engine: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine().run("a", PROMPT)
    second = engine(accelerator="arena")
    (arena,) = arenas(second)
    arena.into.slab_pages = 1
    begin, begun = arena.into.begin_copy_in, list[Any]()

    def slow(*args: Any) -> Any:
        begun.append(args)
        object.__setattr__(load, "deadline_s", -1.0)
        return begin(*args)

    monkeypatch.setattr(arena.into, "begin_copy_in", slow)
    second.add("b", PROMPT)
    step = second.schedule()
    (load,) = step.meta.loads
    second.update(second.execute(step))
    second.settle()
    assert len(begun) == 1
    assert second.counts["misses", "kv_page", "load_timeout"] == 1
    second.check(second.requests["b"])
    assert open_in(store) == (0, 0)


def test_arena_copy_error_ends_load_and_save(engine: Make, store: MemoryStore) -> None:
    engine().run("a", PROMPT[:70])
    second = engine(accelerator="arena")
    (arena,) = arenas(second)
    arena.into_batch.error = arena.out_batch.error = RuntimeError("CUDA out of memory")
    request = second.run("b", PROMPT)
    assert request.failed
    assert second.counts["misses", "kv_page", "load_error"] == 1
    assert second.counts["saves", "kv_page", "write_failed"] == 2
    second.finish(request)
    second.settle()
    assert not second.requests
    assert open_in(store) == (0, 0)


def test_arena_pages_beyond_registered_memory_pass_staging(engine: Make, store: MemoryStore) -> None:
    """A save may have pages of both kinds; a load is of one."""
    first, second = (engine(accelerator="arena", ranges=FewRanges) for _ in range(2))
    first.run("a", PROMPT)
    assert 0 < sum(map(sum, batches(first))) < 4 * PAGE_BYTES
    assert first.counts["saves", "kv_page", "stored"] == 4
    assert second.run("b", PROMPT).external_tokens == 128
    assert not batches(second)
    assert 0 < first.counts[("staged_pages",)] < 4
    assert second.counts[("staged_pages",)] == 4
    assert open_in(store) == (0, 0)


def test_arena_of_replaced_store_is_left(
    engine: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor's pages go their way; the old memory is unregistered once no copy is under way."""
    connections = list[MemoryConnection]()

    def connect() -> MemoryConnection:
        connections.append(store.connect())
        return connections[-1]

    first = engine(accelerator="arena", connect=connect)
    (arena,) = arenas(first)
    first.run("a", PROMPT)
    memory, ranges = arena.moves.memory, arena.ranges
    old = set(ranges.ranges)
    assert old
    other = MemoryStore(capacity_bytes=8 << 20)
    # The connection that the rank has made last.
    monkeypatch.setattr(connections[-1], "arena_memory", other.connect().arena_memory)
    assert not memory.can_access(bytes(16), 1)
    assert memory.can_access(other.index.arena_id, 4096)
    arena.moves.poll()
    end_s = time.monotonic() + 60
    while set(ranges.gone) != old:
        assert time.monotonic() < end_s, "the old memory stays registered"
        time.sleep(0.001)
    assert ranges.ranges
    assert not old & set(ranges.ranges)


def test_arena_close_waits_for_copies_under_way(engine: Make, store: MemoryStore) -> None:
    first = engine(accelerator="arena")
    first.add("a", PROMPT)
    first.execute(first.schedule())
    (arena,) = arenas(first)
    assert arena.out_device.pending
    first.ranks[0].connector.shutdown()
    assert not arena.out_device.pending
    assert not arena.ranges.ranges
    assert arena.ranges.gone


# -- at start ---------------------------------------------------------------------------------


@pytest.fixture
def opened(engine: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`open_arena` for the caches of an engine on the CPU, with copies by `memmove`."""
    pages, reports, blocks = arenas(engine(accelerator="arena"))[0].rank
    made: list[Any] = []

    def batch(sources: Any, targets: Any, sizes: Any, is_src_access_order_any: bool = False) -> None:
        for source, target, size in zip(*(one.tolist() for one in (sources, targets, sizes)), strict=True):
            ctypes.memmove(target, source, size)

    monkeypatch.setattr(arena_moves, "CudaBackend", lambda device, urgent=False: CpuBackend())
    monkeypatch.setattr(arena_moves, "DeviceChecksums", lambda device: NumpyChecksums())
    monkeypatch.setattr(arena_moves, "swap_blocks_batch", batch)

    def open_(**how: Any) -> Any:
        made.append(
            open_arena(
                pages, reports, blocks, other_group=how.pop("beside", None), slab_share=1.0,
                sizes=BlockSizes(16, 16), discard=lambda keys: None,
            )
        )  # fmt: skip
        return made[-1]

    yield open_
    for one in made:
        if one is not None:
            one.close()


def test_open_arena_beside_another_group_shares_its_memory(opened: Callable[..., Any]) -> None:
    first = opened()
    assert first is not None
    assert opened(beside=first).memory is first.memory


@pytest.mark.parametrize("fault", ["copies", "raises"])
def test_open_arena_where_device_copies_wrong_is_refused_with_reason(
    opened: Callable[..., Any], fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def copy(*args: Any, **kwargs: Any) -> None:
        if fault == "raises":
            raise RuntimeError("no such driver")

    monkeypatch.setattr(arena_moves, "swap_blocks_batch", copy)
    with caplog.at_level(logging.WARNING):
        assert opened() is None
    (record,) = caplog.records
    assert "staging memory" in record.getMessage()


def test_open_arena_of_odd_layers_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    pages: Any = SimpleNamespace(page=SimpleNamespace(layer_bytes=1536))
    blocks: CacheBlocks = SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        found = open_arena(
            pages, SimpleNamespace(), blocks, other_group=None, slab_share=1.0, sizes=BlockSizes(16, 16),  # type: ignore[arg-type]
            discard=lambda keys: None,
        )  # fmt: skip
    assert found is None
    assert "1536 bytes" in caplog.text


def test_arena_location_layout_is_the_stores(engine: Make) -> None:
    """The layout of `Leases.locations`, on which `can_load` relies."""
    assert encode_location(PayloadLocation(bytes(16), 3, 5, 7)) == b"".join(
        n.to_bytes(8, "little") for n in (3, 5, 7)
    )
