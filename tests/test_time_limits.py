"""The fixture `within`: upper bounds on durations are checked by script/test-more only."""

from __future__ import annotations

import time

import pytest
from time_limits import CHECK_VARIABLE, TimeLimits

CHECKED = TimeLimits(checked=True)
UNCHECKED = TimeLimits(checked=False)


def test_within_long_block_fails_with_reason() -> None:
    message = r"must be less than 0\.01: the deadline is 5 ms"
    with pytest.raises(pytest.fail.Exception, match=message), CHECKED(0.01, "the deadline is 5 ms"):
        time.sleep(0.02)


def test_within_long_block_passes_unchecked() -> None:
    with UNCHECKED(0.01):
        time.sleep(0.02)


def test_within_short_block_passes() -> None:
    with CHECKED(60):
        pass


def test_within_error_in_block_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), CHECKED(0):
        raise ZeroDivisionError


def test_within_cpu_sleep_costs_nothing() -> None:
    with CHECKED.cpu(0.25), CHECKED.cpu(0.25, clock=time.thread_time):
        time.sleep(0.5)


def test_within_cpu_computing_block_fails() -> None:
    def compute() -> None:
        end_s = time.thread_time() + 0.02
        while time.thread_time() < end_s:
            pass

    with pytest.raises(pytest.fail.Exception), CHECKED.cpu(0.01):
        compute()
    with pytest.raises(pytest.fail.Exception), CHECKED.cpu(0.01, clock=time.thread_time):
        compute()


def test_within_check_compares_a_figure() -> None:
    CHECKED.check(9, 10)
    UNCHECKED.check(10, 10)
    with pytest.raises(pytest.fail.Exception, match="took 10, must be less than 10"):
        CHECKED.check(10, 10)


@pytest.mark.parametrize(("value", "fails"), [("1", True), ("", False)])
def test_within_is_checked_if_environment_says_so(
    monkeypatch: pytest.MonkeyPatch, value: str, fails: bool
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, value)
    if fails:
        with pytest.raises(pytest.fail.Exception):
            TimeLimits.from_environment().check(2, 1)
    else:
        TimeLimits.from_environment().check(2, 1)


@pytest.fixture
def bounded(within: TimeLimits) -> TimeLimits:
    return within


@pytest.mark.parametrize("_", [1, 2])
def test_test_with_within_is_timed(request: pytest.FixtureRequest, bounded: TimeLimits, _: int) -> None:
    assert request.node.get_closest_marker("timed") is not None


def test_test_without_within_is_not_timed(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("timed") is None


class TestInClass:
    def test_method_with_within_is_timed(self, request: pytest.FixtureRequest, within: TimeLimits) -> None:
        assert request.node.get_closest_marker("timed") is not None
