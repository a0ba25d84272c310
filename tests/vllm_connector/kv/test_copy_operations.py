"""Operations of the KV worker's copies on a GPU, counted on CPU tensors, and one step's pages as one job."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cornplug.vllm_connector.kv_copies import block_copies, cache_blocks

from .. import copy_operations
from ..copy_operations import BLOCK, HEADS, LAYERS, PAGE, Moves, count, count_arena, count_offloading

PAGE_BYTES = HEADS * LAYERS * 2 * PAGE * 128 * 2
"""Of an 8B model"""
SEGMENTS = HEADS


try:
    from cornplug.vllm_connector.kv_copies import arena_copies
except ImportError:  # no Triton
    arena_copies = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copies, "_STAGED_BYTES", block_copies._STAGED_BYTES)
    if arena_copies is not None:
        monkeypatch.setattr(arena_copies, "_SLAB_BYTES", arena_copies._SLAB_BYTES)
    copy_operations.small_slabs()


@pytest.mark.parametrize(("pages", "requests"), [(1, 1), (20, 1), (1, 20)])
def test_kv_worker_copies_of_step_are_bounded(pages: int, requests: int) -> None:
    """Launches and waits a slab, not a request; few Python calls, a checksum a head; whole pinned copies."""
    every = pages * requests
    slabs = -(-every // 2)
    found = count(pages, requests)
    save, load = found["save"], found["load"]
    assert (save.launches, save.crossings, save.waits) == (2 * slabs, 3 * slabs, slabs)
    # Each load reports its own end.
    slabs = requests * -(-pages // 2)
    assert load.launches <= 2 * slabs
    assert (load.crossings, load.waits) == (3 * slabs, slabs)
    for one in (save, load):
        assert one.pageable == 0
        assert one.hashes == SEGMENTS * every
        assert every * PAGE_BYTES <= one.crossed_bytes <= 1.001 * every * PAGE_BYTES
    assert save.mover_calls <= (105 if requests == 1 else 125) * every + 200
    assert load.mover_calls <= (105 if requests == 1 else 245) * every + 200
    assert save.engine_calls <= 5 * requests + 40
    assert load.engine_calls <= 32 * requests


@pytest.mark.skipif(arena_copies is None, reason="no Triton here")
@pytest.mark.parametrize(("pages", "requests"), [(1, 1), (20, 1), (1, 20)])
def test_kv_worker_whose_gpu_copies_by_itself_touches_no_byte(pages: int, requests: int) -> None:
    """A run of bytes a page, no other host memory, no checksum on a CPU, and no thread."""
    every = pages * requests
    found = count_arena(pages, requests)
    save, load = found["save"], found["load"]
    slabs = -(-every // 4)
    # A gather, its order, two kernels of the checksums and the batch.
    assert (save.launches, save.crossings) == (5 * slabs, every + 3 * slabs)
    slabs = requests * -(-pages // 4)
    assert load.launches <= 5 * slabs
    assert load.crossings == every + 3 * slabs
    for one in (save, load):
        assert one.pageable == one.mover_calls == one.hashes == 0
        assert every * PAGE_BYTES <= one.crossed_bytes <= 1.001 * every * PAGE_BYTES
    assert save.engine_calls <= (45 if requests == 1 else 75) * every + 200
    assert load.engine_calls <= (42 if requests == 1 else 190) * every + 250


def test_count_offloading_with_tp_2_is_runs_of_token_rows() -> None:
    """The figures of `docs/decisions.md` of the alternative: vLLM's own offloading worker."""
    one, two = count_offloading(10), count_offloading(10, tp=2)
    assert one.launches == two.launches == 1
    assert one.crossings == 10 * LAYERS * PAGE // BLOCK
    assert two.crossings == 10 * LAYERS * PAGE
    assert two.crossed_bytes // two.crossings == HEADS // 2 * 2 * 128 * 2
    assert one.engine_calls < 1200


def held_moves(pages: int, requests: int) -> tuple[Moves, threading.Event, threading.Event]:
    """Moves whose copies to the store wait for the second event; the first tells that one has begun."""
    moves = Moves(pages, requests)
    began, go = threading.Event(), threading.Event()
    view = moves._view

    def held(location: Any, *, writable: bool = False) -> memoryview:
        if location.offset:  # not the first page
            began.set()
            assert go.wait(60)
        return view(location, writable=writable)

    moves.worker._pages.store.view = held  # type: ignore[method-assign]
    return moves, began, go


def test_kv_save_given_up_leaves_other_request_of_step() -> None:
    moves, began, go = held_moves(3, 2)
    moves.worker.start_saves(moves.saves())
    assert began.wait(30)
    moves.worker.give_up_saves(["0"])
    go.set()
    moves.worker.drain()
    acks = moves.worker.acks()
    assert acks is not None
    assert set(acks.written) == {3, 4, 5}
    assert acks.failed_writes == dict.fromkeys((0, 1, 2), SEGMENTS)
    assert moves.worker.finished() == (set(), set())
    moves.worker.close()


def test_kv_save_done_frees_request_before_rest_of_step() -> None:
    moves, began, go = held_moves(1, 3)
    moves.worker.start_saves(moves.saves())
    moves.worker.finishing(["0", "1", "2"])
    assert began.wait(30)
    assert moves.worker.finished()[0] == {"0"}
    go.set()
    moves.worker.drain()
    assert moves.worker.finished()[0] == {"1", "2"}
    moves.worker.close()


def test_kv_save_takes_blocks_of_its_pages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step of a long request saves one page: its work does not grow with the request."""
    moves = Moves(40, 1)
    tables: list[int] = []
    original = cache_blocks.kernel_table

    def seen(blocks: Any, *args: int) -> Any:
        tables.append(len(blocks))
        return original(blocks, *args)

    monkeypatch.setattr("cornplug.vllm_connector.kv.move_reports.kernel_table", seen)
    (save,) = moves.saves()
    moves.worker.start_saves([type(save)(save.request_id, save.pages[37:38], save.blocks)])
    moves.worker.drain()
    assert tables == [PAGE // BLOCK]
    moves.worker.start_saves([save])
    moves.worker.drain()
    acks = moves.worker.acks()
    assert acks is not None
    assert len(acks.written) == 40
    moves.worker.close()
