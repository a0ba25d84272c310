"""Pages that decoding requests complete are gathered: their room is asked for together, and none is lost."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hot_path
import pytest
from collaborators import kept

from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore
from cornplug.vllm_connector.kv import tracked_requests
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest, TrackedRequests

from ..conftest import open_in
from ..rig import Engine, Request

PROMPT = [(7 * i) % 251 for i in range(150)]  # 4 whole pages of 32, and 22 tokens
STEPS = tracked_requests._GATHER_STEPS

Make = Callable[..., Engine]


def decode(engine: Engine, requests: list[Request], tokens: int) -> None:
    """So many steps, each with a token of each request."""
    for token in range(tokens):
        for request in requests:
            request.all_token_ids.append(token)
            if len(request.blocks) * engine.block_size < request.num_tokens:
                request.blocks.append(engine.free_blocks.pop(0))
        engine.step()


def prefilled(engine: Engine, lengths: list[int]) -> list[Request]:
    """Requests whose prompts are computed, and whose whole pages are stored."""
    requests = [engine.run(f"r{length}", [300 + length] * length) for length in lengths]
    engine.settle()
    return requests


def stored(engine: Engine) -> float:
    return engine.counts.get(("saves", "kv_page", "stored"), 0)


def test_gathered_pages_of_several_requests_are_asked_for_together(engine: Make, faulty: FaultyStore) -> None:
    made = engine(connect=lambda: faulty)
    requests = prefilled(made, [29, 28, 27, 26, 25])
    before = faulty.calls.get("reserve", 0)
    decode(made, requests, 7)
    assert faulty.calls.get("reserve", 0) == before, "their pages are complete since the steps 3 to 7"
    decode(made, requests, STEPS)
    made.settle()
    assert faulty.calls["reserve"] == before + 1
    assert stored(made) == 5
    for request in requests:
        made.check(request)


def test_gathered_page_waits_a_few_steps_at_the_most(engine: Make, faulty: FaultyStore) -> None:
    made = engine(connect=lambda: faulty)
    requests = prefilled(made, [31])
    decode(made, requests, 1 + STEPS)
    assert faulty.calls["reserve"] == 1


def test_gathered_pages_of_many_requests_do_not_wait(
    engine: Make, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracked_requests, "_GATHER_REQUESTS", 2)
    made = engine(connect=lambda: faulty)
    decode(made, prefilled(made, [31, 30]), 2)
    assert faulty.calls["reserve"] == 1


def test_gathered_page_does_not_wait_beside_pages_of_a_prompt(engine: Make, faulty: FaultyStore) -> None:
    made = engine(connect=lambda: faulty)
    requests = prefilled(made, [31])
    decode(made, requests, 1)
    made.add("prompt", PROMPT)
    decode(made, requests, 1)
    assert faulty.calls["reserve"] == 1
    made.settle()
    assert stored(made) == 1 + 4


def test_gathered_page_of_an_engine_without_tokens_does_not_wait(engine: Make) -> None:
    made = engine()
    requests = prefilled(made, [31])
    decode(made, requests, 1)
    assert made.connector.has_pending_push_work()
    made.step()
    made.step()
    made.settle()
    assert stored(made) == 1


def test_gathered_page_of_finished_request_is_stored(engine: Make, store: MemoryStore) -> None:
    made = engine()
    (request,) = prefilled(made, [31])
    decode(made, [request], 3)
    taken = set(request.blocks)
    made.finish(request)
    assert taken <= set(made.free_blocks)
    assert made.connector.has_pending_push_work()
    made.settle()
    assert engine().run("b", request.all_token_ids).external_tokens == 32
    assert open_in(store) == (0, 0)


def test_gathered_page_of_preempted_request_is_stored_once_it_is_computed_again(
    engine: Make, store: MemoryStore
) -> None:
    made = engine()
    (request,) = prefilled(made, [31])
    decode(made, [request], 3)
    made.preempt(request)
    # Another request gets its blocks.
    made.run("other", PROMPT)
    made.settle()
    made.check(request)
    assert stored(made) == 4 + 1
    assert engine().run("b", request.all_token_ids).external_tokens == 32
    assert open_in(store) == (0, 0)


def test_gathered_page_of_request_aborted_while_preempted_is_not_saved(
    engine: Make, store: MemoryStore
) -> None:
    made = engine()
    (request,) = prefilled(made, [31])
    decode(made, [request], 3)
    made.preempt(request)
    made.finish(request)
    made.settle()
    assert stored(made) == 0
    assert open_in(store) == (0, 0)


def test_gathered_page_is_dropped_once_weights_are_replaced(
    engine: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine()
    (request,) = prefilled(made, [31])
    decode(made, [request], 3)
    made.finish(request)
    monkeypatch.setattr("cornplug.engine_common.weights_guard.has_replaced_weights", lambda: True)
    made.settle()
    assert stored(made) == 0
    assert set(request.blocks) <= set(made.free_blocks)
    assert store.connect().stat(deadline_s=1).entries == 0


def test_gathered_names_are_forgotten_with_their_requests() -> None:
    half = hot_path.Half(MemoryStore(capacity_bytes=1 << 30).connect())
    for _ in range(3):
        decoding = hot_path.Decoding(half, lambda i: 1 + i % 64)
        for _ in range(5):
            decoding.computed(decoding.step())
        decoding.end()
    requests = kept(half.scheduler, TrackedRequests)[0]
    names = {request.request_id for request in decoding.requests}
    assert names & set(kept(requests, str))
    for _ in range(80):
        half.step(hot_path.NO_REQUEST, hot_path.NO_ANSWER)
    assert not half.scheduler.has_open_saves()
    assert not names & set(kept(requests, str))


def test_gathered_request_that_loads_is_looked_at_later() -> None:
    """A time on the clock from before a preemption comes while its blocks are being filled."""
    half = hot_path.Half(MemoryStore(capacity_bytes=1 << 30).connect())
    request = half.request(hot_path.prompt(100, 1))
    half.lookup(request)
    requests: Any = kept(half.scheduler, TrackedRequests)[0]
    tracked: TrackedRequest = requests.get(request.request_id)
    tracked.loading = SimpleNamespace()  # type: ignore[assignment]
    request.num_computed_tokens = 64
    requests._gathered.add(request.request_id)
    assert requests.find_completing({}, 0) == []
    tracked.loading = None
    assert requests.find_completing({request.request_id: 1}, 1) == [(tracked, 65)]


def test_scheduler_steps_that_only_decode_are_timed_once_in_16() -> None:
    half = hot_path.Half(MemoryStore(capacity_bytes=1 << 30).connect())
    requests = [half.request([i]) for i in range(100)]
    decoding = [
        bool(half.scheduler.build_metadata(hot_path.output_of(requests)).timed_step) for _ in range(64)
    ]
    assert sum(decoding) == 4
    prompts = [
        bool(half.scheduler.build_metadata(hot_path.output_of(requests, 2)).timed_step) for _ in range(64)
    ]
    assert all(prompts)
