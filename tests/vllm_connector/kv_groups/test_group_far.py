"""Pages of several cache groups in far stores: those of full attention and of the windows come together."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cornplug.store.memory import MemoryStore

from ...store.shelved_store import FarShelvedStore
from .group_rig import GroupCore

PROMPT = [(7 * i) % 251 for i in range(300)]  # 9 whole pages of 32, and 12 tokens
PAGES = 9

Make = Callable[..., GroupCore]


@pytest.fixture
def far(cores: Make, store: MemoryStore) -> FarShelvedStore:
    """The store with all pages of PROMPT far away."""
    first = cores()
    first.answer(PROMPT)
    first.settle()
    found = FarShelvedStore(store.connect())
    found.shelve_all(store)
    return found


def test_group_far_prefix_of_all_groups_is_loaded(cores: Make, far: FarShelvedStore) -> None:
    second = cores(connect=lambda: far)
    second.answer(PROMPT, max_tokens=20)
    second.settle()
    assert (second.loaded(), second.failed) == (PAGES * 32, 0)
    assert len(far.sought) == 1, "a request asks once"


def test_group_far_page_that_is_gone_makes_no_wrong_byte(cores: Make, far: FarShelvedStore) -> None:
    """The rig compares every byte that attention reads, of whichever shorter prefix is loaded."""
    gone = sorted(far.far)[3]
    far.inner.delete([gone], deadline_s=1)
    far.far.discard(gone)
    far.shelved.discard(gone)
    second = cores(connect=lambda: far)
    second.answer(PROMPT, max_tokens=20)
    second.settle()
    assert second.loaded() <= PAGES * 32
    assert second.failed == 0


def test_group_far_store_that_never_answers_costs_nothing_but_time(cores: Make, far: FarShelvedStore) -> None:
    far.answers_after = None
    second = cores(connect=lambda: far)
    second.answer(PROMPT)
    assert (second.loaded(), len(far.sought)) == (0, 1)


def test_group_far_stores_that_are_silent_are_not_asked(
    cores: Make, far: FarShelvedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of 512 absent pages take a millisecond of the engine's thread."""
    far.is_far_up = False
    monkeypatch.setattr(far, "start_far_lookup", lambda keys: pytest.fail("asked"))
    second = cores(connect=lambda: far)
    second.answer(PROMPT)
    assert (second.loaded(), second.failed) == (0, 0)
