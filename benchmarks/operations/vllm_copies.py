"""Operations of a KV worker's copies, counted without a GPU: launches, copies, bytes, Python calls.

A worker saves pages of a prompt and loads them again. Its caches lie as FlashAttention's do on a GPU; they
are CPU tensors, and every tensor that `CountingSide.host` did not make counts as the device's.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cornplug.engine_common.rank_pages import RankPages, page_header
from cornplug.kv_page import PageGeometry, RankSlice
from cornplug.store.base import Leases, PayloadLocation, encode_location
from cornplug.vllm_connector.kv.group_worker import GroupWorker
from cornplug.vllm_connector.kv.metadata import PageLoad, PageSave, PageWrite
from cornplug.vllm_connector.kv.worker import KVWorker
from cornplug.vllm_connector.kv_copies import block_copies
from cornplug.vllm_connector.kv_copies.block_copies import BlockCopies, CopyBackend, CpuBackend
from cornplug.vllm_connector.kv_copies.cache_blocks import BlockSizes
from cornplug.vllm_connector.kv_copies.mover import ByteBudget, PolledMover

LAYERS, HEADS, BLOCK, PAGE = 32, 8, 16, 64
"""Llama 3 8B's cache at TP 1."""
DIM, _REAL_DIM = 8, 128
"""Narrow heads: as many operations, a sixteenth of the bytes."""


@dataclass(slots=True)
class Operations:
    """Operations of some moves."""

    launches: int = 0
    """Kernels: operations of the device that move bytes there."""
    crossings: int = 0
    """Copies between host and device, index tensors' among them."""
    crossed_bytes: int = 0
    pageable: int = 0
    """Crossings that PyTorch leads through a pageable temporary, or that touch pageable memory."""
    waits: int = 0
    """Waits of a thread for the device."""
    engine_calls: int = 0
    """Python and C functions that the engine's thread called."""
    mover_calls: int = 0
    """The same of the mover's thread."""
    hashes: int = 0
    """Checksums among `mover_calls`."""


class CountingSide(TorchDispatchMode):
    """A `CopyBackend` that counts what its copies would do on a device."""

    def __init__(self, counts: Operations) -> None:
        super().__init__()
        self._counts = counts
        self._hosts: list[torch.Tensor] = []

    def enter_thread(self) -> None:
        return None

    def mark(self) -> Any:
        return None

    @contextmanager
    def start_after(self, mark: Any) -> Iterator[None]:
        with self:
            yield

    def record_end(self) -> int:
        return 0

    def is_done(self, end: int) -> bool:
        return True

    def wait(self, end: int) -> None:
        self._counts.waits += 1

    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            self._hosts.append(torch.empty(tuple(shape), dtype=dtype))
        return self._hosts[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            self._crossed(args[0], args[0])
        elif func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if self._at_host(target) != self._at_host(source):
                self._crossed(target, source)
            elif not self._at_host(target):
                self._counts.launches += 1
        elif not (func.is_view or func.__name__.startswith(("empty", "_unsafe_view"))):
            self._counts.launches += 1
        return func(*args, **kwargs)

    def _crossed(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._counts.crossings += 1
        # Indices are as many with narrow heads.
        self._counts.crossed_bytes += source.nbytes * (1 if source.dtype is torch.int64 else _REAL_DIM // DIM)
        # As `copy_requires_temporaries` of ATen/native/cuda/Copy.cu.
        self._counts.pageable += not (target.is_contiguous() and source.is_contiguous())

    def _at_host(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(one.untyped_storage().data_ptr() == storage for one in self._hosts)


class _Backend:
    """FlashAttention's order: a token's heads side by side, K before V."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        size, dim = cache.shape[2], key.shape[2]
        cache[slots // size, :, slots % size, :dim] = key
        cache[slots // size, :, slots % size, dim:] = value


class Moves:
    """A worker, a store in this process and the pages of `requests` prompts of one step."""

    def __init__(self, pages: int, requests: int) -> None:
        self.pages, self.requests = pages, requests
        blocks = pages * requests * PAGE // BLOCK
        geometry = PageGeometry(page_tokens=PAGE, heads=HEADS, layers=LAYERS, dim=DIM, dtype="bfloat16")
        held = RankSlice(heads=range(HEADS), layers=range(LAYERS), writes=True)
        self._page, self._step = geometry, geometry.page_bytes
        self._memory = memoryview(bytearray(pages * requests * self._step))
        store: Any = SimpleNamespace(
            view=self._view, arena_memory=lambda _: self._memory, close=lambda: None,
            are_writable=lambda locations: [True for _ in locations],
        )  # fmt: skip
        whole = torch.randn(LAYERS, 2 * blocks, BLOCK, HEADS, 2 * DIM).to(torch.bfloat16)
        self.caches = list(whole.permute(0, 1, 3, 2, 4))
        names = [str(i) for i in range(LAYERS)]
        self.group = GroupWorker(RankPages(geometry, held, store), BLOCK, 5.0)
        self.worker = KVWorker([self.group], [names])
        layer = SimpleNamespace(impl=_Backend())
        self.worker.register(dict(zip(names, self.caches, strict=True)), dict.fromkeys(names, layer))
        order = torch.randperm(blocks).tolist()
        each = blocks // requests
        self.sources = [tuple(order[i * each : (i + 1) * each]) for i in range(requests)]
        self.targets = [tuple(block + blocks for block in reversed(one)) for one in self.sources]
        self._sums: dict[int, dict[int, int]] = {}

    def _view(self, location: PayloadLocation, *, writable: bool = False) -> memoryview:
        view = self._memory[location.offset : location.offset + location.size]
        return view if writable else view.toreadonly()

    def _location(self, request: int, page: int) -> PayloadLocation:
        return PayloadLocation(bytes(16), (request * self.pages + page) * self._step, self._step, 1)

    def saves(self) -> list[PageSave]:
        """One step's saves; a page's reservation token is its number among all."""
        saves = []
        for request, blocks in enumerate(self.sources):
            writes = [
                PageWrite(page, request * self.pages + page, self._location(request, page))
                for page in range(self.pages)
            ]
            saves.append(PageSave(str(request), tuple(writes), blocks))
        return saves

    def save(self) -> None:
        """Save a step's pages; all of them are acknowledged."""
        saves = self.saves()
        self._begin(lambda: self.worker.start_saves(saves))
        acks = self.worker.take_acks()
        assert acks is not None
        assert not acks.failed_writes
        self._sums = acks.written
        assert len(self._sums) == self.pages * self.requests

    def load(self) -> None:
        """Load all those pages in one step into other blocks, which then hold the same."""
        loads = []
        for request, blocks in enumerate(self.targets):
            key, numbers = bytes(32), [request * self.pages + page for page in range(self.pages)]
            metas = [page_header(key, self._page, self._sums[number]) for number in numbers]
            places = b"".join([encode_location(self._location(request, page)) for page in range(self.pages)])
            pages = Leases(bytes(16), [key] * self.pages, metas, places, numbers)
            loads.append(PageLoad(str(request), 0, self.pages * PAGE, 0, pages, array("q", blocks)))
        self._begin(lambda: self.worker.start_loads(loads))
        acks = self.worker.take_acks()
        assert acks is not None
        assert not acks.failed_loads
        for cache in self.caches:
            for source, target in zip(self.sources, self.targets, strict=True):
                assert torch.equal(cache[list(source)], cache[list(target)])

    def _begin(self, call: Callable[[], None]) -> None:
        call()
        self.worker.drain()


class CountingBatch:
    """vLLM's `swap_blocks_batch`, by `memmove`; what happens in here is no call of the engine's."""

    def __init__(self, counts: Operations) -> None:
        self._counts = counts

    def __call__(self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, **_: Any) -> None:
        profile = sys.getprofile()
        sys.setprofile(None)
        self._counts.launches += 1
        for source, target, size in zip(*(one.tolist() for one in (sources, targets, sizes)), strict=True):
            self._counts.crossings += 1
            self._counts.crossed_bytes += size * _REAL_DIM // DIM
            ctypes.memmove(target, source, size)
        sys.setprofile(profile)


class HostRanges:
    """Memory registered with the device."""

    def register(self, address: int, size: int) -> bool:
        return True

    def unregister(self, address: int) -> None:
        return None


class NoChecksums:
    """Launches of `DeviceChecksums`, whose sums are all alike."""

    def __init__(self, counts: Operations) -> None:
        self._counts = counts

    def begin(self, data: torch.Tensor, segment_bytes: int) -> torch.Tensor:
        self._counts.launches += 2
        with torch.utils._python_dispatch._disable_current_modes():
            return torch.zeros(data.nbytes // segment_bytes, 8, dtype=torch.int64)


def count_arena(pages: int, requests: int) -> dict[str, Operations]:
    """As `count`, of a worker whose GPU copies to and from the store's memory by itself. Its crossings are
    those of the batches, and two small copies a slab each way of indices and checksums."""
    found = {}
    for profiled in (False, True):
        moves, counts = Moves(pages, requests), Operations()
        _with_arena(moves, counts, CpuBackend() if profiled else CountingSide(counts))
        for name in ("save", "load"):
            getattr(moves, name)()
            before = asdict(counts)

            def note(frame: Any, event: str, arg: Any, counts: Operations = counts) -> None:
                counts.engine_calls += event in ("call", "c_call")

            def begin(call: Callable[[], None], moves: Moves = moves, note: Any = note) -> None:
                sys.setprofile(note)
                call()
                moves.worker.drain()
                sys.setprofile(None)

            if profiled:
                moves._begin = begin  # type: ignore[method-assign]
            getattr(moves, name)()
            if profiled:
                found[name].engine_calls = counts.engine_calls - before["engine_calls"]
                del moves._begin
            else:
                found[name] = Operations(
                    **{key: value - before[key] for key, value in asdict(counts).items()}
                )
        moves.worker.close()
    return found


def _with_arena(moves: Moves, counts: Operations, side: CopyBackend) -> None:
    """Have a worker's GPU copy by itself; no byte may take the other way."""
    from cornplug.vllm_connector.kv.arena_moves import ArenaTransfers, SharedDevice  # needs Triton
    from cornplug.vllm_connector.kv_copies.arena_copies import ArenaCopies
    from cornplug.vllm_connector.kv_copies.registered_memory import RegisteredMemory

    worker: Any = moves.group
    ranges, blocks = HostRanges(), worker._out_copies.blocks
    copies = [
        ArenaCopies(blocks, side, NoChecksums(counts), CountingBatch(counts))  # type: ignore[arg-type]
        for _ in range(2)
    ]
    memory = RegisteredMemory(worker._pages.store, ranges.register, ranges.unregister, lambda: None)
    memory._min_bytes = 1
    memory.can_access(bytes(16), len(moves._memory))
    memory._thread.submit(lambda: None).result()
    shared = SharedDevice(memory, PolledMover(ByteBudget(50e9)))
    worker._arena_transfers = ArenaTransfers(
        worker._pages,
        worker._reports,
        shared,
        (copies[0], copies[1]),
        sizes=BlockSizes(BLOCK, BLOCK),
        fallback=worker,
    )
    worker._mover.submit = None


def count(pages: int, requests: int) -> dict[str, Operations]:
    """Operations of "save" and "load", each of one step that moves `pages` of each of so many requests.

    The second step of its kind is counted: the first one makes what later ones keep.
    """
    found = {}
    moves = Moves(pages, requests)
    counts = Operations()
    _on_device(moves.group, counts)
    for name in ("save", "load"):
        move = getattr(moves, name)
        move()
        before = asdict(counts)
        move()
        found[name] = Operations(**{key: value - before[key] for key, value in asdict(counts).items()})
    moves.worker.close()
    for name, calls in _calls(pages, requests).items():
        found[name].engine_calls, found[name].mover_calls, found[name].hashes = calls
    return found


def _on_device(worker: Any, counts: Operations | None) -> None:
    """Make a worker copy as on an accelerator."""
    side: CopyBackend = CountingSide(counts) if counts is not None else CpuBackend()
    for way in ("_out_copies", "_in_copies"):
        of = getattr(worker, way)
        setattr(worker, way, BlockCopies(of._caches, of._layouts, of._shape, direct=False, backend=side))


def _calls(pages: int, requests: int) -> dict[str, tuple[int, int, int]]:
    """Functions called (by the engine's thread, by the mover's) and checksums among the latter; no operation
    is counted beside, as that would call more."""
    calls = {"engine": 0, "mover": 0, "hashes": 0}
    on = False

    def called(who: str) -> Callable[..., None]:
        def note(frame: Any, event: str, arg: Any) -> None:
            if on and event in ("call", "c_call"):
                calls[who] += 1
                calls["hashes"] += getattr(arg, "__name__", "") == "xxh3_64_intdigest"

        return note

    threading.setprofile(called("mover"))
    try:
        moves = Moves(pages, requests)
        _on_device(moves.group, None)
        found = {}

        def begin(call: Callable[[], None]) -> None:
            nonlocal on
            on = True
            sys.setprofile(called("engine"))
            call()
            sys.setprofile(None)
            moves.worker.drain()
            on = False

        for name in ("save", "load"):
            getattr(moves, name)()
            calls.update(engine=0, mover=0, hashes=0)
            moves._begin = begin  # type: ignore[method-assign]
            getattr(moves, name)()
            found[name] = calls["engine"], calls["mover"], calls["hashes"]
            del moves._begin
    finally:
        threading.setprofile(None)
    moves.worker.close()
    return found


def count_offloading(pages: int, tp: int = 1) -> Operations:
    """Operations of vLLM's own offloading worker for one step that saves so many pages, in its canonical
    layout, by one of `tp` ranks. Its crossings are runs of bytes in one call of the driver."""
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.cpu import gpu_worker

    counts, heads = Operations(), HEADS // tp
    row = heads * 2 * _REAL_DIM * 2
    block = BLOCK * row
    if tp == 1:
        run = base.CopyRun(0, 0, block, 1, block, block)
    else:
        run = base.CopyRun(0, 0, row, BLOCK, row, tp * row)
    mapping = base.CanonicalPageMapping(tp * block, block, (run,), 1, 0, True)

    def tensor(kind: str, size: int) -> Any:
        return SimpleNamespace(
            dtype=torch.int8, ndim=2, is_cuda=kind == "cuda", is_xpu=False, shape=(pages * 4, size),
            device=SimpleNamespace(type=kind), data_ptr=lambda: 0, stride=lambda _: size,
        )  # fmt: skip

    def swap(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, **_: Any) -> None:
        counts.launches += 1
        counts.crossings += len(sizes)
        counts.crossed_bytes += int(sizes.sum())

    class Stream:
        def wait_stream(self, stream: Any) -> None:
            """Nothing runs."""

        wait_event = wait_stream

    def event(**_: Any) -> Any:
        return SimpleNamespace(record=lambda stream: None)

    def buffers(operations: int) -> list[torch.Tensor]:
        return [torch.empty(operations, dtype=torch.int64) for _ in range(3)]

    per_page = PAGE // BLOCK
    platform = SimpleNamespace(Stream=Stream, current_stream=Stream, stream=lambda _: nullcontext())
    refs = [base.CanonicalKVCacheRef(i, block, mapping) for i in range(LAYERS)]
    with (
        mock.patch.object(gpu_worker.ops, "swap_blocks_batch", swap),
        mock.patch.object(gpu_worker, "current_platform", platform),
        mock.patch.object(gpu_worker.torch, "Event", event),
        mock.patch.object(gpu_worker, "_new_descriptor_buffers", buffers),
    ):
        handler = gpu_worker.SingleDirectionOffloadingHandler(
            gpu_tensors=[tensor("cuda", block) for _ in refs],
            cpu_tensors=[tensor("cpu", tp * block * per_page) for _ in refs],
            blocks_per_chunk=per_page,
            layer_refs_per_group=[refs],
            gpu_to_cpu=True,
            canonical_layout=True,
        )
        blocks = list(range(pages * per_page))
        source = base.GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        target = gpu_worker.BlockIDsLoadStoreSpec(list(range(pages)))

        def note(frame: Any, event: str, arg: Any) -> None:
            counts.engine_calls += event in ("call", "c_call")

        sys.setprofile(note)
        handler.transfer_async(1, source, target)
        sys.setprofile(None)
    return counts


def small_slabs() -> None:
    """Slabs hold as many of these pages as of an 8B model's."""
    block_copies._STAGED_BYTES = block_copies._STAGED_BYTES * DIM // _REAL_DIM
    with contextlib.suppress(ImportError):  # no Triton
        from cornplug.vllm_connector.kv_copies import arena_copies

        arena_copies._SLAB_BYTES = arena_copies._SLAB_BYTES * DIM // _REAL_DIM
