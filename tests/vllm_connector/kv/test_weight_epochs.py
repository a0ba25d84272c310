"""Weights that are replaced under requests: those keep no page of either weights, later ones share again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cornplug.engine_common import engine_state
from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector.kv import tracked_requests

from ..conftest import open_in
from ..rig import Engine
from .core_rig import Core

Make = Callable[..., Engine]
PROMPT = list(range(100, 232))
"""Four pages of 32 tokens, and some more."""


def identity(config: Any) -> tuple[bytes, dict[str, str]]:
    source = engine_state.current().source()
    assert source is not None
    return (source.path or "start").encode().ljust(32, b"."), {}


def update(path: str) -> None:
    state = engine_state.current()
    state.end_update(state.begin_update(), path, 2**62)


def entries(store: MemoryStore) -> int:
    return store.connect().stat(deadline_s=1).entries


@pytest.fixture
def one(engine: Make, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(tracked_requests, "kv_identity", identity)
    return engine(identity=identity)


def test_kv_epoch_has_pages_of_its_own(one: Engine, engine: Make, store: MemoryStore) -> None:
    one.run("a", PROMPT)
    one.settle()
    assert entries(store) == 4
    update("/new")
    # The first request of an epoch may find its checkpoint unread: it is a miss then.
    one.run("b", [9, *PROMPT])
    one.settle()
    one.run("c", PROMPT)
    one.settle()
    other = engine(identity=identity)
    assert other.run("d", PROMPT).external_tokens == 128
    assert entries(store) >= 8


def test_kv_request_of_two_epochs_saves_and_loads_nothing(
    one: Engine, engine: Make, store: MemoryStore
) -> None:
    engine(identity=identity).run("a", PROMPT)
    running = one.add("r", [7, *PROMPT])
    one.settle()
    before = entries(store)
    waiting = one.add("w", PROMPT)
    assert one.connector.get_num_new_matched_tokens(waiting, 0)[0] == 128
    update("/new")
    assert one.connector.get_num_new_matched_tokens(waiting, 0)[0] == 0
    one.settle()
    one.finish(running)
    one.finish(waiting)
    one.settle()
    assert entries(store) == before
    assert one.counts["misses", "kv_page", "weights_updated"] == 2
    assert open_in(store) == (0, 0)


def test_kv_last_page_of_earlier_weights_is_dropped_and_can_be_saved_later(
    core: Callable[..., Core], store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracked_requests, "kv_identity", identity)
    one = core(save="always", identity=identity)
    # The first four pages are saved, and the fifth is complete when the request ends.
    request = one.add(PROMPT[:128], max_tokens=33)
    while not request.is_finished():
        one.step()
        one.drain()
    assert one.engine.saves
    state = engine_state.current()
    odd = state.begin_update()
    one.step()
    state.end_update(odd, "/new", 2**62)
    one.sleep()
    assert not one.engine.saves
    assert open_in(store) == (0, 0)
    assert entries(store) == 4
    # Under the first weights again, nothing keeps it from being saved.
    update("start")
    one.answer([9, *PROMPT])  # The first request of an epoch may be a miss.
    one.sleep()
    before = entries(store)
    one.answer([*request.all_token_ids])
    one.sleep()
    assert entries(store) == before + 1
