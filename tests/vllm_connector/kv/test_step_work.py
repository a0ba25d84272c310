"""Lookups and saves of a step miss no page and no key, and derive only the keys that they need."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hot_path
import hypothesis
import pytest
from hypothesis import strategies as st

from cornplug import identity
from cornplug.metrics import Tally
from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore
from cornplug.vllm_connector.kv import costs, load_offers, page_keys, tracked_requests
from cornplug.vllm_connector.kv.page_keys import OwnTokens
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest, TrackedRequests

from ..rig import Request, runtime

PAGE = hot_path.PAGE
SIZE = PAGE.page_tokens


def half(store: MemoryStore) -> tuple[hot_path.Half, FaultyStore]:
    faulty = FaultyStore(store.connect())
    return hot_path.Half(faulty), faulty


def saved(half: hot_path.Half, tokens: list[int]) -> None:
    request = half.request(tokens)
    half.lookup(request)
    acks = hot_path.written(half.step(hot_path.output_of([request], len(tokens)), hot_path.NO_ANSWER))
    half.step(hot_path.NO_REQUEST, acks)
    half.step(hot_path.NO_REQUEST, hot_path.NO_ANSWER)


@pytest.mark.parametrize("present", [0, 1, 31, 32, 33, 95, 96, 97, 223, 224, 300])
def test_load_offers_find_the_longest_prefix_whatever_its_length(present: int) -> None:
    """Around the ends of a lookup's questions: 32 pages, 64 more, 128 more."""
    engine, store = half(MemoryStore(capacity_bytes=1 << 30))
    prefix = hot_path.prompt(present * SIZE, 1)
    if present:
        saved(engine, prefix)
    tokens = [*prefix, *hot_path.prompt((300 - present) * SIZE, 2), 1]
    asked = engine.tally
    asked.drain()
    assert engine.lookup(engine.request(tokens)) == present * SIZE
    absent = dict(asked.drain().get("cornplug_misses_total", ()))
    assert absent == ({("bench", "kv_page", "absent"): [300 - present]} if present < 300 else {})
    before = store.calls["contains"]
    engine.lookup(engine.request(tokens))
    assert store.calls["contains"] - before == 1 + (present >= 32) + (present >= 96) + (present >= 224)


def test_load_offers_derive_few_keys_behind_first_absent_page(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = half(MemoryStore(capacity_bytes=1 << 30))
    chained, made = [], []

    def chain(prior: bytes, tokens: Any) -> list[bytes]:
        chained.append(len(tokens))
        return identity.hash_chain(prior, tokens)

    def keys(secret: bytes, root: bytes, size: int, values: list[bytes]) -> list[bytes]:
        made.append(len(values))
        return identity.page_keys(secret, root, size, values)

    saved(engine, hot_path.prompt(40 * SIZE, 1))
    monkeypatch.setattr(page_keys, "hash_chain", chain)
    monkeypatch.setattr(page_keys, "page_keys", keys)
    engine.lookup(engine.request(hot_path.prompt(1000 * SIZE, 2)))
    assert (sum(chained), sum(made)) == (32 * SIZE, 32)
    chained.clear()
    made.clear()
    engine.lookup(engine.request([*hot_path.prompt(40 * SIZE, 1), *hot_path.prompt(960 * SIZE, 2)]))
    assert (sum(chained), sum(made)) == (96 * SIZE, 96)


def test_page_keys_behind_the_engines_own_prefix_make_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of pages that the engine has are not made; the chain runs over their tokens."""
    tokens, made = hot_path.prompt(40 * SIZE, 1), []

    def keys(secret: bytes, root: bytes, size: int, values: list[bytes]) -> list[bytes]:
        made.append(len(values))
        return identity.page_keys(secret, root, size, values)

    whole = page_keys.PageKeys(bytes(32), b"r" * 32, SIZE, ()).keys_until(tokens, len(tokens))
    monkeypatch.setattr(page_keys, "page_keys", keys)
    lazy = page_keys.PageKeys(bytes(32), b"r" * 32, SIZE, ())
    assert lazy.keys_for(tokens, range(30, 40)) == whole[30:]
    assert lazy.keys_for(tokens, [3, 7, 35]) == [whole[3], whole[7], whole[35]]
    assert lazy.keys_for(tokens, []) == []
    assert lazy.keys_until(tokens, len(tokens)) == whole
    assert made == [10, 2, 28]


def test_load_offers_deadline_is_of_the_whole_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup in several questions waits no longer than one in a single question."""
    engine, store = half(MemoryStore(capacity_bytes=1 << 30))
    saved(engine, hot_path.prompt(100 * SIZE, 1))
    deadlines: list[float] = []
    original, now = store.contains, [0.0]

    def contains(keys: Any, *, deadline_s: float) -> bytes:
        deadlines.append(deadline_s)
        now[0] += 2.0
        return original(keys, deadline_s=deadline_s)

    monkeypatch.setattr(store, "contains", contains)
    monkeypatch.setattr(load_offers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine.lookup(engine.request([*hot_path.prompt(100 * SIZE, 1), 1]))
    assert deadlines == [5.0, 3.0, 1.0]


# -- pages that complete -------------------------------------------------------------------------


class Twins:
    """Two trackers of the same requests: one looks at a request where a page may complete, one always."""

    def __init__(self, own: bool) -> None:
        config: Any = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"))
        store = MemoryStore(capacity_bytes=1 << 20).connect()
        self.requests: list[Request] = []
        with (
            mock.patch.object(tracked_requests, "kv_identity", return_value=(b"lm" * 16, {})),
            mock.patch.object(page_keys, "has_other_connectors", return_value=own),
        ):
            self.trackers = [
                TrackedRequests(config, runtime(store, page_tokens=SIZE), PAGE, Tally()) for _ in range(2)
            ]

    def each(self, request: Request) -> list[TrackedRequest]:
        found = [tracker.get(request.request_id) for tracker in self.trackers]
        return [tracked for tracked in found if tracked is not None]

    def save_again(self, request: Request, page: int) -> None:
        for tracker, tracked in zip(self.trackers, self.each(request), strict=False):
            tracked.save_again_from(page)
            tracker.schedule_check(tracked)

    def admit(self, request: Request, computed: int) -> None:
        for tracker in self.trackers:
            tracker.track(request)  # type: ignore[arg-type]
        request.num_computed_tokens = computed

    def step(self, scheduled: dict[str, int], refuse: bool) -> list[tuple[str, int]]:
        """The pages that the first tracker offers; the second one offers the same."""
        for tracked in self.trackers[1].list_all():
            self.trackers[1].schedule_check(tracked)
        offered = []
        for tracker in self.trackers:
            offered.append(
                [
                    (tracked.request.request_id, index)
                    for tracked, end in tracker.find_completing(scheduled, sum(scheduled.values()))
                    for index, _ in tracked.pages_to_save(end, SIZE)
                ]
            )
        assert offered[0] == offered[1]
        if refuse:
            for name, index in offered[0]:
                for tracker in self.trackers:
                    tracked_here = tracker.get(name)
                    assert tracked_here is not None
                    tracked_here.retry_pages.add(index)
                    tracker.schedule_check(tracked_here)
        return offered[0]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "admit", "preempt", "again", "refused"]),
        st.integers(0, 3),
        st.sampled_from([1, 1, 1, 3, 63, 64, 200]),
        st.integers(0, 3),
    ),
    min_size=5,
    max_size=60,
)


@hypothesis.settings(max_examples=80, derandomize=True)
@hypothesis.given(EVENTS, st.booleans())
def test_tracked_requests_completing_miss_no_page(events: list[tuple[str, int, int, int]], own: bool) -> None:
    """Chunks, decoding, drafts that are rejected, tokens that come late, preemption, refusals of a store."""
    with mock.patch.object(tracked_requests, "_GATHER_STEPS", 0):
        live(events, Twins(own))


def live(events: list[tuple[str, int, int, int]], twins: Twins) -> None:
    requests = [Request(f"r{i}", hot_path.prompt(150 + 50 * i, i)) for i in range(4)]
    for i, request in enumerate(requests):
        twins.admit(request, 16 * i)
    for what, which, tokens, late in events:
        request = requests[which]
        if what in ("admit", "preempt"):
            if what == "preempt":
                twins.save_again(request, late)
            twins.admit(request, min(64 * late, request.num_tokens - 1))
        elif what == "again":
            twins.save_again(request, late)
        else:
            running = {each.request_id: tokens for each in requests[which:]}
            twins.step(running, what == "refused")
            for each in requests[which:]:
                # As asynchronous scheduling counts: ahead of the tokens that are known, by a few drafts too.
                each.num_computed_tokens += tokens
                if each.num_computed_tokens + tokens > each.num_tokens:
                    each.all_token_ids += [7] * max(0, each.num_computed_tokens + 1 - each.num_tokens - late)
                each.num_computed_tokens = min(each.num_computed_tokens, each.num_tokens + late)


def test_tracked_requests_completing_looks_once_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracked_requests, "_GATHER_STEPS", 0)
    twins = Twins(own=False)
    requests = [Request(f"r{i}", hot_path.prompt(100 + i, i)) for i in range(8)]
    for request in requests:
        twins.admit(request, request.num_tokens - 1)
    looked = 0
    for _ in range(4 * SIZE):
        due = twins.trackers[0].find_completing(
            {request.request_id: 1 for request in requests}, len(requests)
        )
        looked += len(due)
        for tracked, end in due:
            tracked.pages_to_save(end, SIZE)
        for request in requests:
            request.num_computed_tokens += 1
            request.all_token_ids.append(7)
    # At first, and at each of four pages.
    assert looked == 8 * (1 + 4)


def test_tracked_requests_beside_other_connectors_are_looked_at_in_each_step() -> None:
    """Their known tokens must be extended without a gap."""
    twins = Twins(own=True)
    request = Request("r", hot_path.prompt(SIZE + 10, 1))
    twins.admit(request, 0)
    twins.step({"r": SIZE + 9}, False)
    request.num_computed_tokens = SIZE + 9
    offered = []
    for _ in range(SIZE):
        offered += twins.step({"r": 1}, False)
        request.num_computed_tokens += 1
        request.all_token_ids.append(7)
    assert offered == [("r", 1)]
    tracked = twins.trackers[0].get("r")
    assert tracked is not None
    assert tracked.own_tokens == OwnTokens(2 * SIZE + 9)


def test_kv_scheduler_tells_the_store_what_a_page_cost(
    logged_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured seconds of its tokens; nothing before the first measured step."""
    now = [0.0]
    monkeypatch.setattr(costs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine = hot_path.Half(logged_store.client)
    for prompt in (1, 2):
        request = engine.request(hot_path.prompt(2 * SIZE, prompt))
        engine.lookup(request)
        moves = engine.step(hot_path.output_of([request], 2 * SIZE), hot_path.NO_ANSWER)
        now[0] += 2.0
        end_s = time.monotonic() + 30
        while logged_store.client.stat(deadline_s=5).entries < 2 * prompt:
            assert time.monotonic() < end_s
            moves = engine.step(hot_path.NO_REQUEST, hot_path.written(moves))
            time.sleep(0.005)
        hot_path.over(engine, request)
    assert logged_store.costs() == [0.0, 0.0, 1.0, 1.0]
