"""Lives of requests in any order: nothing is wrong, nobody waits, nothing is left behind."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from collaborators import kept
from hypothesis import strategies as st
from keyed_store import KeyedStore

from cornplug.testing import FaultyStore
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest

from ..conftest import open_in
from ..rig import Engine

# Prompts that share prefixes: of one page, of two, and their own rest.
PROMPTS = [
    [1] * 40,
    [1] * 32 + [2] * 50,
    [1] * 64 + [3] * 20,
    [1] * 32 + [2] * 32 + [4] * 36,
    [9] * 20,
]

BLOCKS = 256
"""Enough for all: here nobody waits for memory."""

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.sampled_from(["", "tenant"])),
        st.tuples(st.just("step"), st.sampled_from([7, 33, 1000]), st.sampled_from([None, 20, 40])),
        st.tuples(st.just("finish"), st.integers(0, 9), st.none()),
        st.tuples(st.just("preempt"), st.integers(0, 9), st.none()),
        st.tuples(st.just("fault"), st.booleans(), st.booleans()),
        st.tuples(st.just("corrupt"), st.integers(0, 9), st.none()),
    ),
    min_size=12,
    max_size=40,
)


class Lives:
    """One engine, a writer before it, and a store that may fail."""

    def __init__(self, tp: int, lag: bool, **how: Any) -> None:
        self.store = KeyedStore(capacity_bytes=1 << 20)
        self.faulty = FaultyStore(self.store.connect())
        self.engine = Engine(lambda: self.faulty, tp=tp, blocks=BLOCKS, **how)
        self.lag = lag
        self.pending: list[Any] = []
        self.count = 0

    def do(self, what: str, x: Any, y: Any) -> None:
        engine = self.engine
        if what == "add":
            engine.add(f"r{self.count}", PROMPTS[x], cache_salt=y or None)
            self.count += 1
        elif what == "step":
            self.step(chunk=x, take=y)
        elif what == "fault":
            self.faulty.unavailable, self.faulty.full = x, y
        elif what == "corrupt" and (entries := self.store.entries()):
            location = entries[x % len(entries)].location
            self.store.arena[location.offset] ^= 1
        elif what in ("finish", "preempt") and engine.requests:
            request = list(engine.requests.values())[x % len(engine.requests)]
            if what == "finish":
                engine.finish(request)
            elif request.status == "running" and not self.pending:
                # Its blocks are overwritten at once, as by the second model runner.
                engine.preempt(request)

    def step(self, **how: Any) -> None:
        """With `lag`, a step's output is seen after the next step has been scheduled."""
        engine = self.engine
        self.pending.append(engine.execute(engine.schedule(**how)))
        while len(self.pending) > (1 if self.lag else 0):
            engine.update(self.pending.pop(0))

    def end(self) -> None:
        engine = self.engine
        self.faulty.unavailable = self.faulty.full = False
        while self.pending:
            engine.update(self.pending.pop(0))
        engine.settle()
        for request in list(engine.requests.values()):
            if not request.is_finished():
                engine.check(request)
                engine.finish(request)
        engine.settle()
        assert not engine.requests
        assert sorted(engine.free_blocks) == list(range(BLOCKS))
        assert not engine.connector.has_pending_push_work()
        assert not kept(engine.connector, TrackedRequest)
        engine.close()
        self.faulty.close()
        assert open_in(self.store) == (0, 0)


@hypothesis.settings(max_examples=60, derandomize=True)
@hypothesis.given(STEPS, st.sampled_from([1, 2]), st.booleans())
def test_kv_lives_in_any_order_leave_nothing(steps: list[tuple[str, Any, Any]], tp: int, lag: bool) -> None:
    lives = Lives(tp, lag)
    for what, x, y in steps:
        lives.do(what, x, y)
    lives.end()


@pytest.mark.more
@hypothesis.settings(max_examples=30, derandomize=True)
@hypothesis.given(STEPS, st.sampled_from([1, 2]), st.booleans())
def test_kv_lives_on_second_runner_leave_nothing(
    steps: list[tuple[str, Any, Any]], tp: int, lag: bool
) -> None:
    lives = Lives(tp, lag, second_runner=True, accelerator=True, kernel_block=8)
    for what, x, y in steps:
        lives.do(what, x, y)
    lives.end()


@pytest.mark.more
@hypothesis.settings(max_examples=30, derandomize=True)
@hypothesis.given(STEPS, st.sampled_from([1, 2]), st.booleans())
def test_kv_lives_with_copies_by_gpu_leave_nothing(
    steps: list[tuple[str, Any, Any]], tp: int, lag: bool
) -> None:
    pytest.importorskip("triton")
    lives = Lives(tp, lag, second_runner=True, accelerator="arena", kernel_block=8)
    for what, x, y in steps:
        lives.do(what, x, y)
    lives.end()


@hypothesis.settings(max_examples=25, derandomize=True)
@hypothesis.given(STEPS)
def test_kv_lives_without_faults_leave_no_lease(steps: list[tuple[str, Any, Any]]) -> None:
    """The store is asked, rather than its connection ended: ours is still open."""
    lives = Lives(1, False)
    for what, x, y in steps:
        if what not in ("fault", "preempt"):
            lives.do(what, x, y)
    engine = lives.engine
    engine.settle()
    for request in list(engine.requests.values()):
        engine.finish(request)
    engine.settle()
    assert open_in(lives.store) == (0, 0)
    engine.close()
