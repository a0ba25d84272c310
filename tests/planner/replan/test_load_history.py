"""What the day brought yesterday is planned for before it comes again."""

from __future__ import annotations

import pytest

from cornplug.planner.replan_state import DAY_S, SLOT_S, DailyRates

NINE_S = 9 * 3600


def of_days(*rates_at_ten: float) -> DailyRates:
    """2 requests/s until ten o'clock, then so many, on as many days."""
    history = DailyRates()
    for day, rate in enumerate(rates_at_ten):
        for slot in range(DAY_S // SLOT_S):
            seen = rate if slot >= 40 else 2.0
            for second in (60, 500):
                history = history.add_window(seen, day * DAY_S + slot * SLOT_S + second)
    return history


def test_soon_without_earlier_day_is_unknown() -> None:
    history = DailyRates().add_window(2.0, NINE_S).add_window(9.0, NINE_S + SLOT_S)
    assert history.expected_rate(2.0, NINE_S, 3600) is None


def test_soon_expects_rate_that_comes_within_time() -> None:
    history, nine = of_days(8.0), DAY_S + NINE_S
    assert history.add_window(2.0, nine).expected_rate(2.0, nine, 1800) == pytest.approx(2.0)
    assert history.add_window(2.0, nine).expected_rate(2.0, nine, 3600) == pytest.approx(8.0)


def test_soon_scales_with_level_of_today_within_limits() -> None:
    history, nine = of_days(8.0), DAY_S + NINE_S
    for rate, expected in ((3.0, 12.0), (40.0, 16.0), (0.1, 4.0)):
        assert history.add_window(rate, nine).expected_rate(rate, nine, 3600) == pytest.approx(expected)


def test_seen_newest_day_weighs_half() -> None:
    history, nine = of_days(8.0, 12.0), 2 * DAY_S + NINE_S
    assert history.add_window(2.0, nine).expected_rate(2.0, nine, 3600) == pytest.approx(10.0)


def test_soon_crosses_midnight() -> None:
    history, late = of_days(8.0), 2 * DAY_S - SLOT_S
    assert history.add_window(8.0, late).expected_rate(8.0, late, 3600) == pytest.approx(2.0)


def test_daily_rates_survive_json() -> None:
    history = of_days(8.0)
    assert DailyRates.model_validate_json(history.model_dump_json()) == history
