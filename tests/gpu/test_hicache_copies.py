"""SGLang's own kernels between a GPU, its pinned host pool and memory like a store's, and our copies behind.

Needs SGLang with its CUDA kernels.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")
pytest.importorskip("sgl_kernel.kvcacheio")

from cornplug.engine_common.rank_pages import RankPages, page_header
from cornplug.kv_page import PageGeometry, RankSlice
from cornplug.sglang_hooks.kv_pages.layout import host_pages, verify_layout
from cornplug.sglang_hooks.kv_pages.page_copies import PageCopies, PageSlice, copy_thread_count
from cornplug.store.base import Reservation, ReserveTerms
from cornplug.store.memory import MemoryStore

pytestmark = pytest.mark.gpu

LAYERS, HEADS, DIM, PAGE, TOKENS = 6, 4, 128, 64, 512
WAYS = [
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("page_head", "kernel"),
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
]
GEOMETRY = PageGeometry(page_tokens=PAGE, heads=HEADS, layers=LAYERS, dim=DIM, dtype="bfloat16")


def device_pool() -> Any:
    """A pool on the GPU, of noise."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.runtime_context import get_parallel

    get_parallel().override_permanently(dcp_enabled=False)
    pool = MHATokenToKVPool(
        size=TOKENS,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cuda",
        enable_memory_saver=False,
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    return pool


class HiCacheHalves:
    """HiCache's halves: a pool on the GPU, a pinned host pool, and the indices that SGLang's kernels take."""

    def __init__(self, device: Any, layout: str, io_backend: str) -> None:
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

        self.mem_pool_device, self.io_backend, self.device = device, io_backend, torch.device("cuda")
        self.mem_pool_host = MHATokenToKVPoolHost(
            device.get_device_pool_infos()[0].buffer_info,
            2.0,
            0,
            PAGE,
            layout,
            device_capacity_tokens=TOKENS,
            start_layer=0,
            end_layer=LAYERS - 1,
        )
        self._move = HiCacheController.move_indices

    def move_indices(self, host: Any, device: Any) -> Any:
        return self._move(self, host, device)

    def back_up(self, slots: Any, tokens: Any) -> None:
        pool = self.mem_pool_host
        staged = self.io_backend == "kernel" and pool.layout == "page_first" and pool.can_use_write_back_jit
        at = (slots, tokens) if staged else self.move_indices(slots, tokens)
        pool.backup_from_device_all_layer(self.mem_pool_device, *at, self.io_backend)
        torch.cuda.synchronize()

    def load(self, slots: Any, tokens: Any) -> None:
        at = self.move_indices(slots, tokens)
        for layer in range(LAYERS):
            self.mem_pool_host.load_to_device_per_layer(self.mem_pool_device, *at, layer, self.io_backend)
        torch.cuda.synchronize()


def tokens_of(pages: list[int]) -> Any:
    return torch.cat([torch.arange(PAGE, device="cuda") + page * PAGE for page in pages])


def page_on(device: Any, page: int) -> Any:
    """A page of the GPU's pool in the store's order, on the host."""
    rows = slice(page * PAGE, (page + 1) * PAGE)
    planes = [
        torch.stack([buffer[rows] for buffer in of], dim=1) for of in (device.k_buffer, device.v_buffer)
    ]
    return torch.stack(planes).permute(3, 2, 0, 1, 4).cpu().contiguous()


@pytest.mark.parametrize(("layout", "io_backend"), WAYS)
def test_hicache_pages_on_gpu_come_and_go_through_store(layout: str, io_backend: str) -> None:
    device = device_pool()
    cache = HiCacheHalves(device, layout, io_backend)
    pages = host_pages(cache.mem_pool_host)
    verify_layout(pages, cache)
    store = MemoryStore(capacity_bytes=16 << 20).connect()
    held = RankSlice(heads=range(HEADS), layers=range(LAYERS), writes=True)
    threads = copy_thread_count("cuda", 1)
    copies = PageCopies(RankPages(GEOMETRY, held, store), pages, threads=threads)
    sources, targets = [5, 1, 3], [2, 6, 4]
    expected = [page_on(device, page) for page in sources]

    slots = cache.mem_pool_host.alloc(len(sources) * PAGE)
    cache.back_up(slots, tokens_of(sources))
    parts = [[PageSlice(slice(0, PAGE), copies.host_page(int(slot)))] for slot in slots[::PAGE]]
    entries = [(bytes([i]) * 32, GEOMETRY.page_bytes) for i in sources]
    rooms = [r for r in store.reserve(entries, ReserveTerms("t"), deadline_s=1) if isinstance(r, Reservation)]
    sums = copies.write([(p, r.location) for p, r in zip(parts, rooms, strict=True)], lambda: False)
    for room, page in zip(rooms, expected, strict=True):
        assert bytes(store.view(room.location)) == page.view(torch.uint8).numpy().tobytes()
    headers = [page_header(r.key, GEOMETRY, one or {}) for r, one in zip(rooms, sums, strict=True)]
    assert all(store.commit(list(zip(rooms, headers, strict=True)), deadline_s=1))

    cache.mem_pool_host.kv_buffer.zero_()
    leases = [lease for lease in store.lease([k for k, _ in entries], ttl_s=60, deadline_s=1) if lease]
    assert copies.read(list(zip(leases, parts, strict=True)), lambda: False) == (3, None)
    cache.load(slots, tokens_of(targets))
    for page, target in zip(expected, targets, strict=True):
        assert torch.equal(page_on(device, target), page)
    copies.close()
    cache.mem_pool_host.destroy()


def test_hicache_page_unified_kernels_move_pages_of_the_store() -> None:
    """The layout that SGLang 0.5.23 has kernels for, but no pool that calls them: with one head a group it is
    the store's page. It also tells whether a GPU reaches memory like the store's from SGLang's kernels."""
    hicache = pytest.importorskip("sglang.kernels.ops.kvcache.hicache")
    device, sources, places = device_pool(), [5, 1, 3], [2, 0, 3]
    expected = [page_on(device, page) for page in sources]
    size = 4 * GEOMETRY.page_bytes
    fd = os.memfd_create("arena")
    os.posix_fallocate(fd, 0, size)
    memory = mmap.mmap(fd, size)
    arena = torch.frombuffer(memory, dtype=torch.bfloat16).view(4, HEADS, LAYERS, 2, PAGE, 1, DIM)
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(arena.data_ptr(), size, 0)) == 0
    try:
        buffers = device.get_device_pool_infos()[0].buffer_info.buffers
        staging = torch.empty(2, *arena.shape[1:], dtype=torch.bfloat16, device="cuda")
        hicache.transfer_hicache_all_layer_staged_lf_page_unified(
            buffers.k_data_ptrs,
            buffers.v_data_ptrs,
            torch.tensor(sources, device="cuda"),
            torch.tensor(places),
            staging,
            arena,
        )
        torch.cuda.synchronize()
        for place, page in zip(places, expected, strict=True):
            assert torch.equal(arena[place].view(page.shape), page)
        at = torch.cat([torch.arange(PAGE, device="cuda") + place * PAGE for place in places])
        for layer in range(LAYERS):
            hicache.transfer_hicache_one_layer_page_unified_lf(
                device.k_buffer[layer], device.v_buffer[layer], arena, at, tokens_of([2, 6, 4]), layer
            )
        torch.cuda.synchronize()
        for target, page in zip([2, 6, 4], expected, strict=True):
            assert torch.equal(page_on(device, target), page)
    finally:
        runtime.cudaHostUnregister(arena.data_ptr())
