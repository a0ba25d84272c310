"""Which service a medium goes to, and what a client does while services fail. No clock, no sockets."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping

import pytest
from expected_errors import expect_error
from hypothesis import given, settings
from hypothesis import strategies as st

from cornplug.encoder_service.client.endpoints import parse_services, rank_services
from cornplug.encoder_service.client.retry import (
    BACKOFF_BASE_S,
    BACKOFF_CAP_S,
    MAX_ROUNDS,
    CircuitBreakers,
    RetryPause,
    RetrySequence,
    SendAttempt,
)
from cornplug.errors import ConfigError

URLS = ["http://a:1", "http://b:1", "http://c:1", "http://d:1"]


def contents(count: int) -> list[bytes]:
    return [i.to_bytes(4, "big") for i in range(count)]


# -- which service ------------------------------------------------------------------------------


def test_ranking_ignores_order_of_urls() -> None:
    for content in contents(50):
        assert rank_services(content, parse_services(URLS)) == rank_services(
            content, parse_services(URLS[::-1])
        )


def test_ranking_without_a_service_moves_only_its_media() -> None:
    before = {c: rank_services(c, parse_services(URLS)) for c in contents(2000)}
    without = parse_services(URLS[1:])
    moved: Counter[str] = Counter()
    for content, order in before.items():
        after = rank_services(content, without)
        assert after == [url for url in order if url != URLS[0]]
        if order[0] == URLS[0]:
            moved[after[0]] += 1
    assert set(moved) == set(URLS[1:])
    assert min(moved.values()) > 0.6 * max(moved.values())


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 5), (0.1, 10, 10)])
def test_ranking_shares_are_proportional_to_weights(weights: tuple[float, ...]) -> None:
    given = parse_services(dict(zip(URLS, weights, strict=False)))
    firsts = Counter(rank_services(c, given)[0] for c in contents(5000))
    for url, weight in given.items():
        assert abs(firsts[url] / 5000 - weight / sum(weights)) < 0.03


def test_services_urls_are_normalised() -> None:
    assert parse_services("http://a:1/") == parse_services(["http://a:1"]) == {"http://a:1": 1.0}


@pytest.mark.parametrize(
    "wrong", [[], "", "a:8750", "ftp://a", "http://", {"http://a": 0}, {"http://a": float("nan")}]
)
def test_services_invalid_value_names_setting(wrong: str | list[str] | Mapping[str, float]) -> None:
    with expect_error(ConfigError, field="encoder.urls"):
        parse_services(wrong)


# -- one request ---------------------------------------------------------------------------------


class World:
    """A clock that the test turns, and services that take `takes_s` to do as `does` says."""

    def __init__(self, does: Callable[[str, float], str], takes_s: float = 0.01, seed: int = 0) -> None:
        self.now = 1000.0
        self.random = random.Random(seed).random
        self.does = does
        self.takes_s = takes_s
        self.tries: list[tuple[float, str]] = []

    def circuits(self, urls: list[str]) -> CircuitBreakers:
        return CircuitBreakers(urls, self.random)

    def request(self, circuits: CircuitBreakers, order: list[str], deadline_s: float) -> str:
        attempts = RetrySequence(order, circuits, now=self.now, deadline_s=deadline_s, random=self.random)
        end = self.now + deadline_s
        for _ in range(1000):
            step = attempts.next_step(self.now)
            if step is None:
                return "given up"
            if isinstance(step, RetryPause):
                assert step.seconds >= 0
                self.now += step.seconds
                continue
            assert isinstance(step, SendAttempt)
            assert 0 < step.timeout_s <= end - self.now
            self.tries.append((self.now, step.url))
            sent, outcome = self.now, self.does(step.url, self.now)
            self.now += step.timeout_s if outcome == "silent" else min(self.takes_s, step.timeout_s)
            if outcome == "answers":
                circuits.record_response(step.url)
                return step.url
            if outcome.startswith("busy"):
                said = outcome.partition(" ")[2]
                circuits.record_refusal(step.url, self.now, float(said) if said else None)
            else:
                circuits.record_failure(step.url, self.now, sent_at=sent)
        raise AssertionError("does not end")


OUTCOMES = st.sampled_from(["answers", "down", "silent", "busy", "busy 0", "busy 3", "busy 1e9"])


@settings(max_examples=200)
@given(
    st.integers(1, 4),
    st.lists(OUTCOMES, min_size=1, max_size=40),
    st.floats(0.001, 20),
    st.integers(0, 1000),
)
def test_retry_any_outcomes_end_by_deadline(
    count: int, outcomes: list[str], deadline_s: float, seed: int
) -> None:
    script = itertools.cycle(outcomes)
    world = World(lambda url, now: next(script), seed=seed)
    circuits = world.circuits(URLS[:count])
    for _ in range(5):
        began = world.now
        world.request(circuits, URLS[:count], deadline_s)
        assert world.now <= began + deadline_s + 1e-6


@settings(max_examples=100)
@given(st.sets(st.sampled_from(URLS), max_size=3), st.permutations(URLS), st.integers(0, 1000))
def test_retry_with_one_live_service_reaches_it(dead: set[str], order: list[str], seed: int) -> None:
    world = World(lambda url, now: "down" if url in dead else "answers", seed=seed)
    circuits = world.circuits(URLS)
    first = next(url for url in order if url not in dead)
    for _ in range(20):
        assert world.request(circuits, list(order), 10.0) == first


def test_retry_dead_service_gets_one_attempt_per_back_off() -> None:
    world = World(lambda url, now: "down" if url == URLS[0] else "answers", takes_s=0.01)
    circuits = world.circuits(URLS[:2])
    for _ in range(2000):  # 20 seconds of requests that all want the dead one first
        assert world.request(circuits, URLS[:2], 10.0) == URLS[1]
    spent = [now for now, url in world.tries if url == URLS[0]]
    gaps = [b - a for a, b in itertools.pairwise(spent)]
    assert len(spent) < 30
    assert max(gaps) <= BACKOFF_CAP_S + 0.1
    assert gaps[-1] > 4 * gaps[0]


def test_retry_recovered_service_is_used_within_back_off() -> None:
    world = World(lambda url, now: "down" if url == URLS[0] and now < 1020 else "answers")
    circuits = world.circuits(URLS[:2])
    while world.now < 1020 + BACKOFF_CAP_S + 0.1:
        world.request(circuits, URLS[:2], 10.0)
    assert world.request(circuits, URLS[:2], 10.0) == URLS[0]


def test_circuit_breakers_burst_of_failures_counts_once() -> None:
    circuits = CircuitBreakers(URLS[:1], lambda: 0.99)
    for _ in range(100):
        circuits.record_failure(URLS[0], 10.0, sent_at=9.9)
    assert circuits.retry_at(URLS[0]) <= 10.0 + BACKOFF_BASE_S


def test_circuit_breakers_after_pause_let_one_probe_through() -> None:
    circuits = CircuitBreakers(URLS[:1], lambda: 0.5)
    circuits.record_failure(URLS[0], 10.0, sent_at=9.9)
    assert [circuits.try_use(URLS[0], 10.2) for _ in range(3)] == [True, False, False]
    circuits.record_response(URLS[0])
    assert circuits.try_use(URLS[0], 10.2)


def test_retry_after_binds_all_requests() -> None:
    world = World(lambda url, now: "busy 3" if url == URLS[0] and now < 1003 else "answers")
    circuits = world.circuits(URLS[:2])
    while world.now < 1003:
        assert world.request(circuits, URLS[:2], 10.0) == URLS[1]
    assert sum(url == URLS[0] for _, url in world.tries) == 1
    # The only service: waits as long as it was told, and not at all where that is too long.
    alone = World(lambda url, now: "busy 3" if now < 1003 else "answers")
    assert alone.request(alone.circuits(URLS[:1]), URLS[:1], 10.0) == URLS[0]
    assert len(alone.tries) == 2
    hurried = World(lambda url, now: "busy 3")
    assert hurried.request(hurried.circuits(URLS[:1]), URLS[:1], 2.0) == "given up"
    assert hurried.now < 1000.1


def test_retry_silent_service_leaves_time_for_next() -> None:
    world = World(lambda url, now: "silent" if url == URLS[0] else "answers")
    circuits = world.circuits(URLS[:2])
    assert world.request(circuits, URLS[:2], 4.0) == URLS[1]
    assert world.now < 1002.1


def test_retry_all_dead_gives_up_before_deadline() -> None:
    world = World(lambda url, now: "down", takes_s=0.001)
    circuits = world.circuits(URLS[:2])
    assert world.request(circuits, URLS[:2], 60.0) == "given up"
    assert world.now < 1003
    assert len(world.tries) <= 2 * MAX_ROUNDS
    began = world.now
    assert world.request(circuits, URLS[:2], 60.0) == "given up"
    assert world.now < began + 2 * BACKOFF_CAP_S


def test_retry_pauses_have_full_jitter() -> None:
    pauses = []
    for seed in range(300):
        world = World(lambda url, now: "busy 0", seed=seed)
        attempts = RetrySequence(
            URLS[:1], world.circuits(URLS[:1]), now=0.0, deadline_s=9.0, random=world.random
        )
        assert isinstance(attempts.next_step(0.0), SendAttempt)
        step = attempts.next_step(0.0)
        assert isinstance(step, RetryPause)
        pauses.append(step.seconds)
    assert min(pauses) < 0.1 * BACKOFF_BASE_S
    assert max(pauses) > 0.9 * BACKOFF_BASE_S
