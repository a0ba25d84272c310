"""Recurrent states beside full attention under vLLM's scheduler: each state that a request goes on from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from keyed_store import KeyedStore

from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore
from cornplug.vllm_connector.kv import idle_saves

from .group_rig import DIM, HEADS, STATE_BYTES, GroupCore, prompts
from .test_groups_scheduler import nothing_left

PROMPT = [(7 * i) % 251 for i in range(300)]
STEPS_END = [64, 128, 192, 256, 288]
"""In blocks of 32 tokens, and steps of 64: the last is where the prompt's last block begins."""

Make = Callable[..., GroupCore]


@pytest.fixture
def engines(cores: Make) -> Make:
    return lambda **options: cores(**{"states": True, "block_size": 32, **options})


@pytest.mark.parametrize(("size", "loaded"), [(32, 288), (48, 288), (16, 288), (64, 256)])
def test_state_saves_fresh_engine_goes_on_from_the_last_block(
    engines: Make, store: MemoryStore, size: int, loaded: int
) -> None:
    first, second = (engines(block_size=size) for _ in range(2))
    first.answer(PROMPT)
    first.settle()
    second.answer(PROMPT, max_tokens=80)
    second.settle()
    assert (second.loaded(), second.failed) == (loaded, 0)
    nothing_left(store, first, second)


def test_state_saves_are_those_at_the_ends_of_steps(engines: Make) -> None:
    first = engines()
    first.answer(PROMPT)
    first.settle()
    # 9 pages of full attention; of both groups of states those that a step left at the end of a block.
    assert first.saved() == 9 + 2 * len(STEPS_END)


def test_state_saves_load_is_one_state_of_each_layer(engines: Make) -> None:
    first, second = engines(), engines()
    first.answer(PROMPT)
    first.settle()
    second.answer(PROMPT)
    page = 32 * 2 * HEADS * DIM * 4
    assert second.counts["bytes", "kv_page", "load"] == 9 * page + 3 * STATE_BYTES


@pytest.mark.parametrize(("shared", "loaded"), [(300, 288), (287, 256), (255, 192), (100, 64), (63, 0)])
def test_state_saves_hit_ends_where_a_state_is_stored(engines: Make, shared: int, loaded: int) -> None:
    first, second = engines(), engines()
    first.answer(PROMPT)
    first.settle()
    second.answer([*PROMPT[:shared], *[300] * 40])
    assert (second.loaded(), second.failed) == (loaded, 0)


def test_state_saves_generated_tokens_have_states_at_each_block(engines: Make, store: MemoryStore) -> None:
    first, second = engines(), engines()
    request = first.answer(PROMPT[:40], max_tokens=100)
    first.settle()
    second.answer([*request.all_token_ids, 5])
    second.settle()
    assert (second.loaded(), second.failed) == (128, 0)
    nothing_left(store, first, second)


def test_state_saves_load_follows_the_engines_own_cache(engines: Make, store: MemoryStore) -> None:
    first, second = engines(), engines()
    first.answer(PROMPT)
    first.settle()
    second.answer([*PROMPT[:70], 300])
    assert second.loaded() == 64
    second.answer(PROMPT)
    assert second.loaded() == 64 + (288 - 64)
    second.settle()
    nothing_left(store, second)


def test_state_saves_weak_hash_names_no_state_to_save(engines: Make, store: MemoryStore) -> None:
    first, second = engines(hash_algo="xxhash_cbor"), engines()
    first.answer(PROMPT)
    first.settle()
    second.answer(PROMPT)
    assert (second.loaded(), second.failed) == (0, 0)
    second.settle()
    nothing_left(store, first, second)


def test_state_saves_of_another_tp_degree_are_another_model(engines: Make, store: MemoryStore) -> None:
    """A rank's part of a state is in an order that only its kernels know."""
    first = engines(tp=2)
    first.answer(PROMPT)
    first.settle()
    alone, both = engines(), engines(tp=2)
    alone.answer(PROMPT)
    both.answer(PROMPT)
    assert (alone.loaded(), both.loaded()) == (0, 288)
    alone.settle()
    both.settle()
    nothing_left(store, alone, both)


def test_state_saves_idle_engine_saves_what_was_used_once(
    engines: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_saves, "_IDLE_DELAY_S", 0)
    first = engines(save="second")
    first.answer(PROMPT)
    assert first.saved() == 0
    first.settle()
    fresh = engines()
    fresh.answer(PROMPT)
    assert fresh.loaded() == 288
    fresh.settle()
    nothing_left(store, first, fresh)


def test_state_saves_damaged_state_fails_the_load_as_a_whole(engines: Make, store: KeyedStore) -> None:
    first, second = engines(), engines()
    first.answer(PROMPT)
    first.settle()
    states = [entry.location for entry in store.entries() if entry.location.size <= 2 * STATE_BYTES]
    assert len(states) == 2 * len(STEPS_END)
    for location in states:
        store.arena[location.offset] ^= 1
    second.answer(PROMPT, max_tokens=20)
    second.settle()
    assert (second.loaded(), second.failed) == (0, 1)
    third = engines()
    third.answer(PROMPT)
    assert (third.loaded(), third.failed) == (288, 0)
    third.settle()
    nothing_left(store, second, third)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.more)])
def test_state_saves_requests_in_any_order_leave_nothing(cores: Make, seed: int) -> None:
    """Two engines with too few blocks, over a small store with faults."""
    chance, save = random.Random(seed), ["always", "second"][seed % 2]
    store = KeyedStore(capacity_bytes=300 << 10)
    faults = [FaultyStore(store.connect()) for _ in range(2)]
    size = chance.choice([16, 32, 48])
    how: dict[str, Any] = {"states": True, "save": save, "block_size": size, "blocks": 1440 // size}
    both = [cores(connect=lambda one=one: one, **how) for one in faults]
    for tokens in prompts(seed, 40):
        for core, fault in zip(both, faults, strict=True):
            if chance.random() < 0.7:
                core.add(tokens, max_tokens=chance.randint(1, 60))
            fault.unavailable, fault.full = chance.random() < 0.1, chance.random() < 0.1
            for _ in range(chance.randint(1, 12)):
                core.step()
                if chance.random() < 0.5:
                    core.drain()
        if chance.random() < 0.2 and (entries := store.entries()):
            store.connect().delete([chance.choice(entries).key], deadline_s=1)
    for core, fault in zip(both, faults, strict=True):
        fault.unavailable = fault.full = False
        core.settle()
    assert sum(core.loaded() for core in both) > 0
    for fault in faults:
        fault.close()
    nothing_left(store, *both)
