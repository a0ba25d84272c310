"""`engine.save = "second"` on an idle engine, under vLLM's own scheduler and pool of blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from collaborators import kept
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from cornplug.engine_common import weights_guard
from cornplug.engine_common.page_publish import PagePublisher
from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.cpu_use import WAKE_TIMER, WakeTimer
from cornplug.vllm_connector.kv import idle_saves, tracked_requests
from cornplug.vllm_connector.kv.page_events import PageEvents
from cornplug.vllm_connector.kv.page_keys import PageKeys
from cornplug.vllm_connector.kv.page_saves import PageSaves
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequests

from ..conftest import open_in
from ..rig import SECRET, Engine, tracked_of
from .core_rig import BLOCKS, PROMPT, Core

Make = Callable[..., Core]
MakeEngine = Callable[..., Engine]


def remembered(one: Core, kind: type, *beyond: type) -> list[Any]:
    """References to objects of a kind that idle saves alone keep alive."""
    shared = BlockPool, WakeTimer, PageEvents, PagePublisher, PageSaves, TrackedRequests
    return kept(one.engine.idle, kind, tuple({*shared, Request, *beyond} - {kind}))


@pytest.mark.parametrize(
    "how", [{}, {"tp": 2}, {"second_runner": True, "accelerator": True}, {"page_tokens": 16}]
)
def test_idle_saves_prompt_used_once_reaches_another_engine(
    core: Make, engine: MakeEngine, store: MemoryStore, how: dict[str, Any]
) -> None:
    one, page = core(**how), how.get("page_tokens", 32)
    one.answer(PROMPT)
    assert store.connect().stat(deadline_s=1).used_bytes == 0
    assert one.sleep() <= 1
    assert one.saved() == 149 // page
    # Every byte is checked.
    request = engine(**how).run("b", PROMPT)
    assert request.external_tokens == 149 // page * page
    assert open_in(store) == (0, 0)


def test_idle_saves_nothing_while_a_request_runs(core: Make, store: MemoryStore) -> None:
    one = core()
    one.answer(PROMPT)
    other = one.add([300] * 40, max_tokens=200)
    for _ in range(100):
        one.step()
        one.clock.now += 0.1
    assert not other.is_finished()
    assert store.connect().stat(deadline_s=1).used_bytes == 0
    one.scheduler.finish_requests(other.request_id, RequestStatus.FINISHED_ABORTED)
    one.sleep()
    assert one.saved() == 4 + (40 + 100 - 1) // 32


def test_idle_saves_begin_after_a_pause_not_between_two_requests(core: Make, store: MemoryStore) -> None:
    one = core()
    for turn in range(5):
        one.answer([*PROMPT[:64], *[turn + 300] * 40])
        one.step()
        one.clock.now += 0.04
        one.step()
    assert one.saved() == 2  # the second sighting of the common prefix
    assert store.connect().stat(deadline_s=1).reservations == 0
    one.sleep()
    assert one.saved() == 2 + 5


def test_idle_saves_engine_with_an_alarm_sleeps_through_the_pause(
    core: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would step hundreds of times a second for nothing, beside the API server and the store."""
    one, alarms = core(), list[float]()
    monkeypatch.setattr(WAKE_TIMER, "schedule", lambda seconds: alarms.append(seconds) or True)
    one.answer(PROMPT)
    one.step()
    assert (alarms, one.scheduler.has_requests()) == ([0.05], False)
    # A request ends the pause, and another one begins.
    one.clock.now += 0.04
    one.answer([9, 9])
    one.step()
    one.clock.now += 0.04
    assert (alarms, one.scheduler.has_requests(), one.saved()) == ([0.05, 0.05], False, 0)
    one.clock.now += 0.02
    assert 0 < one.sleep() < 0.5
    assert one.saved() == 4


def test_idle_saves_wait_while_other_replicas_compute_in_step(
    core: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mixture of experts all replicas wait for each step of each."""
    one, computing = core(), [True]
    monkeypatch.setattr(WAKE_TIMER, "has_waiting_replicas", lambda: computing[0])
    one.answer(PROMPT)
    for _ in range(5):
        one.step()  # the store's answers come in steps that the request left to be made
        one.clock.now += 1
    assert (one.scheduler.has_requests(), one.saved()) == (False, 0)
    computing[0] = False
    one.sleep()
    assert one.saved() == 4


def test_idle_saves_done_engine_needs_no_step(core: Make) -> None:
    one = core()
    one.answer(PROMPT)
    one.sleep()
    one.clock.now += 1000
    assert not one.scheduler.has_requests()
    assert not one.engine.connector.has_pending_push_work()


@pytest.mark.parametrize("save", ["always", "never"])
def test_idle_saves_other_policies_have_none(core: Make, save: str) -> None:
    one = core(save=save)
    one.answer(PROMPT)
    one.step()
    one.drain()
    one.sleep()
    assert one.saved() == (4 if save == "always" else 0)
    assert not remembered(one, KVCacheBlock)


def test_idle_saves_end_after_a_second_and_go_on_in_the_next_idleness(
    core: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_saves, "_BATCH_BYTES", 1)  # a page at a time
    one = core()
    one.answer(PROMPT)
    one.sleep(step_s=0.4)
    early = one.saved()
    assert 0 < early < 4
    one.answer([5] * 8)
    one.sleep()
    assert one.saved() == 4


def test_idle_saves_blocks_given_to_another_request_are_not_saved(
    core: Make, engine: MakeEngine, store: MemoryStore
) -> None:
    """All blocks are rewritten before the engine is idle."""
    one = core()
    one.answer(PROMPT)
    filler = [(5 * i + 3) % 241 for i in range((BLOCKS - 1) * 16 - 1)]
    one.answer(filler)
    one.sleep()
    assert one.saved() == len(filler) // 32
    assert engine().run("b", PROMPT).external_tokens == 0
    assert engine(blocks=128).run("c", filler).external_tokens == len(filler) // 32 * 32


@pytest.mark.parametrize("how", [{}, {"second_runner": True, "accelerator": True}])
def test_idle_saves_blocks_given_away_during_the_copy_give_it_up(
    core: Make, engine: MakeEngine, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    one = core(**how)
    one.answer(PROMPT)
    one.step()
    one.clock.now += 0.5
    idle = one.engine.idle
    free = one.pool.get_num_free_blocks()
    # The copies begin, and no acknowledgement reaches the scheduler before the blocks are given away.
    output, moves = one.schedule()
    assert len(moves.meta.saves) == 4
    assert one.pool.get_num_free_blocks() == free
    one.execute((output, moves))
    filler = [(5 * i + 3) % 241 for i in range((BLOCKS - 1) * 16 - 1)]
    one.add(filler)
    began = one.schedule()
    assert len(began[1].meta.cancelled_saves) == 4 == len(set(began[1].meta.cancelled_saves))
    # A worker copies now at the earliest: what it reads is the other request's.
    one.execute(began)
    one.drain()
    one.sleep()
    assert one.saved() + one.saved("preempted") == 4 + len(filler) // 32
    assert not idle
    # Those pages that were acknowledged in time are right to the byte; no other one is there.
    engine(**how).run("b", PROMPT)
    engine(blocks=128, **how).run("c", filler)
    assert open_in(store)[0] == 0


def test_idle_saves_delay_no_reset_of_the_prefix_cache(core: Make, store: MemoryStore) -> None:
    one = core()
    one.answer(PROMPT)
    one.step()
    one.clock.now += 0.5
    began = one.schedule()
    assert len(began[1].meta.saves) == 4
    assert one.scheduler.reset_prefix_cache()
    one.execute(began)
    one.sleep()
    assert open_in(store)[0] == 0
    assert not one.scheduler.has_requests()


def test_idle_saves_reset_drops_remembered_pages(core: Make, store: MemoryStore) -> None:
    one = core()
    one.answer(PROMPT)
    one.step()
    assert one.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
    one.sleep()
    assert one.saved() == 0
    assert store.connect().stat(deadline_s=1).used_bytes == 0


def test_idle_saves_same_tokens_computed_anew_are_another_page(
    core: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same hashes in the same blocks, but of an adapter with other bytes."""
    one, roots = core(), [b"a" * 32, b"b" * 32]
    monkeypatch.setattr(tracked_requests, "page_root", lambda *args, **kwargs: roots[0])
    before = one.answer(PROMPT)
    blocks = [block.block_id for block in one.pool.blocks if block.block_hash is not None]
    one.step()
    assert one.scheduler.reset_prefix_cache()
    # The very same blocks.
    one.pool.free_block_queue = type(one.pool.free_block_queue)(one.pool.blocks[1:])
    del roots[0]
    one.answer(PROMPT)
    assert [block.block_id for block in one.pool.blocks if block.block_hash is not None] == blocks
    one.sleep()
    assert one.saved() == 4
    pages = PageKeys(SECRET, b"b" * 32, 32, ()).keys_until(before.prompt_token_ids, 150)
    assert store.connect().contains(pages, deadline_s=1) == b"\1" * 4


def test_idle_saves_preempted_request_drops_its_earlier_pages(core: Make, store: MemoryStore) -> None:
    """Another connector may fill its new blocks."""
    one = core()
    request = one.add(PROMPT, max_tokens=50)
    one.step()
    tracked = tracked_of(one.engine, request.request_id)
    assert len(tracked.unsaved_keys) == 4
    assert one.scheduler.reset_prefix_cache(reset_running_requests=True)
    one.scheduler.schedule()
    assert tracked.unsaved_keys == {}


def test_idle_saves_replaced_weights_drop_remembered_pages(core: Make, store: MemoryStore) -> None:
    one = core()
    one.answer(PROMPT)
    weights_guard.record_replacement("a test", compat.logger)
    one.sleep()
    assert store.connect().stat(deadline_s=1).used_bytes == 0
    assert not remembered(one, KVCacheBlock)


def test_idle_saves_paused_engine_with_requests_sleeps(core: Make, store: MemoryStore) -> None:
    """A pause completes when the engine has nothing to step for."""
    one = core()
    one.answer(PROMPT)
    one.add([300] * 40, max_tokens=50)
    one.step()
    one.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not one.scheduler.has_requests() or one.sleep() <= 0.05
    assert store.connect().stat(deadline_s=1).used_bytes == 0


def test_idle_saves_evict_nothing_from_a_full_store(core: Make, engine: MakeEngine) -> None:
    """Its entries were used; a page that is asked for once replaces none of them."""
    page_bytes = 4 * 4 * 2 * 32 * 8 * 4
    small = MemoryStore(capacity_bytes=6 * page_bytes)
    engine(connect=small.connect).run("a", [9] * 150)  # 4 pages
    one = core(connect=small.connect)
    one.answer(PROMPT)
    one.sleep()
    stat = small.connect().stat(deadline_s=1)
    assert (stat.entries, stat.evictions) == (6, 0)
    reader = engine(connect=small.connect, save="never")
    # The first pages: a prefix needs them.
    assert reader.run("b", PROMPT).external_tokens == 64
    assert reader.run("c", [9] * 150).external_tokens == 128


def test_idle_saves_store_down_lets_the_engine_sleep(core: Make, faulty: FaultyStore) -> None:
    one = core(connect=lambda: faulty)
    one.answer(PROMPT)
    faulty.unavailable = True
    assert one.sleep() < 0.2


def test_idle_saves_store_that_answered_late_has_the_pages_after_the_next_pause(
    core: Make, faulty: FaultyStore
) -> None:
    one = core(connect=lambda: faulty)
    one.answer(PROMPT)
    faulty.unavailable = True
    one.sleep()
    faulty.unavailable = False
    assert one.saved() == 0
    one.answer([9, 9])
    one.sleep()
    assert one.saved() == 4


def test_idle_saves_growing_store_takes_the_pages_later(core: Make, faulty: FaultyStore) -> None:
    one = core(connect=lambda: faulty)
    faulty.growing = 1
    one.answer(PROMPT)
    one.step()
    one.clock.now += 0.5
    for _ in range(3):
        one.clock.now += 0.01
        one.step()
    assert one.saved() < 4
    faulty.growing = None
    one.sleep()
    assert one.saved() == 4


def test_idle_saves_second_sighting_without_room_is_saved_later(core: Make, faulty: FaultyStore) -> None:
    """A prefix used twice is in the store within a second of idleness, also where the store had to grow."""
    one = core(connect=lambda: faulty)
    one.answer(PROMPT)
    faulty.growing = 0
    one.answer(PROMPT)
    assert one.saved() == 0
    faulty.growing = None
    one.sleep()
    assert one.saved() == 4


def test_idle_saves_remember_no_more_pages_than_the_engine_has(core: Make) -> None:
    one = core()
    for i in range(20):
        one.answer([i + 300] * 150)
    assert 0 < len(remembered(one, KVCacheBlock)) <= BLOCKS, "two blocks a page"
    one.sleep()
    assert one.saved() > 0


@pytest.mark.parametrize("events", [False, True])
def test_idle_saves_keep_only_what_holds_their_pages(core: Make, events: bool) -> None:
    """Of a long prompt with two new pages a turn, thousands of references a request would stay."""
    one, turns = core(events=events), 6
    one.answer([*range(200), *range(200), *range(100)])
    for turn in range(turns):
        one.answer([*range(200), *range(200), *range(100), *[turn + 300] * 70])
    one.step()
    # Two blocks of each page: those of the first prompt, and the two pages of each turn's new tokens.
    assert len(remembered(one, KVCacheBlock)) == 2 * (500 // 32 + 2 * turns)
    # Its tokens are no fewer than the pages of a whole prompt.
    assert not remembered(one, Request, KVCacheBlock)


def test_idle_saves_block_of_two_pages_holds_both(core: Make, engine: MakeEngine) -> None:
    one = core(page_tokens=16, block_size=32)
    one.answer(PROMPT)
    one.sleep()
    # The last page is in a block that is not full: vLLM does not keep it.
    assert one.saved() == 8
    assert engine(page_tokens=16).run("b", PROMPT).external_tokens == 128


@pytest.mark.parametrize("how", [{}, {"second_runner": True, "accelerator": True, "tp": 2}])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.more)])
def test_idle_saves_under_any_load_store_only_right_bytes(
    core: Make, engine: MakeEngine, store: MemoryStore, seed: int, how: dict[str, Any]
) -> None:
    """Few blocks, so requests preempt one another and take blocks that are being copied."""
    dice, one = random.Random(seed), core(**how)
    asked: list[Request] = []
    for _ in range(120):
        what = dice.choice(["add", "abort", "reset", *["step"] * 6, *["rest"] * 4])
        if what == "add":
            family, own = dice.randrange(3), dice.randrange(400, 500)
            prompt = [family] * dice.choice([20, 64, 200]) + [own] * dice.choice([10, 100, 300])
            asked.append(one.add(prompt, max_tokens=dice.choice([1, 30, 200])))
        elif what == "abort" and asked:
            one.scheduler.finish_requests(dice.choice(asked).request_id, RequestStatus.FINISHED_ABORTED)
        elif what == "reset":
            one.scheduler.reset_prefix_cache()
        elif what == "rest":
            one.clock.now += dice.choice([0.01, 0.06, 0.3])
            one.step()
        else:
            one.step()
    while one.scheduler.has_unfinished_requests():
        one.step()
    one.sleep()
    assert one.saved() > 0
    assert one.pool.get_num_free_blocks() == BLOCKS - 1
    for i, request in enumerate(asked):
        reader = engine(blocks=BLOCKS, **how)
        reader.run(f"read {i}", list(request.all_token_ids))
    assert open_in(store)[1] == 0
