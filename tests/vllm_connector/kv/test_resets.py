"""`reset_cache` of the KV connector: this engine computes again, others keep the store's pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine.core import EngineCore

from cornplug.store.base import LOCATION, PROMOTED
from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore
from cornplug.testing.store import fill, key_of
from cornplug.vllm_connector import plugin
from cornplug.vllm_connector.kv.pauses import ResetFilter

from ..conftest import open_in
from ..rig import Engine, runtime

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


def test_stored_before_pages_that_came_from_disk_are_old_after_a_reset(store: MemoryStore) -> None:
    connection = store.connect()
    fill(connection, "a", b"x")
    leases = connection.lease([key_of("a")], ttl_s=9, deadline_s=1)
    before = ResetFilter(runtime(connection))
    offset, size, generation = LOCATION.unpack(leases.locations)
    promoted = replace(leases, locations=LOCATION.pack(offset, size, generation | PROMOTED))
    assert before.count_since_reset(promoted) == 1
    before.begin_reset()
    assert before.was_reset
    assert before.can_distinguish()
    fill(connection, "b", b"x")
    later = connection.lease([key_of("b")], ttl_s=9, deadline_s=1)
    assert (before.count_since_reset(leases), before.count_since_reset(later)) == (0, 1)
    assert before.count_since_reset(promoted) == 0
    assert before.count_since_reset(replace(promoted, arena_id=b"o" * 16)) == 0
    assert before.count_since_reset(replace(leases, arena_id=b"o" * 16)) == 1
