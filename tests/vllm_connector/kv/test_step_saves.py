"""Pages of one step are one job of the KV worker: requests of a step stay independent."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from operations.vllm_copies import BLOCK, HEADS, PAGE, Moves

from cornplug.vllm_connector.kv_copies import cache_blocks


def held_moves(pages: int, requests: int) -> tuple[Moves, threading.Event, threading.Event]:
    """Moves whose copies to the store set the first event and wait for the second."""
    moves = Moves(pages, requests)
    began, go = threading.Event(), threading.Event()
    view = moves._view

    def held(location: Any, *, writable: bool = False) -> memoryview:
        if location.offset:  # not the first page
            began.set()
            assert go.wait(60)
        return view(location, writable=writable)

    moves.group._pages.store.view = held  # type: ignore[method-assign]
    return moves, began, go


def test_kv_save_given_up_leaves_other_request_of_step() -> None:
    moves, began, go = held_moves(3, 2)
    moves.worker.start_saves(moves.saves())
    assert began.wait(60)
    moves.worker.cancel_saves(["0"])
    go.set()
    moves.worker.drain()
    acks = moves.worker.take_acks()
    assert acks is not None
    assert set(acks.written) == {3, 4, 5}
    assert acks.failed_writes == dict.fromkeys((0, 1, 2), HEADS)
    moves.worker.close()


def test_kv_save_takes_blocks_of_its_pages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step of a long request saves one page: its work does not grow with the request."""
    moves = Moves(40, 1)
    tables: list[int] = []
    original = cache_blocks.kernel_table

    def seen(blocks: Any, *args: Any) -> Any:
        tables.append(len(blocks))
        return original(blocks, *args)

    monkeypatch.setattr("cornplug.vllm_connector.kv.metadata.kernel_table", seen)
    (save,) = moves.saves()
    moves.worker.start_saves([type(save)(save.name, save.pages[37:38], save.blocks)])
    moves.worker.drain()
    assert tables == [PAGE // BLOCK]
    moves.worker.start_saves([save])
    moves.worker.drain()
    acks = moves.worker.take_acks()
    assert acks is not None
    assert len(acks.written) == 40
    moves.worker.close()
