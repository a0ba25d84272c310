"""Several cache groups under vLLM's scheduler: every byte that attention would read, whoever put it there."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from collaborators import kept
from keyed_store import KeyedStore
from vllm.v1.request import RequestStatus

from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore
from cornplug.vllm_connector.kv import idle_saves, load_offers
from cornplug.vllm_connector.kv.costs import LoadCosts
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest

from ..conftest import open_in
from ..rig import BrokenBackend
from .group_rig import GroupCore, prompts

PROMPT = [(7 * i) % 251 for i in range(300)]  # 9 whole pages of 32, and 12 tokens
PAGES = 9

Make = Callable[..., GroupCore]


def test_groups_scheduler_events_are_of_full_attention(cores: Make, store: MemoryStore) -> None:
    first = cores(events=True)
    first.answer(PROMPT)
    first.settle()
    ours = [event for event in first.events if event.medium == "CPU"]
    theirs = [event for event in first.events if event.medium == "GPU" and event.group_idx == 1]
    blocks = [block for event in theirs for block in event.block_hashes]
    assert [block for event in ours for block in event.block_hashes] == blocks[: PAGES * 2]
    assert {(event.group_idx, event.kv_cache_spec_kind) for event in ours} == {(1, "full_attention")}
    assert [token for event in ours for token in event.token_ids] == PROMPT[: PAGES * 32]
    nothing_left(store, first)


def nothing_left(store: MemoryStore, *cores: GroupCore) -> None:
    """No lease, no reservation, no block and no request is kept."""
    for core in cores:
        assert core.pool.get_num_free_blocks() == core.pool.num_gpu_blocks - 1
        assert not kept(core.connector, TrackedRequest)
        assert not core.connector.has_pending_push_work()
        assert not core.connector.has_pending_block_frees()
    assert open_in(store) == (0, 0)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ({}, {}),
        ({"window": 20}, {"window": 20}),
        ({"window": 1000}, {"window": 1000}),
        ({}, {"tp": 2}),
        ({"tp": 2}, {"block_size": 32}),
        ({"block_size": 64}, {}),
        ({"window": 100}, {"block_size": 64, "window": 100}),
    ],
)
def test_groups_scheduler_fresh_engine_loads_the_prompt(
    cores: Make, store: MemoryStore, writer: dict[str, Any], reader: dict[str, Any]
) -> None:
    first = cores(**writer)
    first.answer(PROMPT)
    first.settle()
    second = cores(**reader)
    second.answer(PROMPT, max_tokens=20)
    second.settle()
    assert (second.loaded(), second.failed) == (PAGES * 32, 0)
    nothing_left(store, first, second)


def test_groups_scheduler_pages_that_do_not_pay_to_load_are_not_offered(
    cores: Make, store: MemoryStore
) -> None:
    first, second = cores(), cores()
    first.answer(PROMPT)
    first.settle()
    with mock.patch.object(LoadCosts, "should_load", return_value=False):
        second.answer(PROMPT)
        second.settle()
    assert second.loaded() == 0
    assert second.saved("present") <= 2 * PAGES, "pages of full attention are offered"
    nothing_left(store, first, second)


@pytest.mark.parametrize("nth", [0, 4, 10, 16, 22])
def test_groups_scheduler_absent_pages_before_a_window_are_saved_again(
    cores: Make, store: KeyedStore, nth: int
) -> None:
    """A hit does not need them, so the lookup has not shown whether the store has them."""
    first, second = cores(), cores()
    first.answer(PROMPT)
    first.settle()
    absent = store.entries()[nth].key
    store.connect().delete([absent], deadline_s=1)
    with mock.patch.object(LoadCosts, "should_load", return_value=False):
        second.answer(PROMPT)
        second.settle()
    assert (second.loaded(), second.saved()) == (0, 1)
    assert store.index.find(absent) is not None
    nothing_left(store, first, second)


def test_groups_scheduler_pages_evicted_while_a_request_waits_are_saved(
    cores: Make, store: KeyedStore
) -> None:
    first, second = cores(), cores()
    first.answer(PROMPT)
    first.settle()
    request = second.add(PROMPT)
    with (
        mock.patch.object(load_offers, "LEASE_S", -1.0),
        mock.patch.object(LoadCosts, "should_load", return_value=False),
    ):
        assert second.connector.get_num_new_matched_tokens(request, 0) == (0, False)
        entries = store.entries()
        store.connect().delete([entry.key for entry in entries], deadline_s=1)
        while not request.is_finished():
            second.step()
            second.drain()
        second.settle()
    assert second.saved() == len(entries)
    nothing_left(store, first, second)


def test_groups_scheduler_load_follows_the_engines_own_cache(cores: Make, store: MemoryStore) -> None:
    first, second = cores(), cores()
    first.answer(PROMPT)
    first.settle()
    second.answer([*PROMPT[:100], 300])
    assert second.loaded() == 96
    second.answer(PROMPT)
    assert second.loaded() == 96 + (PAGES * 32 - 96)
    second.settle()
    nothing_left(store, second)


def test_groups_scheduler_window_is_all_that_is_loaded_of_a_windowed_group(cores: Make) -> None:
    first, second = cores(), cores()
    first.answer(PROMPT)
    first.settle()
    second.answer(PROMPT)
    # 9 pages of the layer that sees all; of three others those of tokens 240 to 288.
    page = 32 * 2 * 4 * 8 * 4
    assert second.counts["bytes", "kv_page", "load"] == (9 + 3 * 2) * page


def test_groups_scheduler_other_window_is_another_model(cores: Make) -> None:
    first, second = cores(window=48), cores(window=100)
    first.answer(PROMPT)
    first.settle()
    second.answer(PROMPT)
    assert second.loaded() == 0


def test_groups_scheduler_second_sighting_is_saved_from_the_engines_own_cache(
    cores: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_saves, "_IDLE_DELAY_S", 1e9)
    monkeypatch.setattr(idle_saves, "_MAX_IDLE_S", 0)
    first = cores(save="second")
    first.answer([*PROMPT[:200], *[300] * 30])
    assert first.saved() == 0
    first.answer([*PROMPT[:200], *[301] * 30])
    first.settle()
    fresh = cores(save="second")
    fresh.answer([*PROMPT[:200], *[302] * 30])
    assert fresh.loaded() == 192
    fresh.settle()
    nothing_left(store, first, fresh)


def test_groups_scheduler_hit_of_weak_hash_is_not_saved(
    cores: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_saves, "_IDLE_DELAY_S", 1e9)
    monkeypatch.setattr(idle_saves, "_MAX_IDLE_S", 0)
    first = cores(save="second", hash_algo="xxhash")
    for last in (300, 301, 302):
        first.answer([*PROMPT[:200], *[last] * 30])
    first.settle()
    assert first.saved() == 0
    nothing_left(store, first)


def test_groups_scheduler_idle_engine_saves_what_was_used_once(
    cores: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_saves, "_IDLE_DELAY_S", 0)
    first = cores(save="second")
    first.answer(PROMPT)
    assert first.saved() == 0
    first.settle()
    assert first.saved() == 3 * PAGES
    fresh = cores()
    fresh.answer(PROMPT)
    assert fresh.loaded() == PAGES * 32
    fresh.settle()
    nothing_left(store, first, fresh)


@pytest.mark.parametrize("nth", range(0, 27, 5))
def test_groups_scheduler_damaged_page_fails_the_load_as_a_whole(
    cores: Make, store: KeyedStore, nth: int
) -> None:
    first, second = cores(window=1000), cores(window=1000)
    first.answer(PROMPT)
    first.settle()
    store.damage(nth)
    second.answer(PROMPT, max_tokens=20)
    second.settle()
    assert (second.loaded(), second.failed) == (0, 1)
    assert second.counts["misses", "kv_page", "corrupt"] == 1
    # It was computed, and is stored again.
    third = cores(window=1000)
    third.answer(PROMPT)
    assert (third.loaded(), third.failed) == (PAGES * 32, 0)
    third.settle()
    nothing_left(store, second, third)


def test_groups_scheduler_failed_loads_side_by_side_do_not_block_each_other(
    cores: Make, store: KeyedStore
) -> None:
    """Computed from the start, each needs more than the other leaves: blocks that windows have moved past."""
    first, second = cores(), cores(blocks=56)
    others = [(5 * i) % 239 for i in range(300)]
    for prompt in (PROMPT, others):
        first.answer(prompt)
    first.settle()
    for nth in range(len(store.entries())):
        store.damage(nth)
    requests = [second.add(prompt) for prompt in (PROMPT, others)]
    for _ in range(100):
        second.step()
        second.drain()
    assert second.failed == 2
    assert all(request.is_finished() for request in requests)
    second.settle()
    nothing_left(store, second)


def test_groups_scheduler_engine_that_takes_less_computes(
    cores: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The windows before another end are other pages."""
    first, second = cores(), cores()
    first.answer(PROMPT)
    first.settle()
    offered = second.connector.get_num_new_matched_tokens

    def fewer(*args: Any) -> Any:
        tokens, later = offered(*args)
        return (tokens - 32, later) if tokens else (tokens, later)

    monkeypatch.setattr(second.connector, "get_num_new_matched_tokens", fewer)
    second.answer(PROMPT, max_tokens=20)
    second.settle()
    assert (second.loaded(), second.failed) == (0, 1)
    nothing_left(store, second)


def test_groups_scheduler_cache_that_cannot_be_mapped_computes(cores: Make, store: MemoryStore) -> None:
    """The scheduler half offers a load before it hears of it."""
    first = cores()
    first.answer(PROMPT)
    first.settle()
    second = cores(backend=BrokenBackend())
    second.answer(PROMPT)
    second.settle()
    assert (second.loaded(), second.failed) == (0, 1)
    before = first.saved()
    second.answer(PROMPT[::-1])
    assert second.saved() == 0
    assert first.saved() == before
    nothing_left(store, second)


def test_groups_scheduler_store_that_is_gone_is_a_miss(cores: Make, faulty: FaultyStore) -> None:
    core = cores(connect=lambda: faulty)
    faulty.unavailable = True
    core.answer(PROMPT, max_tokens=20)
    assert (core.loaded(), core.saved()) == (0, 0)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.more)])
def test_groups_scheduler_requests_in_any_order_leave_nothing(cores: Make, seed: int) -> None:
    """Two engines with too few blocks, over a small store with faults."""
    chance, save = random.Random(seed), ["always", "second"][seed % 2]
    store = KeyedStore(capacity_bytes=300 << 10)
    faults = [FaultyStore(store.connect()) for _ in range(2)]
    window, size = chance.choice([20, 48, 100]), chance.choice([16, 16, 32])
    how: dict[str, Any] = {"window": window, "save": save, "block_size": size, "blocks": 1120 // size}
    both = [cores(connect=lambda one=one: one, **how) for one in faults]
    for tokens in prompts(seed, 40):
        for core, fault in zip(both, faults, strict=True):
            if chance.random() < 0.7:
                core.add(tokens, max_tokens=chance.randint(1, 40))
            fault.unavailable, fault.full = chance.random() < 0.1, chance.random() < 0.1
            for _ in range(chance.randint(1, 12)):
                core.step()
                if chance.random() < 0.5:
                    core.drain()
            if chance.random() < 0.15 and core.scheduler.requests:
                name = chance.choice(sorted(core.scheduler.requests))
                core.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if chance.random() < 0.2 and (entries := store.entries()):
            store.arena[chance.choice(entries).location.offset] ^= 1
        if chance.random() < 0.2 and (entries := store.entries()):
            store.connect().delete([chance.choice(entries).key], deadline_s=1)
    for core, fault in zip(both, faults, strict=True):
        fault.unavailable = fault.full = False
        core.settle()
    assert sum(core.loaded() for core in both) > 0
    for fault in faults:
        fault.close()
    nothing_left(store, *both)
