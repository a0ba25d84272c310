"""A GPU copies KV pages to and from memory that processes share, and sums them.

Needs torch with CUDA, Triton and xxhash; vLLM's `swap_blocks_batch` copies, or without it one
`cudaMemcpyAsync` a run.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

pytest.importorskip("triton")

from cornplug.vllm_connector.kv_copies.arena_copies import (
    ArenaCopies,
    CopyBatch,
    DeviceChecksums,
    fold_checksums,
)
from cornplug.vllm_connector.kv_copies.block_copies import CudaBackend
from cornplug.vllm_connector.kv_copies.cache_blocks import BlockSizes, CacheBlocks, kernel_table
from cornplug.vllm_connector.kv_copies.layout import derive_layout
from cornplug.vllm_connector.kv_copies.registered_memory import RegisteredMemory

from .test_kv_copies import BLOCK, DIM, HEADS, LAYERS, ORDERS, PAGE, TABLE, caches, filled, page_of, write

pytestmark = pytest.mark.gpu

SEGMENT = LAYERS * 2 * PAGE * DIM * 2
PAGE_BYTES = HEADS * SEGMENT


def _cudart() -> Any:
    """The runtime that torch has loaded."""
    paths = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line
    }
    return ctypes.CDLL(paths.pop())


def copy_batch() -> CopyBatch:
    try:
        from vllm._custom_ops import swap_blocks_batch
    except ImportError:
        runtime = _cudart()
    else:
        return swap_blocks_batch

    def copy(sources: Any, targets: Any, sizes: Any, is_src_access_order_any: bool = False) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for source, target, size in zip(*(one.tolist() for one in (sources, targets, sizes)), strict=True):
            either_way = 4
            places = ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size)
            assert runtime.cudaMemcpyAsync(*places, either_way, stream) == 0

    return copy


class Arena:
    """Shared memory like a store's: a mapping of a file in memory."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("arena")
        os.posix_fallocate(self.fd, 0, size)
        self._map = mmap.mmap(self.fd, size)
        self.bytes = np.frombuffer(self._map, np.uint8)
        runtime = torch.cuda.cudart()
        self.memory = RegisteredMemory(
            self,  # type: ignore[arg-type]
            lambda address, n: int(runtime.cudaHostRegister(address, n, 0)) == 0,
            lambda address: runtime.cudaHostUnregister(address),
            lambda: torch.cuda.set_device(0),
            min_bytes=mmap.PAGESIZE,
            # Runs meet inside pages.
            max_bytes=5 * (PAGE_BYTES // 2) // mmap.PAGESIZE * mmap.PAGESIZE,
        )
        self.idle = lambda: True
        self.memory.add_user(self.idle)
        self.memory.can_access(bytes(16), size)
        self.memory._thread.submit(lambda: None).result(60)
        assert self.memory.can_access(bytes(16), size), "the driver registers no shared memory here"

    def arena_memory(self, arena_id: bytes) -> memoryview:
        return memoryview(self._map)

    def runs(self, pages: list[int], page_bytes: int = PAGE_BYTES) -> list[tuple[int, int, int]]:
        found = []
        for i, page in enumerate(pages):
            place = i * page_bytes
            for address, size in self.memory.byte_ranges(bytes(16), page * page_bytes, page_bytes):
                found.append((place, address, size))
                place += size
        return found

    def page(self, page: int) -> Any:
        part = self.bytes[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
        return torch.from_numpy(part).view(torch.bfloat16).reshape(HEADS, LAYERS, 2, PAGE, DIM)


@pytest.fixture
def arena() -> Iterator[Arena]:
    one = Arena(16 * PAGE_BYTES)
    yield one
    torch.cuda.synchronize()
    one.memory.remove_user(one.idle)


def copies(of: list[Any], *, urgent: bool = False) -> ArenaCopies:
    layouts = [derive_layout(cache, HEADS, BLOCK, DIM, write) for cache in of]
    blocks = CacheBlocks(of, layouts, (HEADS, LAYERS, 2, PAGE, DIM))
    device = blocks.device
    return ArenaCopies(blocks, CudaBackend(device, urgent=urgent), DeviceChecksums(device), copy_batch())


def digests(page: Any) -> list[int]:
    return [xxhash.xxh3_64_intdigest(head.contiguous().view(torch.uint8).numpy()) for head in page]


@pytest.mark.parametrize("segment_bytes", [1024, 3072, 73728, 1 << 20])
def test_device_checksums_on_gpu_equal_xxhash(segment_bytes: int) -> None:
    data = torch.randint(-128, 128, (16 * segment_bytes,), dtype=torch.int8, device="cuda")
    data[:64] = -1
    words = DeviceChecksums(data.device).begin(data, segment_bytes)
    rows = data.cpu().numpy().reshape(16, -1)
    assert fold_checksums(words.cpu(), segment_bytes).tolist() == [
        xxhash.xxh3_64_intdigest(row) for row in rows
    ]


def test_arena_copies_on_gpu_work() -> None:
    """What an engine asks at its start."""
    assert copies(caches(ORDERS["LBNHC"])).self_test(SEGMENT)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_arena_pages_come_and_go_on_gpu(arena: Arena, order: tuple[int, ...]) -> None:
    source, target = caches(order), caches(order)
    values = filled(source)
    out, into = copies(source), copies(target, urgent=True)
    table = kernel_table(TABLE, BlockSizes(BLOCK, BLOCK))
    slab = out.begin_copy_out(
        [(table, page) for page in (0, 1, 3)], arena.runs([5, 2, 9]), SEGMENT, out.backend.mark()
    )
    slab.wait()
    for page, at in ((0, 5), (1, 2), (3, 9)):
        assert torch.equal(arena.page(at), page_of(values, page))
    assert slab.checksums().tolist() == [
        sum_ for page in (0, 1, 3) for sum_ in digests(page_of(values, page))
    ]
    arena.page(4).copy_(page_of(values, 2))
    tokens = PAGE + 5, 3 * PAGE - 7
    slab = into.begin_copy_in(table, range(1, 3), arena.runs([2, 4]), SEGMENT, tokens, into.backend.mark())
    slab.wait()
    assert slab.checksums().tolist() == digests(page_of(values, 1)) + digests(page_of(values, 2))
    expected = caches(order)
    slots = torch.tensor(TABLE, device="cuda").repeat_interleave(BLOCK) * BLOCK
    slots = (slots + torch.arange(len(slots), device="cuda") % BLOCK)[slice(*tokens)]
    for i, cache in enumerate(expected):
        part = values[slice(*tokens), i].cuda()
        write(part[:, 0], part[:, 1], cache, slots)
        assert torch.equal(target[i], cache)


def test_arena_copies_beside_busy_stream_are_complete(arena: Arena) -> None:
    """Slabs begun one behind the other, over one buffer, while the engine's stream never rests."""
    of = caches(ORDERS["LBNHC"])
    values = filled(of)
    out = copies(of)
    table = kernel_table(TABLE, BlockSizes(BLOCK, BLOCK))
    expected = [digests(page_of(values, page)) for page in range(4)]
    busy = torch.randn(2048, 2048, device="cuda")
    for first in range(0, 400, 4):
        arena.bytes[: 4 * PAGE_BYTES] = 9
        slabs = []
        for page in range(4):
            busy = (busy @ busy).tanh_()
            at = (page + first) % 4
            slabs.append(out.begin_copy_out([(table, at)], arena.runs([page]), SEGMENT, out.backend.mark()))
        for page, slab in enumerate(slabs):
            at = (page + first) % 4
            slab.wait()
            assert slab.checksums().tolist() == expected[at]
            assert torch.equal(arena.page(page), page_of(values, at))
            out.release_slab(slab)


def test_arena_copies_cross_at_good_part_of_bus(record_property: Any) -> None:
    """An 8B model's pages, gathered, summed and copied, and back, beside plain copies of the same bytes."""
    layers, heads, dim, blocks, pages = 32, 8, 128, 512, 32
    whole = torch.zeros(layers, blocks, BLOCK, heads, 2 * dim, dtype=torch.bfloat16, device="cuda")
    of = list(whole.permute(0, 1, 3, 2, 4))
    places = CacheBlocks(
        of, [derive_layout(of[0], heads, BLOCK, dim, write)] * layers, (heads, layers, 2, PAGE, dim)
    )
    out = ArenaCopies(places, CudaBackend(places.device), DeviceChecksums(places.device), copy_batch())
    store, segment = Arena(pages * out.page_bytes), out.page_bytes // heads
    table = np.random.default_rng(1).permutation(blocks)
    step = out.slab_pages
    host = torch.empty(step * out.page_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")

    def seconds(work: Any) -> float:
        work()
        times = []
        for _ in range(10):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            work()
            torch.cuda.synchronize()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return sorted(times)[len(times) // 2]

    def move() -> None:
        slabs = [
            out.begin_copy_out(
                [(table, at + i) for i in range(step)],
                store.runs(list(range(at, at + step)), out.page_bytes),
                segment,
                out.backend.mark(),
            )
            for at in range(0, pages, step)
        ]
        for slab in slabs:
            out.release_slab(slab)

    def cross() -> None:
        for _ in range(0, pages, step):
            host.copy_(there, non_blocking=True)

    def cross_back() -> None:
        for _ in range(0, pages, step):
            there.copy_(host, non_blocking=True)

    into = ArenaCopies(
        places, CudaBackend(places.device, urgent=True), DeviceChecksums(places.device), copy_batch()
    )

    def move_back() -> None:
        slabs = [
            into.begin_copy_in(
                table,
                range(at, at + step),
                store.runs(list(range(at, at + step)), out.page_bytes),
                segment,
                (at * PAGE, (at + step) * PAGE),
                into.backend.mark(),
            )
            for at in range(0, pages, step)
        ]
        for slab in slabs:
            into.release_slab(slab)

    data = torch.empty(step * out.page_bytes, dtype=torch.uint8, device="cuda")
    size = pages * out.page_bytes
    ours, bus = seconds(move), seconds(cross)
    sums = seconds(lambda: out._checksums.begin(data, segment)) / data.nbytes
    rates = {"arena": size / ours, "plain copy": size / bus, "checksums": 1 / sums}
    back, bus_back = seconds(move_back), seconds(cross_back)
    rates |= {"arena, loads": size / back, "plain copy, loads": size / bus_back}
    for name, rate in rates.items():
        record_property(f"{name}, GB/s", round(rate / 1e9, 2))
        print(f"{name} {rate / 1e9:.1f} GB/s")
    record_property("saves, of a plain copy", round(bus / ours, 3))
    record_property("loads, of a plain copy", round(bus_back / back, 3))
    torch.cuda.synchronize()
    store.memory.remove_user(store.idle)
    assert ours < 3 * bus
    assert back < 3 * bus_back
