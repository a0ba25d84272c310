"""Room for pages is asked for in one step and given in a later one: no step waits for the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cornplug.errors import StoreUnavailable
from cornplug.store.base import Reservation, ReserveTerms
from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore
from cornplug.vllm_connector.kv.metadata import PageSave

from ..conftest import open_in
from ..rig import Engine, tracked_of

PROMPT = [(7 * i) % 251 for i in range(150)]  # 4 whole pages of 32, and 22 tokens

Make = Callable[..., Engine]


class _Later:
    """An answer that comes when the store `answers`."""

    def __init__(self, store: LateStore, reply: Any) -> None:
        self._store, self._reply = store, reply

    def poll(self) -> Any:
        if self._store.lost:
            raise StoreUnavailable("no answer in time", reason="store_timeout")
        return self._reply if self._store.answers else None


class LateStore(FaultyStore):
    """A store that is asked now and answers later."""

    answers = True
    lost = False

    def post_reserve(
        self, entries: Sequence[tuple[bytes, int]], terms: ReserveTerms, *, deadline_s: float
    ) -> _Later:
        return _Later(self, self.reserve(entries, terms, deadline_s=deadline_s))

    def post_commit(self, written: Sequence[tuple[Reservation, bytes]], **how: Any) -> _Later:
        return _Later(self, self.commit(written, **how))


@pytest.fixture
def late(store: MemoryStore) -> LateStore:
    return LateStore(store.connect())


@pytest.fixture
def made(engine: Make, late: LateStore) -> Engine:
    return engine(connect=lambda: late)


def saved(engine: Engine, outcome: str = "stored") -> float:
    return engine.counts.get(("saves", "kv_page", outcome), 0)


def test_page_saves_answered_a_step_later_are_stored(made: Engine, engine: Make) -> None:
    made.add("a", PROMPT)
    step = made.schedule()
    assert step.meta.saves == [], "the step that completes pages asks and goes on"
    made.update(made.execute(step))
    made.settle()
    assert saved(made) == 4
    assert engine().run("b", PROMPT).external_tokens == 128


def test_page_saves_wait_for_answer_over_steps(made: Engine, late: LateStore) -> None:
    late.answers = False
    request = made.add("a", PROMPT)
    for token in range(10):  # one more page
        request.all_token_ids.append(token)
        made.step()
    assert (saved(made), made.connector.has_pending_push_work()) == (0, True)
    late.answers = True
    made.settle()
    assert saved(made) == 5
    made.check(request)


def test_page_saves_send_blocks_of_their_pages_only(made: Engine) -> None:
    request = made.add("a", PROMPT)
    made.settle()
    moves: list[PageSave] = []
    for token in range(12):
        if token < 10:
            request.all_token_ids.append(token)
        step = made.schedule()
        moves += step.meta.saves
        made.update(made.execute(step))
    (save,) = moves
    assert [page.index for page in save.pages] == [0]
    assert list(save.blocks) == request.blocks[8:10]  # the fifth page, in blocks of 16


def test_page_saves_of_finished_request_wait_for_the_answer(
    made: Engine, late: LateStore, engine: Make
) -> None:
    late.answers = False
    request = made.add("a", PROMPT)
    made.step()
    made.finish(request)
    for _ in range(3):
        made.step()
    late.answers = True
    made.settle()
    assert saved(made) == 4
    assert engine().run("b", PROMPT).external_tokens == 128


def test_page_saves_of_finished_request_may_be_refused(made: Engine, late: LateStore) -> None:
    late.full, late.answers = True, False
    request = made.add("a", PROMPT)
    made.step()
    made.finish(request)
    assert made.requests == {}
    late.answers = True
    made.settle()
    assert saved(made, "full") == 4


def test_page_saves_of_preempted_request_write_none_of_its_old_blocks(
    made: Engine, late: LateStore, store: MemoryStore, engine: Make
) -> None:
    late.answers = False
    request = made.add("a", PROMPT)
    made.step()
    made.preempt(request)
    other = made.add("b", [300 + i for i in PROMPT])
    late.answers = True
    made.settle()
    made.check(request)
    made.check(other)
    assert saved(made, "preempted") == 4
    assert open_in(store) == (0, 0)
    assert engine().run("c", [300 + i for i in PROMPT]).external_tokens == 128


@pytest.mark.parametrize("waits", [0, 3])
def test_page_saves_of_preempted_request_are_stored_once_computed_again(
    made: Engine, late: LateStore, waits: int
) -> None:
    """Its first reservations are not given back yet when it offers those pages again."""
    late.answers = not waits
    request = made.add("a", PROMPT)
    made.step()
    made.preempt(request)
    for token in range(waits):
        made.step()
        request.all_token_ids.append(token)
    late.answers = True
    for token in range(3):
        made.step()
        request.all_token_ids.append(token)
    made.settle()
    made.check(request)
    assert (saved(made), saved(made, "preempted"), saved(made, "pending")) == (4, 4, 0)


@pytest.mark.parametrize("finishes", [False, True])
def test_page_saves_never_answered_are_counted_and_hold_nothing(
    made: Engine, late: LateStore, finishes: bool
) -> None:
    late.answers = False
    request = made.add("a", PROMPT)
    made.step()
    if finishes:
        made.finish(request)
    late.lost = True
    made.settle()
    assert saved(made, "store_timeout") == 4
    assert not made.connector.has_pending_push_work()
    assert (made.requests == {}) is finishes


def test_page_saves_not_taken_by_store_are_offered_again(made: Engine, late: LateStore) -> None:
    late.growing = 1
    request = made.add("a", PROMPT)
    made.settle()
    late.growing = None
    for token in range(3):
        request.all_token_ids.append(token)
        made.step()
    made.settle()
    assert saved(made) == 4


def test_page_saves_second_sight_of_short_request_is_remembered(engine: Make, late: LateStore) -> None:
    """The request ends before the step that would take the answer."""
    first = engine(connect=lambda: late, save="second")
    request = first.add("a", PROMPT)
    first.step()
    tracked = tracked_of(first, "a")
    assert len(tracked.pending_pages) == 4
    first.finish(request)
    first.step()
    assert sorted(tracked.unsaved_keys) == [0, 1, 2, 3]


def test_commit_not_answered_yet_keeps_the_engine_stepping(made: Engine, late: LateStore) -> None:
    made.add("a", PROMPT)
    for _ in range(6):
        made.step()
    late.answers = False
    while made.saves:
        made.step()
    made.step()
    if made.saves.store_ops:
        assert made.connector.has_pending_push_work()
    late.answers = True
    made.settle()
    assert saved(made) == 4
    assert not made.connector.has_pending_push_work()
