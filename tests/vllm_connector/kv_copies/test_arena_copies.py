"""Slabs between the caches and the store's memory: bytes, checksums, order, and what a GPU would do."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from vllm.v1.kv_cache_interface import KVCacheLayout

pytest.importorskip("triton")

from cornplug.vllm_connector.kv_copies import arena_copies
from cornplug.vllm_connector.kv_copies.arena_copies import STATE_WORDS, ArenaCopies
from cornplug.vllm_connector.kv_copies.block_copies import CudaBackend
from cornplug.vllm_connector.kv_copies.cache_blocks import BlockSizes, CacheBlocks, kernel_table
from cornplug.vllm_connector.kv_copies.layout import derive_layout
from devkit.cuda_recorder import CudaRecorder, record_cuda

from ..late_arena import STALE_BYTE, BatchCopies, HostRanges, NumpyChecksums
from ..late_device import LateDevice
from .test_block_copies import (
    BLOCK,
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    SPLIT,
    TABLE,
    caches,
    fill,
    page_of,
)  # fmt: skip
from .test_layout import side_by_side

SHAPE = (HEADS, LAYERS, 2, PAGE, DIM)
SEGMENT = LAYERS * 2 * PAGE * DIM * 4
PAGE_BYTES = HEADS * SEGMENT


def blocks_of(of: list[Any], slots: int = BLOCK) -> CacheBlocks:
    return CacheBlocks(of, [derive_layout(cache, HEADS, slots, DIM, side_by_side) for cache in of], SHAPE)


class Store:
    """Registered memory of some pages, in two registrations that meet inside a page."""

    def __init__(self, pages: int) -> None:
        self.memory = torch.full((pages * PAGE_BYTES,), 7, dtype=torch.uint8)
        self.ranges = HostRanges()
        self._cut = PAGE_BYTES + 1000
        self.ranges.register(self.address, self._cut)
        self.ranges.register(self.address + self._cut, pages * PAGE_BYTES - self._cut)

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def runs(self, pages: list[int]) -> Any:
        found = []
        for i, page in enumerate(pages):
            start, end = page * PAGE_BYTES, (page + 1) * PAGE_BYTES
            bounds = [start, *([self._cut] if start < self._cut < end else []), end]
            for low, high in itertools.pairwise(bounds):
                found.append((i * PAGE_BYTES + low - start, self.address + low, high - low))
        return np.array(found, np.int64)

    def page(self, page: int) -> torch.Tensor:
        return self.memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES].view(torch.float32).reshape(SHAPE)


def copies(
    blocks: CacheBlocks, store: Store, *, batch: Any = None, checksums: Any = None
) -> tuple[ArenaCopies, LateDevice, BatchCopies]:
    device = LateDevice()
    batch = batch or BatchCopies(device, store.ranges)
    return ArenaCopies(blocks, device, checksums or NumpyChecksums(), batch), device, batch


def digests(of: torch.Tensor) -> list[int]:
    return [xxhash.xxh3_64_intdigest(head.contiguous().numpy()) for head in of]


@pytest.mark.parametrize(("layout", "slots"), SPLIT)
def test_arena_copies_round_trip_every_vllm_layout(layout: KVCacheLayout, slots: int) -> None:
    source, store = caches(layout, slots), Store(3)
    values = fill(source, slots)
    out, device, batch = copies(blocks_of(source, slots), store)
    table = kernel_table(TABLE, BlockSizes(BLOCK, slots))
    slab = out.begin_copy_out([(table, 0), (table, 2)], store.runs([2, 1]), SEGMENT, None)
    assert (store.memory[PAGE_BYTES:] == STALE_BYTE).all(), "nothing has arrived yet"
    slab.wait()
    assert torch.equal(store.page(2), page_of(values, 0))
    assert torch.equal(store.page(1), page_of(values, 2))
    assert (store.memory[:PAGE_BYTES] == 7).all()
    assert slab.checksums().tolist() == digests(page_of(values, 0)) + digests(page_of(values, 2))
    assert batch.calls == [[PAGE_BYTES, 1000, PAGE_BYTES - 1000]]

    target = caches(layout, slots)
    for cache in target:
        cache.fill_(5)
    into, _, _ = copies(blocks_of(target, slots), store)
    store.page(0).copy_(page_of(values, 1))
    start, end = PAGE + 3, 3 * PAGE - 5
    slab = into.begin_copy_in(table, range(1, 3), store.runs([0, 1]), SEGMENT, (start, end), None)
    slab.wait()
    assert slab.checksums().tolist() == digests(page_of(values, 1)) + digests(page_of(values, 2))
    tokens = torch.arange(len(TABLE) * BLOCK)
    at, slot = torch.from_numpy(table)[tokens // slots], tokens % slots
    expected = caches(layout, slots)
    for i, cache in enumerate(expected):
        cache.fill_(5)
        keys, found = values[start:end, i].unbind(1)
        side_by_side(keys, found, cache, (at * slots + slot)[start:end])
        assert torch.equal(target[i], cache)
    assert device.pageable == 0


def test_arena_copies_slabs_in_flight_share_one_buffer() -> None:
    """Begun one behind the other: no slab waits for the host, and each has its own pages and checksums."""
    source, store = caches(KVCacheLayout.LBNHC), Store(3)
    values = fill(source, BLOCK)
    out, device, _ = copies(blocks_of(source), store)
    table = np.array(TABLE)
    slabs = [out.begin_copy_out([(table, page)], store.runs([page]), SEGMENT, None) for page in range(3)]
    buffers = {one.data_ptr() for one in device.hosts if one.dtype is not torch.int64}
    assert not buffers, "bytes of a page pass no host memory but the store's"
    assert not any(slab.is_done() for slab in slabs)
    for page in (2, 0, 1):
        slabs[page].wait()
        assert slabs[page].checksums().tolist() == digests(page_of(values, page))
        assert torch.equal(store.page(page), page_of(values, page))
        out.release_slab(slabs[page])
    hosts = len(device.hosts)
    out.begin_copy_out([(table, 0)], store.runs([0]), SEGMENT, None).wait()
    assert len(device.hosts) == hosts, "memory of slabs that ended is used again"


def test_arena_copies_load_of_damaged_page_shows_in_checksums() -> None:
    target, store = caches(KVCacheLayout.LBNHC), Store(2)
    into, _, _ = copies(blocks_of(target), store)
    good = digests(store.page(1))
    store.memory[PAGE_BYTES + SEGMENT + 3] ^= 1
    slab = into.begin_copy_in(np.array(TABLE), range(1), store.runs([1]), SEGMENT, (0, PAGE), None)
    slab.wait()
    assert [one == other for one, other in zip(slab.checksums(), good, strict=True)] == [True, False, True]


def test_arena_copies_notice_store_memory_that_changes_under_load() -> None:
    """The control of the test's device: a load ends only when the store's bytes have been read."""
    target, store = caches(KVCacheLayout.LBNHC), Store(2)
    into, _, _ = copies(blocks_of(target), store)
    slab = into.begin_copy_in(np.array(TABLE), range(1), store.runs([1]), SEGMENT, (0, PAGE), None)
    store.memory.fill_(9)
    with pytest.raises(AssertionError, match="changed while it was read"):
        slab.wait()


def test_arena_copies_failed_slab_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(2)
    out, device, _ = copies(blocks_of(caches(KVCacheLayout.LBNHC)), store)
    ends: list[int] = []
    monkeypatch.setattr(device, "wait", ends.append)
    monkeypatch.setattr(out, "_begin_checksums", None)
    with pytest.raises(TypeError):
        out.begin_copy_out([(np.array(TABLE), 0)], store.runs([0]), SEGMENT, None)
    assert ends == [1]


def test_arena_copies_work_only_where_device_sums_and_copies_right() -> None:
    store = Store(2)
    blocks = blocks_of(caches(KVCacheLayout.LBNHC))
    assert copies(blocks, store)[0].self_test(SEGMENT)
    assert not copies(blocks, store, batch=lambda *a, **k: None)[0].self_test(SEGMENT)

    class Wrong(NumpyChecksums):
        def begin(self, data: torch.Tensor, segment_bytes: int) -> torch.Tensor:
            return super().begin(data, segment_bytes) ^ 1

    assert not copies(blocks, store, checksums=Wrong())[0].self_test(SEGMENT)


# -- CUDA without a GPU -----------------------------------------------------------------------


class _Recorded:
    """`swap_blocks_batch` and `DeviceChecksums` of fake tensors."""

    def __init__(self, events: CudaRecorder) -> None:
        self._events = events

    def copy(self, sources: Any, targets: Any, sizes: Any, is_src_access_order_any: bool = False) -> None:
        assert {one.device.type for one in (sources, targets, sizes)} == {"cpu"}
        self._events.note("batch of", len(sizes), "any order" if is_src_access_order_any else "in order")

    def begin(self, data: torch.Tensor, segment_bytes: int) -> torch.Tensor:
        assert data.device.type == "cuda"
        assert data.is_contiguous()
        self._events.note("summed")
        return torch.empty(data.nbytes // segment_bytes, STATE_WORDS, dtype=torch.int64, device=data.device)


def on_cuda(events: CudaRecorder, *, urgent: bool = False) -> ArenaCopies:
    """Copies over fake CUDA caches in the order of FlashAttention's."""
    block = HEADS * BLOCK * 2 * DIM
    whole = torch.empty(LAYERS * BLOCKS * block, dtype=torch.bfloat16, device="cuda:0")
    order = (block, 2 * DIM, HEADS * 2 * DIM, 1)
    of = [whole.as_strided((BLOCKS, HEADS, BLOCK, 2 * DIM), order, i * BLOCKS * block) for i in range(LAYERS)]
    with torch.utils._python_dispatch._disable_current_modes():
        like = torch.zeros(LAYERS * BLOCKS * block, dtype=torch.bfloat16).as_strided(of[0].shape, order)
        layout = derive_layout(like, HEADS, BLOCK, DIM, side_by_side)
    blocks, gpu = CacheBlocks(of, [layout] * LAYERS, SHAPE), _Recorded(events)
    side = CudaBackend(blocks.device, urgent=urgent)
    return ArenaCopies(blocks, side, gpu, gpu.copy)  # type: ignore[arg-type]


def test_arena_copy_out_on_cuda_waits_for_engine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_copies, "_address", lambda tensor: 1 << 40)
    events, table = CudaRecorder(), np.array(TABLE)
    with record_cuda(events):
        out = on_cuda(events)
        mark = out.backend.mark()
        runs = np.array([(i * PAGE_BYTES // 2, 4096 * i, PAGE_BYTES // 2) for i in range(3)])
        slab = out.begin_copy_out([(table, page) for page in range(3)], runs, SEGMENT // 2, mark)
        out.release_slab(slab)
    assert events.events == [
        ("event recorded on", "the engine's"),
        ("our stream waits",),
        ("cpu to cuda", "late", "whole", "pinned"),  # where the tokens lie
        ("index",),
        ("summed",),
        ("cuda to cpu", "late", "whole", "pinned"),  # 64 bytes a segment
        ("batch of", 3, "in order"),
        ("event recorded on", "ours"),
        ("event waited for",),
    ]


def test_arena_copy_in_on_cuda_is_one_batch_of_urgent_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_copies, "_address", lambda tensor: 1 << 40)
    events = CudaRecorder()
    with record_cuda(events):
        into = on_cuda(events, urgent=True)
        runs = np.array([(i * PAGE_BYTES // 2, 4096 * i, PAGE_BYTES // 2) for i in range(2)])
        mark = into.backend.mark()
        into.begin_copy_in(np.array(TABLE), range(2), runs, SEGMENT // 2, (3, 60), mark)
    assert events.events[2:] == [
        ("batch of", 2, "any order"),
        ("summed",),
        ("cuda to cpu", "late", "whole", "pinned"),
        ("cpu to cuda", "late", "whole", "pinned"),
        ("index_put_",),
        ("event recorded on", "ours, urgent"),
    ]
