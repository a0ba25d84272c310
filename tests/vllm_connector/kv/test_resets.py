"""`reset_cache` of the KV connector: this engine computes again, others keep the store's pages."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine.core import EngineCore

from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore
from cornplug.vllm_connector import plugin

from ..conftest import open_in
from ..rig import Engine

PROMPT = list(range(150))  # 4 whole pages of 32, and 22 tokens
OTHER = [7, *PROMPT]

Make = Callable[..., Engine]


def test_reset_cache_hides_what_is_stored_from_this_engine_only(engine: Make, store: MemoryStore) -> None:
    engine().run("a", PROMPT)
    second = engine()
    assert second.connector.reset_cache() is True
    assert second.run("b", PROMPT).external_tokens == 0
    assert engine().run("c", PROMPT).external_tokens == 128
    assert open_in(store) == (0, 0)


def test_reset_cache_pages_stored_later_are_loaded(engine: Make) -> None:
    one = engine()
    one.run("a", PROMPT)
    one.connector.reset_cache()
    assert one.run("b", PROMPT).external_tokens == 0
    engine().run("c", OTHER)
    assert one.run("d", OTHER).external_tokens == 128


def test_reset_cache_withdraws_an_offer_that_is_not_taken(engine: Make, store: MemoryStore) -> None:
    engine().run("a", PROMPT)
    second = engine()
    request = second.add("b", PROMPT)
    assert second.connector.get_num_new_matched_tokens(request, 0) == (128, True)
    second.connector.reset_cache()
    assert second.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    second.settle()
    assert open_in(store) == (0, 0)


def test_reset_cache_without_store_loads_nothing_until_it_answers(engine: Make, faulty: FaultyStore) -> None:
    engine().run("a", PROMPT)
    second = engine(connect=lambda: faulty)
    second.connector.reset_cache()
    faulty.full = True
    assert second.run("b", PROMPT).external_tokens == 0
    faulty.full = False
    assert second.run("c", PROMPT).external_tokens == 0


def test_reset_cache_in_a_pause_keeps_the_pages(engine: Make) -> None:
    """As vLLM's own `_reset_caches` calls it, at a pause and before sleep."""
    plugin.register()
    engine().run("a", PROMPT)
    second = engine()

    def reset_prefix_cache(**how: Any) -> bool:
        assert how["reset_connector"]
        return second.connector.reset_cache()

    core = SimpleNamespace(
        reset_prefix_cache=reset_prefix_cache, reset_mm_cache=lambda: None, reset_encoder_cache=lambda: None
    )
    EngineCore._reset_caches(core)  # type: ignore[arg-type]
    assert second.run("b", PROMPT).external_tokens == 128
