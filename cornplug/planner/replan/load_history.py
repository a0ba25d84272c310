"""Records rates by the time of day, and estimates the rate to expect soon.

A replica takes minutes to start. If the rate rises every morning, replicas are planned in advance, from the
usual rates of the next slots of the day, scaled to today's level.
"""

from __future__ import annotations

from typing import Final

from pydantic import Field

from cornplug.planner.latency_forecast import PlanRecord

DAY_S: Final = 86_400
SLOT_S: Final = 900
"""Length of a slot in seconds. The rates of all windows in a slot are averaged."""
NEWEST: Final = 0.5
"""Weight of the newest day in a slot's usual rate."""
LEVELS: Final = (0.5, 2.0)
"""Limits of the ratio between today's rate and the usual rate. The ratio of an unusual day does not predict
its next hours."""


class SlotMean(PlanRecord):
    total: float = 0.0
    windows: int = 0

    def plus(self, rate: float) -> SlotMean:
        return SlotMean(total=self.total + rate, windows=self.windows + 1)


class DailyRates(PlanRecord):
    """Rates of one request class by the time of day."""

    usual: dict[int, float] = Field(default_factory=dict)
    """Slot of the day (UTC) -> usual requests per second on earlier days."""
    day: int = 0
    """Number of the day of `today`, since 1970."""
    today: dict[int, SlotMean] = Field(default_factory=dict)

    def seen(self, rate: float, at_s: float) -> DailyRates:
        """Return the rates after a window with this rate. On a new day, the last day is added to the usual
        rates."""
        day, slot = _slot(at_s)
        kept = self if day == self.day else DailyRates(usual=self._with_today(), day=day)
        today = {**kept.today, slot: kept.today.get(slot, SlotMean()).plus(rate)}
        return kept.model_copy(update={"today": today})

    def soon(self, rate: float, at_s: float, ahead_s: float) -> float | None:
        """Return the highest rate to expect within `ahead_s` seconds, given the current `rate`.

        Returns None if there are no rates of earlier days.
        """
        _, slot = _slot(at_s)
        now = self.usual.get(slot)
        slots = [_slot(at_s + s)[1] for s in range(SLOT_S, int(ahead_s) + SLOT_S, SLOT_S)]
        known = [self.usual[s] for s in slots if s in self.usual]
        if not now or not known:
            return None
        least, most = LEVELS
        return max(known) * min(max(rate / now, least), most)

    def _with_today(self) -> dict[int, float]:
        usual = dict(self.usual)
        for slot, mean in self.today.items():
            rate = mean.total / mean.windows
            usual[slot] = NEWEST * rate + (1 - NEWEST) * usual.get(slot, rate)
        return usual


def _slot(at_s: float) -> tuple[int, int]:
    day, second = divmod(int(at_s), DAY_S)
    return day, second // SLOT_S
