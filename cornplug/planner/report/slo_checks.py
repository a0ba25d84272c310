"""Each bound of each request class beside the simulated time, and whether it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cornplug.planner.plan import LatencyForecast, Plan


@dataclass(frozen=True)
class SloCheck:
    """One bound of one class. Times in seconds; None: not known."""

    demand: str
    quantity: str
    """TTFT, TPOT or E2E."""
    percentile: str
    bound_s: float | None
    """None: the input sets no bound; the times are shown all the same."""
    simulated_s: float | None

    @property
    def kept(self) -> bool | None:
        """None where there is no bound, or no time to compare with it."""
        if self.bound_s is None or self.simulated_s is None:
            return None
        return self.simulated_s <= self.bound_s


def of(plan: Plan) -> list[SloCheck]:
    """All bounds and times of a plan, class by class."""
    return [check for forecast in plan.latency_forecasts for check in _of(forecast)]


def verdict(check: SloCheck) -> tuple[str, Literal["good", "bad", "soft"]]:
    """In a word, and how it is to be taken."""
    if check.kept is None:
        return ("no bound" if check.bound_s is None else "not known"), "soft"
    return ("kept", "good") if check.kept else ("MISSED", "bad")


def _of(forecast: LatencyForecast) -> Iterator[SloCheck]:
    tables = forecast.slo
    for table in tables:
        for quantity, bound, times in (
            ("TTFT", table.ttft_s, forecast.ttft),
            ("TPOT", table.tpot_s, forecast.tpot),
            ("E2E", table.e2e_s, forecast.e2e),
        ):
            time = times.at(table.percentile)
            # Times without a bound are shown once
            if bound is not None or (time is not None and table is tables[0]):
                yield SloCheck(f"{forecast.app}/{forecast.request}", quantity, table.percentile, bound, time)
