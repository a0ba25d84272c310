"""Whether a load pays: the rule, on figures like those of real engines."""

from __future__ import annotations

import pytest

from cornplug.engine_common.load_policy import EwmaRate, FetchRule, LoadRule, StepSlope

PAGE = 8 << 20  # 64 tokens of an 8B model


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def measured(
    rule: LoadRule, *, gb_s: float, notice_s: float, tokens_s: float, step_s: float = 0.01
) -> LoadRule:
    for tokens in (20, 64, 500, 2048, 30, 2048, 700, 25):
        rule.record_step(tokens, step_s + tokens / tokens_s)
    for size in (PAGE, 10 * PAGE, 3 * PAGE):
        rule.record_transfer(size, size / gb_s / 1e9)
        rule.record_delay(notice_s)
    return rule


@pytest.mark.parametrize(
    ("gb_s", "tokens_s", "pages", "queued", "pays"),
    [
        # 128 KiB a token: 1.5 GB/s are 11,400 tokens a second.
        (1.5, 25_000, 100, 0, False),
        (1.5, 5_000, 100, 0, True),
        (20, 25_000, 100, 0, True),
        # One page is computed in 2.6 ms, and a load noticed after 20.
        (20, 25_000, 1, 0, False),
        (20, 25_000, 12, 0, True),
        # Behind a long load.
        (20, 25_000, 12, 100, False),
    ],
)
def test_load_rule_pays_when_load_is_quicker_than_prefill(
    gb_s: float, tokens_s: float, pages: int, queued: int, pays: bool
) -> None:
    rule = measured(LoadRule("pays"), gb_s=gb_s, notice_s=0.02, tokens_s=tokens_s)
    found = rule.should_load(tokens=64 * pages, size_bytes=pages * PAGE, queued_bytes=queued * PAGE)
    assert found is pays
    always = measured(LoadRule("always"), gb_s=gb_s, notice_s=0.02, tokens_s=tokens_s)
    assert always.should_load(tokens=64 * pages, size_bytes=pages * PAGE, queued_bytes=queued * PAGE)


def test_load_rule_without_fresh_measurement_tries_load() -> None:
    clock = Clock()
    rule = LoadRule("pays", clock)
    assert rule.should_load(tokens=64, size_bytes=PAGE, queued_bytes=0), "nothing is known"
    rule.record_step(1000, 0.01)
    assert rule.should_load(tokens=64, size_bytes=PAGE, queued_bytes=0), "no load was measured"
    rule.record_transfer(PAGE, 1.0)
    assert not rule.should_load(tokens=64, size_bytes=PAGE, queued_bytes=0)
    clock.now += 61
    assert rule.should_load(tokens=64, size_bytes=PAGE, queued_bytes=0), "that may have been a bad moment"


def test_step_slope_leaves_out_constant_part_of_step() -> None:
    """100 tokens in a step of 12 ms do not cost 12 ms: without them there would be the step all the same."""
    times = StepSlope()
    for _ in range(20):
        times.add_step(20, 0.012)
        times.add_step(120, 0.013)
    found = times.estimate_s(100)
    assert found is not None
    assert found == pytest.approx(0.001, rel=0.1)


def test_step_slope_of_equal_steps_is_their_mean() -> None:
    times = StepSlope()
    assert times.estimate_s(100) is None
    times.add_step(0, 1.0)
    assert times.estimate_s(100) is None
    for _ in range(5):
        times.add_step(2048, 0.1)
    assert times.estimate_s(1024) == pytest.approx(0.05)


def test_step_slope_made_by_noise_is_their_mean() -> None:
    falling, steep = StepSlope(), StepSlope()
    falling.add_step(10, 1.0)
    falling.add_step(1000, 0.1)
    ratio = (0.9 * 1.0 + 0.1) / (0.9 * 10 + 1000)
    assert falling.estimate_s(100) == pytest.approx(100 * ratio)
    steep.add_step(10, 0.0001)
    steep.add_step(1000, 1.0)
    mean = 1.0 / 1000
    found = steep.estimate_s(100)
    assert found is not None
    assert found <= 100 * mean * 1.1


def test_faded_rate_follows_latest_samples() -> None:
    pace = EwmaRate()
    assert pace.estimate_s(1) is None
    for _ in range(50):
        pace.add_sample(100, 1.0)
    for _ in range(50):
        pace.add_sample(100, 2.0)
    assert pace.estimate_s(100) == pytest.approx(2.0, rel=0.01)
    assert pace.units_per_second() == pytest.approx(50, rel=0.01)
    pace.add_sample(0, 5.0)
    pace.add_sample(10, -1.0)
    assert pace.estimate_s(100) == pytest.approx(2.0, rel=0.01)


def test_load_rule_news_comes_once_a_minute() -> None:
    clock = Clock()
    rule = LoadRule("pays", clock)
    assert rule.speed_report(131072) == ""
    measured(rule, gb_s=20, notice_s=0.02, tokens_s=25_000)
    said = rule.speed_report(131072)
    assert "20.00 GB/s" in said
    assert "20.0 ms" in said
    assert "25000 tokens/s" in said
    assert (
        "is faster than prefill from 599 tokens" in said or "is faster than prefill from 598 tokens" in said
    )
    assert rule.speed_report(131072) == ""
    clock.now += 61
    slow = measured(LoadRule("pays", clock), gb_s=1.5, notice_s=0.02, tokens_s=25_000)
    assert "is not faster" in slow.speed_report(131072)


def test_fetch_rule_pays_when_fetch_is_quicker_than_encode() -> None:
    rule = FetchRule("pays")
    assert rule.should_fetch(rows=1000, size_bytes=88 << 20), "nothing is known"
    rule.record_encode(1000, 0.05)
    assert rule.should_fetch(rows=1000, size_bytes=88 << 20)
    rule.record_read(88 << 20, 0.041)
    assert rule.should_fetch(rows=1000, size_bytes=88 << 20)
    rule.record_encode(1000, 0.001)
    assert not rule.should_fetch(rows=1000, size_bytes=88 << 20)
    rule.record_encode(1000, 5.0)
    assert rule.should_fetch(rows=1000, size_bytes=88 << 20)
    always = FetchRule("always")
    always.record_encode(1000, 1e-6)
    always.record_read(88 << 20, 1.0)
    assert always.should_fetch(rows=1000, size_bytes=88 << 20)


@pytest.mark.parametrize(
    ("own_s", "waits_s"), [(None, 10.0), (0.05, 0.5), (0.4, 1.2), (2.0, 6.0), (9.0, 10.0)]
)
def test_fetch_rule_deadline_follows_own_encode_time(own_s: float | None, waits_s: float) -> None:
    rule, always = FetchRule("pays"), FetchRule("always")
    if own_s is not None:
        rule.record_encode(500, own_s)
        always.record_encode(500, own_s)
    assert rule.encode_deadline_s(500, ceiling_s=10.0) == pytest.approx(waits_s)
    assert rule.encode_deadline_s(500, ceiling_s=0.2) == 0.2
    assert always.encode_deadline_s(500, ceiling_s=10.0) == 10.0
