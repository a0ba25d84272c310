"""Pages on disk: a request waits for them while others run, and no longer than they are worth."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from time_limits import TimeLimits

from cornplug.store.memory import MemoryStore

from ...store.shelved_store import ShelvedStore
from ..conftest import open_in
from ..rig import Engine

PROMPT = list(range(150))  # 4 whole pages of 32, and 22 tokens
OTHER = [9, *PROMPT]

Make = Callable[..., Engine]


@pytest.fixture
def shelved(store: MemoryStore, engine: Make) -> ShelvedStore:
    """The store with all pages of PROMPT on disk."""
    engine().run("first", PROMPT)
    found = ShelvedStore(store.connect())
    found.shelve_all(store)
    assert len(found.shelved) == 4
    return found


def test_page_recalls_request_loads_its_prefix_from_disk(
    engine: Make, store: MemoryStore, shelved: ShelvedStore
) -> None:
    second = engine(connect=lambda: shelved)
    request = second.add("b", PROMPT)
    assert second.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    second.settle()
    second.check(request)
    assert request.external_tokens == 128
    assert [len(keys) for keys in shelved.recalls] == [4]
    assert second.counts["hits", "kv_page", "store"] == 4
    assert not [one for one in second.counts if one[0] == "misses"]
    assert open_in(store) == (0, 0)


def test_page_recalls_others_are_scheduled_meanwhile(engine: Make, shelved: ShelvedStore) -> None:
    shelved.looks = None
    second = engine(connect=lambda: shelved)
    waiting, other = second.add("a", PROMPT), second.add("b", OTHER)
    second.step()
    assert (waiting.status, other.status) == ("waiting", "running")


def test_page_recalls_pages_in_memory_and_on_disk_are_one_prefix(engine: Make, shelved: ShelvedStore) -> None:
    shelved.shelved.pop()
    assert engine(connect=lambda: shelved).run("b", PROMPT).external_tokens == 128
    assert [len(keys) for keys in shelved.recalls] == [3]


def test_page_recalls_disk_that_gives_nothing_costs_a_second_once(
    engine: Make, store: MemoryStore, shelved: ShelvedStore, within: TimeLimits
) -> None:
    shelved.looks = None
    second, began_s = engine(connect=lambda: shelved), time.monotonic()
    with within(15):
        request = second.run("b", PROMPT)
    assert time.monotonic() - began_s >= 1.0
    assert request.external_tokens == 0
    assert second.counts["misses", "kv_page", "disk_late"] == 4
    assert len(shelved.recalls) > 1, "what does not come is asked for again"
    assert open_in(store) == (0, 0)


def test_page_recalls_pages_that_came_in_time_are_loaded(engine: Make, shelved: ShelvedStore) -> None:
    """The first two of four: the others are computed."""
    second = engine(connect=lambda: shelved)
    first = second.add("b", PROMPT)
    assert second.connector.get_num_new_matched_tokens(first, 0) == (None, False)
    for key in shelved.recalls[0][:2]:
        shelved.shelved.discard(key)
    shelved.coming.clear()
    shelved.looks = None
    second.settle()
    assert first.external_tokens == 64
    assert second.counts["misses", "kv_page", "disk_late"] == 2


def test_page_recalls_long_prompt_comes_in_parts(engine: Make, shelved: ShelvedStore) -> None:
    shelved.at_once, shelved.looks = 1, 2
    assert engine(connect=lambda: shelved).run("b", PROMPT).external_tokens == 128
    assert len(shelved.recalls) >= 4


def test_page_recalls_slower_disk_than_computing_is_left_alone(engine: Make, shelved: ShelvedStore) -> None:
    second = engine(connect=lambda: shelved, load_when="pays")
    second.run("warm", OTHER)  # steps are measured
    second.costs.record_recall(1, 100.0)
    request = second.add("b", PROMPT)
    assert second.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert shelved.recalls == []
    second.settle()
    assert second.counts["misses", "kv_page", "cheaper"] == 4


def test_page_recalls_after_a_reset_nothing_comes_from_disk(engine: Make, shelved: ShelvedStore) -> None:
    second = engine(connect=lambda: shelved)
    second.connector.reset_cache()
    assert second.run("b", PROMPT).external_tokens == 0
    assert shelved.recalls == []


def test_page_recalls_aborted_request_leaves_nothing(
    engine: Make, store: MemoryStore, shelved: ShelvedStore
) -> None:
    shelved.looks = None
    second = engine(connect=lambda: shelved)
    request = second.add("b", PROMPT)
    second.step()
    second.finish(request)
    second.settle()
    assert open_in(store) == (0, 0)


def test_page_recalls_store_that_ends_meanwhile_is_a_miss(engine: Make, shelved: ShelvedStore) -> None:
    shelved.looks = None
    second = engine(connect=lambda: shelved)
    request = second.add("b", PROMPT)
    assert second.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    shelved.inner.close()
    second.settle()
    assert request.external_tokens == 0
    assert second.counts["misses", "kv_page", "store_down"] >= 1
