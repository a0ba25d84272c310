"""Pages in far stores: a request has them asked for once, waits a few milliseconds, and then recalls them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from time_limits import TimeLimits

from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector.kv.costs import LoadCosts

from ...store.shelved_store import FarShelvedStore
from ..rig import Engine

PROMPT = list(range(150))  # 4 whole pages of 32, and 22 tokens

Make = Callable[..., Engine]


@pytest.fixture
def far(store: MemoryStore, engine: Make) -> FarShelvedStore:
    """The store with all pages of PROMPT far away."""
    engine().run("first", PROMPT)
    found = FarShelvedStore(store.connect())
    found.shelve_all(store)
    assert len(found.far) == 4
    return found


def test_far_pages_request_loads_its_prefix_from_far(engine: Make, far: FarShelvedStore) -> None:
    second = engine(connect=lambda: far)
    request = second.add("b", PROMPT)
    assert second.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    second.settle()
    second.check(request)
    assert request.external_tokens == 128
    assert [len(keys) for keys in far.sought] == [4]
    assert [len(keys) for keys in far.recalls] == [4]
    assert second.counts["hits", "kv_page", "store"] == 4


def test_far_pages_of_several_answers_are_all_recalled(
    engine: Make, far: FarShelvedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder or a bucket is asked for 64 names at a time: the first ones are no reason to go on."""
    monkeypatch.setattr(LoadCosts, "far_wait_s", lambda self, tokens: 60.0)
    far.names_at_once = 1
    second = engine(connect=lambda: far)
    request = second.run("b", PROMPT)
    assert request.external_tokens == 128
    assert [len(keys) for keys in far.recalls] == [4]


def test_far_pages_answer_that_never_comes_costs_milliseconds_once(
    engine: Make, far: FarShelvedStore, within: TimeLimits
) -> None:
    far.answers_after = None
    second = engine(connect=lambda: far)
    request = second.add("b", PROMPT)
    with within(30):
        while second.connector.get_num_new_matched_tokens(request, 0)[0] is None:
            pass
    assert second.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    second.settle()
    second.check(request)
    assert (len(far.sought), far.recalls) == (1, [])
    assert second.counts["misses", "kv_page", "absent"] >= 4


def test_far_pages_answer_absent_ends_the_wait(
    engine: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    monkeypatch.setattr(LoadCosts, "far_wait_s", lambda self, tokens: 60.0)
    far = FarShelvedStore(store.connect())
    one = engine(connect=lambda: far)
    request = one.add("b", PROMPT)
    assert one.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    with within(30):
        while one.connector.get_num_new_matched_tokens(request, 0)[0] is None:
            pass
    one.settle()
    one.check(request)
    assert (request.external_tokens, len(far.sought)) == (0, 1)
    assert one.counts["misses", "kv_page", "absent"] == 4


def test_far_pages_no_store_that_answers_is_not_waited_for(engine: Make, far: FarShelvedStore) -> None:
    far.is_far_up = False
    second = engine(connect=lambda: far)
    request = second.add("b", PROMPT)
    assert second.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert far.sought == []


def test_far_pages_near_ones_are_one_prefix_with_them(engine: Make, far: FarShelvedStore) -> None:
    keys = sorted(far.far)
    second = engine(connect=lambda: far)
    request = second.add("b", PROMPT)
    second.connector.get_num_new_matched_tokens(request, 0)
    (order,) = far.sought
    assert sorted(order) == keys
    far.far -= set(order[:1])
    far.shelved -= set(order[:1])
    second.settle()
    second.check(request)
    assert request.external_tokens == 128


def test_far_pages_after_a_reset_are_not_asked_for(engine: Make, far: FarShelvedStore) -> None:
    second = engine(connect=lambda: far)
    second.connector.reset_cache()
    request = second.add("b", PROMPT)
    assert second.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert far.sought == []
