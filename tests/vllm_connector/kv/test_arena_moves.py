"""Engines whose GPU copies pages to and from the store's memory by itself."""

from __future__ import annotations

import ctypes
import logging
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
from keyed_store import KeyedStore

pytest.importorskip("triton")

from cornplug.engine_common.rank_pages import RankPages, page_header
from cornplug.kv_page import PageGeometry, RankSlice
from cornplug.store.base import Leases, PayloadLocation, encode_location
from cornplug.store.memory import MemoryConnection, MemoryStore
from cornplug.vllm_connector.kv import arena_moves
from cornplug.vllm_connector.kv.arena_moves import ArenaTransfers, SharedDevice, open_arena
from cornplug.vllm_connector.kv.metadata import PageLoad, PageSave, PageWrite, TransferReports
from cornplug.vllm_connector.kv.worker import KVWorker
from cornplug.vllm_connector.kv_copies.block_copies import CpuBackend
from cornplug.vllm_connector.kv_copies.cache_blocks import BlockSizes, CacheBlocks
from cornplug.vllm_connector.kv_copies.mover import ByteBudget, PolledMover

from ..conftest import open_in
from ..late_arena import HostRanges, LateArena, NumpyChecksums
from ..rig import Engine

PROMPT = [(7 * i) % 251 for i in range(150)]  # 4 whole pages of 32, and 22 tokens
PAGE_BYTES = 4 * 4 * 2 * 32 * 8 * 4

NO_FALLBACK: Any = None

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
    """Only those: the device copies the other pages of a save and of a load."""
    first, second = (engine(accelerator="arena", ranges=FewRanges) for _ in range(2))
    first.run("a", PROMPT)
    assert first.counts["saves", "kv_page", "stored"] == 4
    assert second.run("b", PROMPT).external_tokens == 128
    for one in (first, second):
        assert 0 < sum(map(sum, batches(one))) < 4 * PAGE_BYTES
        assert 0 < one.counts[("staged_pages",)] < 4
    assert second.counts["bytes", "kv_page", "load"] == 4 * PAGE_BYTES
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


# -- how much in a step -----------------------------------------------------------------------

LLAMA_8B: Final = PageGeometry(page_tokens=64, heads=8, layers=32, dim=128, dtype="bfloat16")
"""Pages of 8 MiB."""


class InstantCopies:
    """Copies of a GPU that take no time."""

    page_bytes, slab_pages = LLAMA_8B.page_bytes, 4

    def __init__(self) -> None:
        self.in_step = 0
        """Slabs that this step has begun."""

    def begin_copy_out(self, pages: Any, ranges: Any, segment_bytes: int, mark: Any) -> Any:
        return self._slab(sum(len(indices) for _, indices in pages))

    def begin_copy_in(self, table: Any, pages: range, *_: Any) -> Any:
        return self._slab(len(pages))

    def _slab(self, pages: int) -> Any:
        self.in_step += 1
        sums = np.ones(pages * LLAMA_8B.segments, np.uint64)
        return SimpleNamespace(is_done=lambda: True, wait=lambda: None, checksums=lambda: sums)

    def release_slab(self, slab: Any) -> None:
        """The next one needs no memory."""


class InstantGpu:
    """The direct copies of one rank of an 8B model, whose prompts have `pages` pages."""

    def __init__(self, pages: int) -> None:
        store: Any = SimpleNamespace(
            are_writable=lambda locations: [True] * len(locations),
            arena_memory=lambda _: memoryview(bytearray(64)),
        )
        held = RankSlice(heads=range(8), layers=range(32), writes=True)
        self.rank = RankPages(LLAMA_8B, held, store)
        self.reports, self.copies, self.now_s = TransferReports(self.rank, 16), InstantCopies(), 0.0
        memory: Any = SimpleNamespace(
            can_access=lambda *_: True, split_ranges=lambda arena_id, ranges: ranges,
            add_user=lambda _: None, remove_user=lambda _: None, unregister_previous=lambda: None,
        )  # fmt: skip
        mover = PolledMover(ByteBudget(50e9, lambda: self.now_s))
        both: Any = self.copies, self.copies
        self.moves = ArenaTransfers(
            self.rank, self.reports, SharedDevice(memory, mover), both,
            sizes=BlockSizes(16, 16), fallback=NO_FALLBACK,
        )  # fmt: skip
        self.places = [PayloadLocation(bytes(16), i * 8 << 20, 8 << 20, 1) for i in range(pages)]
        header = page_header(bytes(32), LLAMA_8B, dict.fromkeys(range(LLAMA_8B.segments), 1))
        located = b"".join(map(encode_location, self.places))
        self.leases = Leases(bytes(16), [bytes(32)] * pages, [header] * pages, located, range(pages))
        self.blocks = array("q", range(4 * pages))

    def begin_step(self) -> None:
        """The steps of a busy engine take 10 ms."""
        self.now_s += 0.01
        self.copies.in_step = 0
        self.moves.mover.budget.begin_step(computes=True)

    def load(self, name: str) -> None:
        self.moves.load(PageLoad(name, 0, len(self.places) * 64, 0, self.leases, self.blocks), None)

    def save(self, name: str) -> None:
        writes = tuple(PageWrite(i, i, place) for i, place in enumerate(self.places))
        self.moves.save(self.reports.begin_saves([PageSave(name, writes, tuple(self.blocks))]), None)


@pytest.mark.parametrize("how", ["load", "save"])
def test_arena_moves_1280_mib_in_three_steps(how: str) -> None:
    gpu = InstantGpu(160)
    gpu.begin_step()
    getattr(gpu, how)("a")
    gpu.moves.poll()
    for _ in range(2):
        assert gpu.copies.in_step <= 16, "more than the bus copies in a step"
        gpu.begin_step()
        gpu.moves.poll()
    assert gpu.moves.mover.is_idle()
    acks = gpu.reports.take_acks()
    assert acks is not None
    assert not acks.failed_loads
    assert not acks.failed_writes
    assert len(acks.written) == (160 if how == "save" else 0)


def test_arena_loads_of_fifty_hits_take_the_engine_5_ms_at_most() -> None:
    """The bytes of a step are bounded however many requests load; the first ones end first."""
    gpu, seconds = InstantGpu(32), []
    for _ in range(5):
        gpu.begin_step()
        began_s = time.thread_time()
        for i in range(50):
            gpu.load(str(i))
        gpu.moves.poll()
        seconds.append(time.thread_time() - began_s)
        assert gpu.copies.in_step <= 16
        ended = gpu.reports.take_finished()
        assert ended == ["0", "1"]
        gpu.moves.drain()
        assert len(gpu.reports.take_finished()) == 48
    assert min(seconds) < 0.005


def test_arena_saves_go_on_beside_loads_of_many_steps() -> None:
    gpu = InstantGpu(32)
    for i in range(50):
        gpu.load(str(i))
    gpu.save("a")
    for _ in range(9):
        gpu.begin_step()
        gpu.moves.poll()
    assert not gpu.moves.mover.is_idle()
    acks = gpu.reports.take_acks()
    assert acks is not None
    assert len(acks.written) == 32


@pytest.mark.parametrize(
    ("step_s", "mib"),
    [(0.001, 64), (0.005, 238), (0.01, 476), (0.05, 512), (0.1, 953), (1.0, 512), (None, 512)],
)
def test_byte_budget_is_what_the_bus_copies_in_the_last_step(step_s: float | None, mib: int) -> None:
    """None: the step computes nothing. A second between two steps is a pause."""
    now_s = 0.0
    budget = ByteBudget(50e9, lambda: now_s)
    budget.begin_step(computes=True)
    now_s = step_s or 0.0
    budget.begin_step(computes=step_s is not None)
    assert begun(budget) == pytest.approx(mib, abs=8)
    budget.start(1, "save")
    assert not budget.has_room("save")


def begun(budget: ByteBudget) -> int:
    """MiB that a step may begin to load. A slab counts for 8 MiB at least."""
    slabs = 0
    while budget.has_room("load"):
        budget.start(1, "load")
        slabs += 1
    for _ in range(slabs):
        budget.end(1, "load")
    return 8 * slabs


def test_byte_budget_of_long_steps_is_no_pauses() -> None:
    now_s = 0.0
    budget = ByteBudget(50e9, lambda: now_s)
    found = []
    for _ in range(4):
        budget.begin_step(computes=True)
        found.append(begun(budget))
        now_s += 0.8
    assert found[:2] == [512, 512]
    assert found[2:] == pytest.approx([2384, 2384], abs=8)


def test_arena_saves_that_wait_for_the_budget_come_before_later_ones() -> None:
    gpu = InstantGpu(160)
    gpu.begin_step()
    gpu.save("a")
    gpu.begin_step()
    gpu.moves.poll()
    gpu.save("b")
    gpu.moves.poll()
    assert {one.save.name for one in gpu.reports._open_saves} == {"a", "b"}
    gpu.begin_step()
    gpu.moves.poll()
    assert {one.save.name for one in gpu.reports._open_saves} == {"b"}


def test_arena_drain_ends_after_an_error_of_the_device() -> None:
    """The budget's bytes are those of no copy then, and other loads end."""
    gpu = InstantGpu(160)
    gpu.begin_step()

    def fail(*_: Any) -> None:
        raise RuntimeError("an illegal memory access")

    slab = SimpleNamespace(is_done=lambda: False, wait=fail, checksums=lambda: np.ones(0))
    gpu.copies._slab, gpu.copies.release_slab = lambda pages: slab, fail  # type: ignore[method-assign]
    for name in ("a", "b", "c"):
        gpu.load(name)
    gpu.moves.drain()
    assert sorted(gpu.reports.take_finished()) == ["a", "b", "c"]
    assert gpu.moves.mover.is_idle()
    gpu.begin_step()
    assert begun(gpu.moves.mover.budget) == 512


def test_arena_load_whose_pages_alternate_is_staged_as_a_whole() -> None:
    gpu, staged = InstantGpu(64), list[PageLoad]()
    gpu.moves._fallback = SimpleNamespace(stage_load=lambda load, mark: staged.append(load))  # type: ignore[assignment]
    memory: Any = gpu.moves.memory
    memory.can_access = lambda *_: False
    memory.registered_end = lambda _: 32 * 8 << 20
    gpu.load("a")
    assert [len(load.pages) for load in staged] == [32]
    order = [page for pair in zip(range(32), range(32, 64), strict=True) for page in pair]
    gpu.leases = replace(
        gpu.leases, locations=b"".join([encode_location(gpu.places[page]) for page in order])
    )
    gpu.load("b")
    assert [len(load.pages) for load in staged] == [32, 64]


def test_parts_of_a_load_are_not_those_of_a_later_request_with_its_id() -> None:
    gpu = InstantGpu(3)
    loads = [PageLoad("a", 0, 192, 0, gpu.leases, array("q", range(12))) for _ in range(2)]
    parts = [loads[0].part(i, i + 1, 64) for i in range(3)]
    gpu.reports.split_load(loads[0], 3)
    gpu.reports.end_load(loads[1], 3, "", 0.0)
    assert gpu.reports.take_finished() == ["a"]
    for part in parts:
        assert not gpu.reports.take_finished()
        gpu.reports.end_load(part, 1, "", 0.0)
    assert gpu.reports.take_finished() == ["a"]


@pytest.mark.parametrize("groups", [1, 2])
def test_request_that_reuses_an_id_ends_with_the_load_of_the_first(groups: int) -> None:
    """Both loads of a group may end between two steps."""
    gpu = InstantGpu(1)
    reports = [TransferReports(gpu.rank, 16) for _ in range(groups)]
    workers: Any = [
        SimpleNamespace(
            start_loads=lambda loads: None,
            take_finished=one.take_finished,
            take_bad_blocks=one.take_bad_blocks,
            take_acks=one.take_acks,
        )
        for one in reports
    ]
    worker = KVWorker(workers, [["layer"]] * groups)
    loads = [
        PageLoad("a", 0, 64, 0, gpu.leases, gpu.blocks, group=group)
        for _ in range(2)
        for group in range(groups)
    ]
    worker.start_loads(loads)
    for load in loads:
        assert not worker.take_finished()
        reports[load.group].end_load(load, 1, "", 0.0)
    assert worker.take_finished() == {"a"}


@pytest.mark.parametrize("ends_first", [None, 0, 1])
def test_cancel_reaches_both_parts_of_a_save(ends_first: int | None) -> None:
    """The device copies some of its pages, the mover's thread the others."""
    gpu = InstantGpu(2)
    writes = [PageWrite(i, i, place) for i, place in enumerate(gpu.places)]
    parts = [gpu.reports.begin_saves([PageSave("a", (write,), tuple(gpu.blocks))])[0] for write in writes]
    if ends_first is not None:
        gpu.reports.end_saves([parts[ends_first]])
    gpu.reports.cancel_saves(["a"])
    assert [part.is_cancelled for part in parts] == [i != ends_first for i in range(2)]


def test_arena_copies_in_flight_are_what_the_bus_copies_in_a_step() -> None:
    gpu = InstantGpu(160)
    slab = SimpleNamespace(is_done=lambda: False, wait=lambda: None, checksums=lambda: np.ones(0))
    gpu.copies._slab = lambda pages: slab  # type: ignore[method-assign]
    begun: list[int] = []
    budget = gpu.moves.mover.budget
    budget.start = lambda size, way, start=budget.start: (begun.append(size), start(size, way))  # type: ignore[method-assign]
    for _ in range(5):
        gpu.begin_step()
        gpu.load("a")
        gpu.moves.poll()
    assert sum(begun) <= 512 << 20


def test_arena_without_memory_is_left_and_its_load_staged(
    engine: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine().run("a", PROMPT)
    second = engine(accelerator="arena")
    (arena,) = arenas(second)
    arena.into_batch.error = torch.OutOfMemoryError("CUDA out of memory")
    request = second.run("b", PROMPT)
    assert not request.failed
    assert request.external_tokens == 128
    assert second.counts[("staged_pages",)] == 4
    second.run("c", PROMPT[1:])
    assert second.counts["saves", "kv_page", "stored"] == 4, "later pages are staged at once"
    assert open_in(store) == (0, 0)


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
                pages, reports, blocks, other_group=how.pop("beside", None), slab_share=1 / 64,
                sizes=BlockSizes(16, 16), fallback=NO_FALLBACK,
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
            fallback=NO_FALLBACK,
        )  # fmt: skip
    assert found is None
    assert "1536 bytes" in caplog.text


def test_arena_location_layout_is_the_stores(engine: Make) -> None:
    """The layout of `Leases.locations`, on which `can_load` relies."""
    assert encode_location(PayloadLocation(bytes(16), 3, 5, 7)) == b"".join(
        n.to_bytes(8, "little") for n in (3, 5, 7)
    )
