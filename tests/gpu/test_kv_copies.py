"""The KV mover's copies on a GPU. Needs torch with CUDA and numpy, no engine and nothing else.

Strides are those of vLLM 0.32's layouts; `tests/vllm_connector/kv_copies/test_block_copies.py` makes the same
caches by vLLM's own code, on a CPU.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from cornplug.vllm_connector.kv_copies.block_copies import BlockCopies, CudaBackend
from cornplug.vllm_connector.kv_copies.cache_blocks import BlockSizes, kernel_table
from cornplug.vllm_connector.kv_copies.layout import derive_layout

pytestmark = pytest.mark.gpu

LAYERS, HEADS, BLOCK, DIM, BLOCKS, PAGE = 6, 4, 16, 64, 64, 64
ORDERS = {  # axes of (layer, block, head, token, content) from the outermost
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
TABLE = [int(b) for b in np.random.default_rng(5).permutation(BLOCKS)[:16]]


def write(key: Any, value: Any, cache: Any, slots: Any) -> None:
    """A token-major backend: the last axis holds K, then V."""
    size, dim = cache.shape[2], key.shape[2]
    cache[slots // size, :, slots % size, :dim] = key
    cache[slots // size, :, slots % size, dim:] = value


def caches(order: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    shape = (LAYERS, BLOCKS, HEADS, BLOCK, 2 * DIM)
    whole = torch.zeros([shape[axis] for axis in order], dtype=dtype, device="cuda")
    back = [order.index(axis) for axis in range(5)]
    return list(whole.permute(back))


def filled(of: list[Any]) -> Any:
    """Tokens of TABLE, on the host: (tokens, layers, 2, heads, dim)."""
    tokens = len(TABLE) * BLOCK
    values = torch.randn(tokens, LAYERS, 2, HEADS, DIM, device="cuda").to(of[0].dtype)
    slots = torch.tensor(TABLE, device="cuda").repeat_interleave(BLOCK) * BLOCK
    slots += torch.arange(tokens, device="cuda") % BLOCK
    for cache, layer in zip(of, values.unbind(1), strict=True):
        write(layer[:, 0], layer[:, 1], cache, slots)
    return values.cpu()


def copies(of: list[Any]) -> BlockCopies:
    layouts = [derive_layout(cache, HEADS, BLOCK, DIM, write) for cache in of]
    return BlockCopies(of, layouts, (HEADS, LAYERS, 2, PAGE, DIM))


def arrived(out: BlockCopies, table: Any, pages: list[int]) -> Any:
    """Host memory with these pages, once they are there."""
    return out.begin_copy_out([(table, page) for page in pages], out.backend.mark()).wait_host()


def page_of(values: Any, page: int) -> Any:
    return values[page * PAGE : (page + 1) * PAGE].permute(3, 1, 2, 0, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_pages_come_and_go(order: tuple[int, ...], dtype: torch.dtype) -> None:
    source, target = caches(order, dtype), caches(order, dtype)
    values = filled(source)
    out, into = copies(source), copies(target)
    assert isinstance(out.backend, CudaBackend)
    assert out.next_slab(1).host.is_pinned()
    table = kernel_table(TABLE, BlockSizes(BLOCK, BLOCK))
    host = arrived(out, table, [0, 1, 3])
    for row, page in enumerate((0, 1, 3)):
        assert torch.equal(host[row], page_of(values, page))
    slab = into.next_slab(2)
    slab.host.copy_(arrived(out, table, [1, 2]))
    into.begin_copy_in(slab, table, 1, 2, (PAGE + 5, 3 * PAGE - 7), into.backend.mark())
    into.wait()
    expected = caches(order, dtype)
    slots = torch.tensor(TABLE, device="cuda").repeat_interleave(BLOCK) * BLOCK
    slots = (slots + torch.arange(len(slots), device="cuda") % BLOCK)[PAGE + 5 : 3 * PAGE - 7]
    for i, cache in enumerate(expected):
        part = values[PAGE + 5 : 3 * PAGE - 7, i].cuda()
        write(part[:, 0], part[:, 1], cache, slots)
        assert torch.equal(target[i], cache)


def test_block_copies_wait_for_the_engines_forward() -> None:
    """The mark is behind a forward that has only been enqueued."""
    of = caches(ORDERS["LBNHC"])
    out = copies(of)
    table = kernel_table(TABLE, BlockSizes(BLOCK, BLOCK))
    arrived(out, table, [0])
    for value in range(1, 6):
        torch.cuda._sleep(50_000_000)  # cycles: tens of milliseconds
        for cache in of:
            cache.fill_(value)
        assert (arrived(out, table, [0, 1]) == value).all()


def test_block_copies_beside_busy_stream_are_complete() -> None:
    """Each copied slab is complete: the engine's stream never rests, another thread copies."""
    of = caches(ORDERS["LBNHC"])
    values = filled(of)
    out = copies(of)
    table, mark = kernel_table(TABLE, BlockSizes(BLOCK, BLOCK)), out.backend.mark()
    wrong: list[int] = []
    done = threading.Event()

    def move() -> None:
        out.backend.enter_thread()
        for i in range(2000):
            page = i % 4
            host = out.begin_copy_out([(table, page)], mark).wait_host()
            if not torch.equal(host[0], page_of(values, page)):
                wrong.append(i)
            host.fill_(-9)
        done.set()

    thread = threading.Thread(target=move)
    thread.start()
    busy = torch.randn(2048, 2048, device="cuda")
    while not done.is_set():
        busy = (busy @ busy).tanh_()
        torch.cuda.synchronize()
    thread.join()
    assert not wrong


def test_copies_cross_at_a_good_part_of_the_bus(record_property: Any) -> None:
    """A slab of an 8B model's pages beside one plain copy of the same bytes into pinned memory."""
    layers, heads, dim, blocks = 32, 8, 128, 512
    whole = torch.zeros(layers, blocks, BLOCK, heads, 2 * dim, dtype=torch.bfloat16, device="cuda")
    of = list(whole.permute(0, 1, 3, 2, 4))
    layouts = [derive_layout(of[0], heads, BLOCK, dim, write)] * layers
    out = BlockCopies(of, layouts, (heads, layers, 2, PAGE, dim))
    table = np.random.default_rng(1).permutation(blocks)
    slabs = [[(table, at + i) for i in range(out.slab_pages)] for at in range(0, 32, out.slab_pages)]
    host = out.next_slab(out.slab_pages).host
    plain = torch.empty_like(host, device="cuda")

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
        for slab in slabs:
            out.begin_copy_out(slab, out.backend.mark())
        out.wait()

    def cross() -> None:
        for _ in slabs:
            host.copy_(plain, non_blocking=True)

    size = host.nbytes * len(slabs)
    ours, bus = seconds(move), seconds(cross)
    record_property("gather and copy, GB/s", round(size / ours / 1e9, 2))
    record_property("plain copy, GB/s", round(size / bus / 1e9, 2))
    print(f"gather and copy {size / ours / 1e9:.1f} GB/s, plain copy {size / bus / 1e9:.1f} GB/s")
    assert ours < 3 * bus
