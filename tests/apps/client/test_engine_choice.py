"""The engine for a request: by prefix, queue, weight and pauses, always the same one for the same state."""

from __future__ import annotations

from collections import Counter

import pytest
from expected_errors import expect_error

from cornplug.apps.engine_choice import (
    EngineChooser,
    EngineLoad,
    MissPrice,
    PromptPrefix,
    prompt_prefix,
)
from cornplug.errors import ConfigError

A, B = "http://one:8000", "http://two:8000"
BOTH = {A: 1.0, B: 1.0}
LONG = "Read the manual. " * 600


def prompt(text: str) -> PromptPrefix:
    return prompt_prefix({"model": "m", "prompt": text})


def chooser(price: MissPrice | None = None) -> EngineChooser:
    """One that knows two engines."""
    made = EngineChooser(price, clock=lambda: 0.0, uniform=lambda: 0.5)
    assert made.opens_at(BOTH) == 0.0
    return made


def taken(of: EngineChooser, prefix: PromptPrefix, engines: dict[str, float] = BOTH) -> str:
    """The engine of a request that is over at once."""
    engine = of.choose(engines, prefix, 0.0)
    assert engine is not None
    of.record_end(engine)
    return engine


@pytest.mark.parametrize("had", [A, B])
def test_engine_chooser_prompt_goes_where_its_prefix_is(had: str) -> None:
    of = chooser()
    of.record_accepted(had, prompt(LONG))
    assert {taken(of, prompt(f"{LONG}Question {i}?")) for i in range(20)} == {had}


def test_engine_chooser_long_queue_is_worth_a_miss() -> None:
    of = chooser()
    of.record_accepted(A, prompt(LONG))
    of.update_loads({A: EngineLoad(2.0, 8.0), B: EngineLoad(0.0, 0.0)})
    assert taken(of, prompt(LONG)) == A
    of.update_loads({A: EngineLoad(20.0, 8.0), B: EngineLoad(0.0, 0.0)})
    assert taken(of, prompt(LONG)) == B


def test_engine_chooser_price_of_a_miss_decides_between_queue_and_prefix() -> None:
    answers = []
    for speed in (1_000.0, 1_000_000.0):
        of = chooser(MissPrice(prefill_tokens_per_s=speed, load_tokens_per_s=speed))
        of.record_accepted(A, prompt(LONG))
        of.update_loads({A: EngineLoad(3.0, 0.0), B: EngineLoad(0.0, 0.0)})
        answers.append(taken(of, prompt(LONG)))
    # Queue and miss are in the same unit of prefill: the speed alone changes nothing.
    assert answers == [A, A]


def test_engine_chooser_prefix_in_the_host_s_store_costs_less_than_prefill() -> None:
    near, far = "http://one:8001", "http://two:8000"
    of = chooser()
    of.record_accepted(A, prompt(LONG))
    of.update_loads({A: EngineLoad(50.0, 0.0)})
    assert taken(of, prompt(LONG), {A: 1.0, near: 1.0, far: 1.0}) == near


def test_engine_chooser_own_requests_count_before_the_next_reading() -> None:
    of = chooser()
    new = [prompt(f"{i} {LONG}") for i in range(20)]
    assert set(Counter(of.choose(BOTH, one, 0.0) for one in new).values()) == {10}


def test_engine_chooser_reading_counts_own_requests_once() -> None:
    of = chooser()
    first = of.choose({A: 1.0}, prompt(LONG), 0.0)
    assert first == A
    before = of._queue_tokens(A)
    of.update_loads({A: EngineLoad(1.0, 0.0)})
    assert of._queue_tokens(A) == before


def test_engine_chooser_equal_engines_divide_conversations_by_weight() -> None:
    weights = {A: 3.0, B: 1.0}
    chosen = Counter(taken(chooser(), prompt(f"{i}"), weights) for i in range(400))
    assert 260 < chosen[A] < 340
    assert [taken(chooser(), prompt(f"{i}")) for i in range(9)] == [
        taken(chooser(), prompt(f"{i}")) for i in range(9)
    ]


def test_engine_chooser_weights_divide_work_under_load() -> None:
    of, weights = chooser(), {A: 3.0, B: 1.0}
    chosen = Counter(of.choose(weights, prompt(f"{i} {LONG}"), 0.0) for i in range(80))
    assert 54 <= chosen[A] <= 66


def test_engine_chooser_failed_engine_is_left_out_and_forgotten() -> None:
    of = chooser()
    of.record_accepted(A, prompt(LONG))
    of.record_failure(A, 10.0, sent=10.0)
    assert of.choose(BOTH, prompt(LONG), 10.0) == B
    assert of.choose({A: 1.0}, prompt(LONG), 10.0) is None
    opens = of.opens_at([A])
    assert 10.0 < opens < 10.2
    assert of.choose({A: 1.0}, prompt(LONG), opens) == A


def test_engine_chooser_pause_that_an_engine_asked_for_is_kept() -> None:
    of = chooser()
    of.record_pause(A, 10.0, 7.0)
    assert of.opens_at([A]) == 17.0
    assert of.choose({A: 1.0}, prompt(LONG), 16.9) is None
    assert of.choose_earliest(BOTH, prompt(LONG)) in BOTH


@pytest.mark.parametrize("name", ["prefill_tokens_per_s", "load_tokens_per_s"])
@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_miss_price_of_no_speed_is_refused(name: str, speed: float) -> None:
    with expect_error(ConfigError, field=f"price.{name}"):
        MissPrice(**{name: speed})
