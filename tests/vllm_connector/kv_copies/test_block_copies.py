"""The mover's copies: every layout of vLLM's, the accelerator's branch on CPU tensors, and its order."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from expected_errors import expect_error
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
)
from vllm.v1.worker.utils import allocate_kv_cache

from cornplug.errors import LayoutError
from cornplug.vllm_connector.kv_copies import layout as kv_layout
from cornplug.vllm_connector.kv_copies.block_copies import BlockCopies, CudaBackend
from cornplug.vllm_connector.kv_copies.cache_blocks import BlockSizes, kernel_table
from cornplug.vllm_connector.kv_copies.layout import derive_layout
from cornplug.vllm_connector.kv_copies.mover import KVMover
from devkit.cuda_recorder import CudaRecorder, record_cuda

from ..late_device import STALE, LateDevice
from .test_layout import side_by_side

HEADS, BLOCK, DIM, LAYERS, BLOCKS, PAGE = 3, 16, 8, 4, 12, 32
SHARED = [layout for layout in KVCacheLayout if layout is not KVCacheLayout.LHBNC]
SPLIT = [
    pytest.param(layout, slots, id=f"{layout.name}-{slots}")
    for layout in SHARED
    for slots in (BLOCK, BLOCK // 2)
    # vLLM does not split blocks that hold other layers.
    if slots == BLOCK or layout.is_layer_compact
]
TABLE = (7, 2, 9, 0, 11, 4, 5)


def caches(layout: KVCacheLayout, slots: int = BLOCK, dtype: torch.dtype = torch.float32) -> list[Any]:
    """The engine's caches as vLLM makes them, (blocks, heads, slots, 2 * dim) a layer."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=dtype)
    return allocated(spec, layout, slots)


def allocated(spec: AttentionSpec, layout: KVCacheLayout, slots: int = BLOCK) -> list[Any]:
    """LAYERS caches of this spec as vLLM makes them."""
    names = [f"model.layers.{i}.attn" for i in range(LAYERS)]
    layer, block, *_ = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    tensor = KVCacheTensor(spec.page_size_bytes * BLOCKS * LAYERS, names, layer, block)
    config = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(names, spec)])
    made = allocate_kv_cache(config, torch.device("cpu"), layout, [slots])
    return [made[name] for name in names]


def fill(of: list[Any], slots: int) -> torch.Tensor:
    """Write every token of TABLE as its backend would; what was written, (tokens, layers, 2, heads, dim)."""
    tokens = len(TABLE) * BLOCK
    values = torch.randn(tokens, LAYERS, 2, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    at = (
        torch.from_numpy(kernel_table(TABLE, BlockSizes(BLOCK, slots)))[torch.arange(tokens) // slots] * slots
    )
    for cache, of_layer in zip(of, values.unbind(1), strict=True):
        keys, found = of_layer.to(cache.dtype).unbind(1)
        side_by_side(keys, found, cache, at + torch.arange(tokens) % slots)
    return values.to(of[0].dtype)


def page_of(values: torch.Tensor, page: int) -> torch.Tensor:
    """(heads, layers, 2, tokens, dim)"""
    return values[page * PAGE : (page + 1) * PAGE].permute(3, 1, 2, 0, 4)


def copies(of: list[Any], slots: int, **how: Any) -> BlockCopies:
    layouts = [derive_layout(cache, HEADS, slots, DIM, side_by_side) for cache in of]
    return BlockCopies(of, layouts, (HEADS, LAYERS, 2, PAGE, DIM), **how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direct", [True, False], ids=["cpu", "accelerator"])
@pytest.mark.parametrize(("layout", "slots"), SPLIT)
def test_block_copies_round_trip_every_vllm_layout(
    layout: KVCacheLayout, slots: int, direct: bool, dtype: torch.dtype
) -> None:
    source = caches(layout, slots, dtype)
    values = fill(source, slots)
    side = None if direct else LateDevice()
    table = kernel_table(TABLE, BlockSizes(BLOCK, slots))
    out = copies(source, slots, direct=direct, backend=side)
    host = out.begin_copy_out([(table, 0), (table, 2)], None).wait_host()
    assert torch.equal(host[0], page_of(values, 0))
    assert torch.equal(host[1], page_of(values, 2))

    target = caches(layout, slots, dtype)
    for cache in target:
        cache.fill_(5)
    into = copies(target, slots, direct=direct, backend=LateDevice() if side else None)
    slab = into.next_slab(2)
    slab.host.copy_(torch.stack([page_of(values, 1), page_of(values, 2)]))
    start, end = PAGE + 3, 3 * PAGE - 5
    into.begin_copy_in(slab, table, 1, 2, (start, end), None)
    into.wait()
    tokens = torch.arange(len(TABLE) * BLOCK)
    at, slot = torch.from_numpy(table)[tokens // slots], tokens % slots
    expected = caches(layout, slots, dtype)
    for i, cache in enumerate(expected):
        cache.fill_(5)
        keys, found = values[start:end, i].unbind(1)
        side_by_side(keys, found, cache, (at * slots + slot)[start:end])
        assert torch.equal(target[i], cache)


@pytest.mark.parametrize("layout", SHARED, ids=lambda one: one.name)
def test_block_copies_one_allocation_is_one_part(layout: KVCacheLayout) -> None:
    """vLLM's layers lie evenly in one allocation: not a launch for each of them."""
    assert len(copies(caches(layout), BLOCK, direct=False).blocks.views) == 1


@pytest.mark.parametrize("layout", SHARED, ids=lambda one: one.name)
@pytest.mark.parametrize("direct", [True, False], ids=["cpu", "accelerator"])
def test_block_copies_round_trip_latents(layout: KVCacheLayout, direct: bool) -> None:
    """One plane of one head, all layers in one gather."""

    def write(latent: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache[slots // BLOCK, :, slots % BLOCK] = latent

    source = allocated(
        MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=DIM, dtype=torch.float32), layout
    )
    layouts = [derive_layout(cache, 1, BLOCK, DIM, write, 1) for cache in source]
    for cache in source:
        cache.copy_(torch.randn(cache.shape))
    shape, table = (1, LAYERS, 1, PAGE, DIM), np.array(TABLE)
    out = BlockCopies(source, layouts, shape, direct=direct, backend=None if direct else LateDevice())
    assert direct or len(out.blocks.views) == 1
    host = out.begin_copy_out([(table, 2), (table, 0)], None).wait_host().clone()
    blocks = [TABLE[i : i + 2] for i in (4, 0)]
    for page, of in zip(host, blocks, strict=True):
        for layer, cache in enumerate(source):
            assert torch.equal(page[0, layer, 0], cache[list(of)].flatten(0, 2))
    slab = out.next_slab(1)
    slab.host.copy_(host[:1])
    out.begin_copy_in(slab, table, 0, 1, (0, PAGE), None)
    out.wait()
    for cache in source:
        assert torch.equal(cache[list(blocks[0])], cache[list(blocks[1])])


def test_block_copies_separate_allocations_are_parts() -> None:
    source = [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM) for _ in range(LAYERS)]
    values = fill(source, BLOCK)
    out = copies(source, BLOCK, direct=False)
    assert len(out.blocks.views) == LAYERS
    assert torch.equal(out.begin_copy_out([(np.array(TABLE), 1)], None).wait_host()[0], page_of(values, 1))


def test_derive_layout_across_blocks_is_refused_unallocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = caches(KVCacheLayout.LHBNC)[0]
    made: list[Any] = []
    for name in ("zeros", "empty", "meshgrid", "full"):
        monkeypatch.setattr(kv_layout.torch, name, lambda *a, **k: made.append(a))
    with expect_error(LayoutError, reason="layout", match="VLLM_KV_CACHE_LAYOUT"):
        derive_layout(cache, HEADS, BLOCK, DIM, side_by_side)
    assert not made


# -- copies that arrive late ------------------------------------------------------------------


def test_copies_into_strided_memory_are_read_stale() -> None:
    """What the mover did before: the control that `LateDevice` sees such a thing."""
    device = LateDevice()
    source = torch.randn(PAGE, HEADS, DIM)
    host = device.allocate_host((HEADS, LAYERS, 2, PAGE, DIM), torch.float32)
    with device:
        host[:, 0, 0].copy_(source.transpose(0, 1), non_blocking=True)
    device.finish()
    assert device.pageable == 1
    assert (host[:, 0, 0] == STALE).all()


def test_block_copies_on_late_device_wait_for_data() -> None:
    device = LateDevice()
    source = caches(KVCacheLayout.LBNHC)
    values = fill(source, BLOCK)
    out = copies(source, BLOCK, direct=False, backend=device)
    table = np.array(TABLE)
    for pages in ([0, 1, 2], [2], [1, 0]):
        host = out.begin_copy_out([(table, page) for page in pages], None).wait_host()
        for row, page in enumerate(pages):
            assert torch.equal(host[row], page_of(values, page))
    assert device.pageable == 0


def test_block_copies_pages_of_several_requests_are_one_slab() -> None:
    device = LateDevice()
    source = caches(KVCacheLayout.LBNHC)
    values = fill(source, BLOCK)
    out = copies(source, BLOCK, direct=False, backend=device)
    whole, end = np.array(TABLE), np.array(TABLE[2:])
    host = out.begin_copy_out([(end, 0), (whole, 0), (whole, 2), (end, 1)], None).wait_host()
    for row, page in enumerate((1, 0, 2, 2)):
        assert torch.equal(host[row], page_of(values, page))


def test_block_copies_slab_ahead_leaves_first_slab_whole() -> None:
    """The host reads one slab while the next one is on its way, and each waits for its event only."""
    device = LateDevice()
    source = caches(KVCacheLayout.LBNHC)
    values = fill(source, BLOCK)
    out, table = copies(source, BLOCK, direct=False, backend=device), np.array(TABLE)
    first = out.begin_copy_out([(table, 0)], None)
    for page in (1, 2, 0, 1):
        following = out.begin_copy_out([(table, page)], None)
        before = following.host.clone()
        assert torch.equal(first.wait_host()[0], page_of(values, (page - 1) % 3))
        assert torch.equal(following.host, before), "waited for more than its event"
        first = following
    assert torch.equal(first.wait_host()[0], page_of(values, 1))


def test_block_copies_slab_into_blocks_is_free_only_after_end() -> None:
    """`LateDevice` notices host memory that changes while the device reads it."""
    device = LateDevice()
    target = caches(KVCacheLayout.LBNHC)
    into, table = copies(target, BLOCK, direct=False, backend=device), np.array(TABLE)
    for page in (0, 1, 2, 0):
        slab = into.next_slab(1)
        slab.host.fill_(page)
        into.begin_copy_in(slab, table, page, 1, (0, 3 * PAGE), None)
    into.wait()
    assert {float(target[0][block].unique()) for block in TABLE[:6]} == {0, 1, 2}


def test_block_copies_failed_slab_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    out = copies(caches(KVCacheLayout.LBNHC), BLOCK, direct=False, backend=device)
    ends: list[int] = []
    monkeypatch.setattr(device, "wait", ends.append)
    monkeypatch.setattr(out.blocks, "views", [None])
    with pytest.raises(AttributeError):
        out.begin_copy_in(out.next_slab(1), np.array(TABLE), 0, 1, (0, PAGE), None)
    out.wait()
    assert ends == [1]


# -- CUDA without a GPU -----------------------------------------------------------------------


def on_cuda(*, urgent: bool = False) -> BlockCopies:
    """Copies over fake CUDA caches in the order of FlashAttention's."""
    block = HEADS * BLOCK * 2 * DIM
    whole = torch.empty(LAYERS * BLOCKS * block, dtype=torch.bfloat16, device="cuda:0")
    order = (block, 2 * DIM, HEADS * 2 * DIM, 1)
    of = [whole.as_strided((BLOCKS, HEADS, BLOCK, 2 * DIM), order, i * BLOCKS * block) for i in range(LAYERS)]
    real = torch.utils._python_dispatch._disable_current_modes
    with real():
        like = torch.zeros(LAYERS * BLOCKS * block, dtype=torch.bfloat16).as_strided(of[0].shape, order)
        layout = derive_layout(like, HEADS, BLOCK, DIM, side_by_side)
    return BlockCopies(of, [layout] * LAYERS, (HEADS, LAYERS, 2, PAGE, DIM), urgent=urgent)


@pytest.mark.parametrize("pages", [[0], [0, 1, 2]])
def test_copy_out_on_cuda_is_one_pinned_copy_and_event(pages: list[int]) -> None:
    events = CudaRecorder()
    with record_cuda(events):
        out = on_cuda()
        mark = out.backend.mark()
        out.begin_copy_out([(np.array(TABLE), page) for page in pages], mark).wait_host()
    assert events.events == [
        ("event recorded on", "the engine's"),
        ("our stream waits",),
        ("cpu to cuda", "late", "whole", "pinned"),  # where the tokens lie
        ("index",),
        ("cuda to cpu", "late", "whole", "pinned"),
        ("event recorded on", "ours"),
        ("event waited for",),
    ]


def test_copy_in_on_cuda_is_one_pinned_copy_and_wait() -> None:
    events = CudaRecorder()
    with record_cuda(events):
        into = on_cuda(urgent=True)
        into.begin_copy_in(into.next_slab(2), np.array(TABLE), 0, 2, (3, 60), into.backend.mark())
        into.wait()
    assert events.events[2:] == [
        ("cpu to cuda", "late", "whole", "pinned"),
        ("cpu to cuda", "late", "whole", "pinned"),
        ("index_put_",),
        ("event recorded on", "ours, urgent"),
        ("event waited for",),
    ]


def test_kv_mover_thread_sets_device_of_rank() -> None:
    """Else a rank above 0 makes itself a context, half a gigabyte, on GPU 0."""
    events, done = CudaRecorder(), threading.Event()
    with record_cuda(events):
        side = CudaBackend(torch.device("cuda", 1))

    def job() -> Any:
        events.note("job in", threading.current_thread().name)
        done.set()
        yield

    with record_cuda(events):
        mover = KVMover(side.enter_thread)
        mover.submit(job(), urgent=True)
        assert done.wait(30)
        mover.close()
    assert events.events == [("device set in", "cornplug-kv"), ("job in", "cornplug-kv")]


# -- who goes first ---------------------------------------------------------------------------


def test_kv_mover_loads_run_before_rest_of_saves() -> None:
    order: list[str] = []
    first, go = threading.Event(), threading.Event()

    def save(name: str) -> Any:
        for i in itertools.count():
            order.append(f"{name}{i}")
            first.set()
            go.wait(60)
            if i == 2:
                return
            yield

    def load(name: str) -> Any:
        order.append(name)
        yield
        order.append(name)

    mover = KVMover(lambda: None)
    mover.submit(save("a"), urgent=False)
    mover.submit(save("b"), urgent=False)
    assert first.wait(30)
    mover.submit(load("x"), urgent=True)
    mover.submit(load("y"), urgent=True)
    go.set()
    assert mover.wait(30)
    mover.close()
    assert order == ["a0", "x", "x", "y", "y", "a1", "a2", "b0", "b1", "b2"]


class Slabs:
    """A mover on a clock that only its slabs advance, 4 ms each."""

    def __init__(self) -> None:
        self.now, self.moved, self.going = 100.0, queue.Queue[str](), threading.Event()
        self.going.set()
        self.mover = KVMover(lambda: None, clock=lambda: self.now)

    def submit(self, name: str, slabs: int, *, urgent: bool = False) -> None:
        def job() -> Any:
            for _ in range(slabs):
                self.now += 0.004
                self.moved.put(name)
                self.going.wait(30)
                yield

        self.mover.submit(job(), urgent=urgent)

    def hold(self) -> Callable[[], None]:
        """Stop in the next slab until the function is called that is returned."""
        self.going.clear()
        return self.going.set

    def seen(self, count: int) -> list[str]:
        """The next slabs; fails if there are fewer, or more within a tenth of a second."""
        found = [self.moved.get(timeout=30) for _ in range(count)]
        with pytest.raises(queue.Empty):
            self.moved.get(timeout=0.1)
        return found

    def step(self, seconds: float = 0.0, pause_s: float = 0.0, *, computes: bool = True) -> None:
        """A step of the engine whose forward pass takes so long, `pause_s` after the last step."""
        self.now += pause_s
        self.mover.begin_step(computes=computes)
        self.now += seconds
        self.mover.end_step()


@pytest.fixture
def slabs() -> Iterator[Slabs]:
    slabs = Slabs()
    yield slabs
    slabs.mover.close()


def test_kv_saves_of_idle_engine_stop_at_request(slabs: Slabs) -> None:
    slabs.step(computes=False)
    go = slabs.hold()
    slabs.submit("save", 9)
    assert slabs.moved.get(timeout=30) == "save"
    slabs.step()
    go()
    for _ in range(4):  # 0.4 s: a short answer
        assert slabs.seen(0) == []
        slabs.step(0.1)
    slabs.submit("load", 2, urgent=True)
    assert slabs.seen(2) == ["load"] * 2
    slabs.step(computes=False)
    assert slabs.seen(8) == ["save"] * 8


def test_kv_saves_of_busy_engine_take_ten_ms_a_step(slabs: Slabs) -> None:
    slabs.step(0.4)
    slabs.step(0.1)
    slabs.step()
    slabs.submit("save", 9)
    assert len(slabs.seen(3)) == 3  # 12 ms: the slab that was begun ends
    slabs.step()
    assert len(slabs.seen(3)) == 3
    slabs.step(pause_s=60)  # a request after a pause
    assert slabs.seen(0) == []
    slabs.step(computes=False)
    assert len(slabs.seen(3)) == 3


def test_kv_saves_keep_up_with_long_steps(slabs: Slabs) -> None:
    slabs.step(0.79)
    slabs.step()
    slabs.submit("save", 20)
    assert len(slabs.seen(10)) == 10  # 39.5 ms, a twentieth
    slabs.step()
    assert len(slabs.seen(3)) == 3


def test_kv_mover_wait_ends_held_saves(slabs: Slabs) -> None:
    slabs.step()
    slabs.submit("save", 9)
    assert slabs.seen(0) == []
    assert slabs.mover.wait(30)
    assert len(slabs.seen(9)) == 9


def test_kv_mover_broken_job_leaves_next_running(caplog: pytest.LogCaptureFixture) -> None:
    def breaks() -> Any:
        raise ValueError("broken")
        yield

    def works() -> Any:
        done.append(True)
        yield

    done: list[bool] = []
    mover = KVMover(lambda: None)
    mover.submit(breaks(), urgent=True)
    mover.submit(works(), urgent=True)
    assert mover.wait(30)
    mover.close()
    assert done
    assert not mover.submit(works(), urgent=True)
