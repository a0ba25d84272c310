"""A finished request leaves vLLM's scheduler at once, as in an engine without cornplug, while it is saved."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from collaborators import kept
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector.kv import pauses
from cornplug.vllm_connector.kv.open_saves import OpenSave
from cornplug.vllm_connector.kv.page_saves import PendingPage
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest

from ..conftest import open_in
from ..rig import Engine
from ..wrapped import wrapper_of
from .core_rig import BLOCKS, PROMPT, Core

shut_down = wrapper_of(pauses, "EngineCore.shutdown")
add_request = wrapper_of(pauses, "Scheduler.add_request")

Make = Callable[..., Core]
MakeEngine = Callable[..., Engine]
SAVES = [
    {"save": "always"},
    {"save": "second"},
    {"save": "always", "second_runner": True, "accelerator": True},
]


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's scheduler with the wrap of `pauses`."""
    original = Scheduler.add_request
    monkeypatch.setattr(Scheduler, "add_request", lambda *args: add_request(original, *args))


def other(number: int) -> list[int]:
    """A prompt of 4 whole pages that shares none with others."""
    return [(11 * i + 3 * number) % 251 for i in range(150)]


def asleep(core: Core, store: MemoryStore) -> None:
    """The engine sleeps, and nothing is left of its requests."""
    core.sleep()
    assert not core.engine.connector.has_pending_push_work()
    assert not kept(core.engine.connector, TrackedRequest)
    for reader in (PendingPage, OpenSave):
        assert not kept(core.engine.saves.freed, reader, (BlockPool,))
    assert core.pool.get_num_free_blocks() == BLOCKS - 1
    assert open_in(store) == (0, 0)


@pytest.mark.parametrize("how", SAVES)
def test_request_id_used_again_at_once(
    core: Make, engine: MakeEngine, store: MemoryStore, how: dict[str, Any]
) -> None:
    """As with a gateway's fixed X-Request-Id: vLLM has `assert ..., "duplicate request id"`."""
    one = core(**how)
    for number in range(12):
        one.answer(other(number), name="same")
        assert not one.scheduler.requests
    asleep(one, store)
    assert one.saved() > 0
    # Every byte is checked: no page is stored under the keys of another prompt.
    reader = engine(save="never", blocks=256)
    for number in range(12):
        reader.run(f"r{number}", other(number))


def test_request_id_used_again_by_a_running_request_gives_up_no_save(core: Make, store: MemoryStore) -> None:
    one = core(save="always")
    one.answer(PROMPT, name="same")
    second = one.add(other(1), max_tokens=40, name="same")
    while not second.is_finished():
        one.step()
    asleep(one, store)
    assert one.saved() == 4 + (150 + 39) // 32


@pytest.mark.parametrize("how", SAVES)
def test_reset_right_after_a_request_succeeds(core: Make, store: MemoryStore, how: dict[str, Any]) -> None:
    """An `LLM` that runs in process steps no more once its last request is over, and may be put to sleep."""
    one = core(**how)
    one.answer(PROMPT)
    one.answer(PROMPT)
    assert one.pool.get_num_free_blocks() == BLOCKS - 1
    # As `sleep`, which fails otherwise: vLLM raises RuntimeError.
    assert one.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert one.scheduler.reset_prefix_cache()
    asleep(one, store)


def test_pages_of_a_finished_request_are_given_up_with_their_blocks(
    core: Make, engine: MakeEngine, store: MemoryStore
) -> None:
    one = core(save="always")
    # The last page is complete when the request ends, and the first four are.
    request = one.add(PROMPT[:128], max_tokens=33)
    while not request.is_finished():
        one.step()
        one.drain()
    filler = [(5 * i + 3) % 241 for i in range((BLOCKS - 1) * 16 - 1)]
    one.add(filler)
    # Room was asked for no page yet: the blocks are another request's before a copy began.
    one.step()
    asleep(one, store)
    assert one.saved() == 4 + len(filler) // 32
    assert engine(save="never").run("b", [*request.all_token_ids, 1]).external_tokens == 128
    assert engine(blocks=128, save="never").run("c", filler).external_tokens == len(filler) // 32 * 32


@pytest.mark.parametrize("how", [{}, {"second_runner": True, "accelerator": True}])
def test_pages_of_a_finished_request_are_given_up_during_the_copy(
    core: Make, engine: MakeEngine, store: MemoryStore, how: dict[str, Any]
) -> None:
    one = core(save="always", **how)
    request = one.add(PROMPT)
    output, moves = one.schedule()
    (save,) = moves.meta.saves
    assert len(save.pages) == 4
    one.execute((output, moves))
    assert request.is_finished()
    filler = [(5 * i + 3) % 241 for i in range((BLOCKS - 1) * 16 - 1)]
    one.add(filler)
    began = one.schedule()
    assert set(began[1].meta.cancelled_saves) == {save.name}
    one.execute(began)
    one.drain()
    asleep(one, store)
    # Those pages that were acknowledged in time are right to the byte; no other one is there.
    engine(**how).run("b", PROMPT)
    engine(blocks=128, **how).run("c", filler)


def test_request_id_of_a_request_aborted_while_it_loads(
    core: Make, engine: MakeEngine, store: MemoryStore, repeated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that disconnects and tries again: vLLM keeps the first request until its load has ended."""
    engine(save="always").run("a", PROMPT)
    one = core(save="always")
    worker = one.engine.ranks[0].worker
    held, start = list[Any](), worker.start_loads
    monkeypatch.setattr(worker, "start_loads", held.extend)
    first = one.add(PROMPT, name="same")
    one.step()
    one.scheduler.finish_requests("same", RequestStatus.FINISHED_ABORTED)
    assert first.status == RequestStatus.FINISHED_ABORTED
    second = one.add(other(1), name="same")
    third = one.add(PROMPT, name="third")
    while not second.is_finished():
        one.step()
    # The blocks of the load are nobody else's.
    loading = {block for load in held for block in load.blocks}
    assert all(one.pool.blocks[block].ref_cnt == 1 for block in loading)
    monkeypatch.undo()
    start(held)
    while not third.is_finished():
        one.step()
        one.drain()
    asleep(one, store)
    assert one.engine.counts["misses", "kv_page", "id_in_use"] == 1
    assert one.saved() == 4
    engine(save="never").run("b", other(1))


def test_program_that_ends_after_its_last_request_leaves_its_pages(core: Make, store: MemoryStore) -> None:
    """An `LLM` that runs in process makes no step after its last request."""
    one, ended = core(save="always"), list[Any]()
    one.answer(PROMPT)
    assert one.saved() == 0
    program = SimpleNamespace(scheduler=one.scheduler, step_fn=one.step)
    shut_down(ended.append, program)
    assert ended == [program]
    asleep(one, store)
    assert one.saved() == 4


def test_program_that_ends_in_the_middle_of_a_request_computes_no_more_of_it(core: Make) -> None:
    one, ended = core(save="always"), list[Any]()
    request = one.add(PROMPT, max_tokens=40)
    one.step()
    program = SimpleNamespace(scheduler=one.scheduler, step_fn=one.step)
    shut_down(ended.append, program)
    assert ended == [program]
    assert request.num_output_tokens == 1


def test_program_whose_engine_has_failed_ends_as_in_stock(core: Make) -> None:
    def fail() -> None:
        raise RuntimeError("the executor is gone")

    one, ended = core(save="always"), list[Any]()
    one.answer(PROMPT)
    program = SimpleNamespace(scheduler=one.scheduler, step_fn=fail)
    shut_down(ended.append, program)
    assert ended == [program]
