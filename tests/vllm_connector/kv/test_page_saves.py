"""Which pages are saved: all, those that a second request has, or none (`engine.save`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore

from ..conftest import open_in
from ..rig import Engine, Request

PROMPT = [(7 * i) % 251 for i in range(150)]  # 4 whole pages of 32, and 22 tokens

Make = Callable[..., Engine]


def saved(engine: Engine, outcome: str = "stored") -> float:
    return engine.counts.get(("saves", "kv_page", outcome), 0)


def run_with_local_hit(engine: Engine, name: str, tokens: list[int], local: int) -> Request:
    """A request whose first `local` tokens are in the engine's own prefix cache."""
    request = engine.add(name, tokens, local_tokens=local)
    request.blocks = [engine.free_blocks.pop(0) for _ in range(local // engine.block_size)]
    for rank in engine.ranks:
        rank.compute(request, engine.block_size, 0, local)
    engine.settle()
    engine.check(request)
    return request


def test_page_saves_never_offers_and_still_loads(engine: Make, store: MemoryStore) -> None:
    first = engine(save="never")
    first.run("a", PROMPT)
    assert not any(metric == "saves" for metric, *_ in first.counts)
    assert store.connect().stat(deadline_s=1).entries == 0
    engine().run("b", PROMPT)
    assert engine(save="never").run("c", PROMPT).external_tokens == 128


@pytest.mark.parametrize("tp", [1, 2])
def test_page_saves_second_request_on_one_engine_saves(engine: Make, store: MemoryStore, tp: int) -> None:
    first = engine(save="second", tp=tp)
    first.run("a", PROMPT)
    assert (saved(first), saved(first, "first_sight")) == (0, 4)
    assert store.connect().stat(deadline_s=1).used_bytes == 0
    first.run("b", PROMPT)
    assert (saved(first), saved(first, "first_sight")) == (4, 4)
    assert engine(save="second").run("c", PROMPT).external_tokens == 128
    assert open_in(store) == (0, 0)


def test_page_saves_second_engine_saves_what_another_computed(engine: Make) -> None:
    engine(save="second").run("a", PROMPT)
    second = engine(save="second", app="another")
    assert second.run("b", PROMPT).external_tokens == 0
    assert saved(second) == 4
    assert engine(save="second").run("c", PROMPT).external_tokens == 128


@pytest.mark.parametrize("local", [64, 128])
def test_page_saves_own_prefix_cache_hit_saves_its_blocks(engine: Make, local: int) -> None:
    """Else a prefix that one engine serves all day from its own cache is never stored."""
    first = engine(save="second")
    first.finish(first.run("a", PROMPT))
    run_with_local_hit(first, "b", [*PROMPT[:128], *range(900, 960)], local)
    assert saved(first) == 4
    assert engine().run("c", PROMPT).external_tokens == 128


def test_page_saves_unshared_tail_is_not_copied(engine: Make) -> None:
    first = engine(save="second")
    first.run("a", PROMPT + [300] * 200)
    first.run("b", PROMPT + [301] * 200)
    assert saved(first) == 4
    assert saved(first, "first_sight") == 4 + 2 * (350 // 32 - 4)


def test_page_saves_session_continues_saves_its_answer(engine: Make) -> None:
    first = engine(save="second")
    request = first.run("a", PROMPT)
    for token in range(10):  # the fifth page
        request.all_token_ids.append(token)
        first.step()
    first.finish(request)
    assert saved(first) == 0
    first.run("b", [*request.all_token_ids, 5, 6, 7])
    assert saved(first) == 5


def test_page_saves_preempted_request_is_one_sighting(engine: Make) -> None:
    first = engine(save="second")
    first.run("a", PROMPT)
    request = first.add("b", PROMPT + [300] * 200)
    first.step()  # 4 pages reserved, 6 at first sight
    first.preempt(request)
    first.settle()
    first.check(request)
    assert saved(first) <= 4
    assert saved(first, "first_sight") == 4 + 6


def test_page_saves_chunked_prefill_names_each_page_once(engine: Make, faulty: FaultyStore) -> None:
    first = engine(connect=lambda: faulty, save="second")
    request = first.add("a", PROMPT)
    first.settle(chunk=10)
    first.check(request)
    assert (saved(first), saved(first, "first_sight")) == (0, 4)
    # Chunks as small as a decoding request's steps: of these 15, two ask.
    assert (faulty.calls["contains"], faulty.calls["reserve"]) == (1, 2)


def test_page_saves_growing_store_stores_seen_pages_later(engine: Make, faulty: FaultyStore) -> None:
    first = engine(connect=lambda: faulty, save="second")
    first.run("a", PROMPT)
    faulty.growing = 1
    request = first.add("b", PROMPT)
    first.step(chunk=100)
    faulty.growing = None
    first.settle()
    first.check(request)
    assert saved(first) == 4
