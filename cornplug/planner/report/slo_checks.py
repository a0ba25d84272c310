"""Comparison of each bound of each request class with the simulated time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cornplug.planner.latency_forecast import LatencyForecast
from cornplug.planner.plan import Plan
from cornplug.planner.report import formatting


@dataclass(frozen=True)
class SloCheck:
    """Bound of a request class and the simulated time, both in seconds, or as a multiple of an idle replica's
    time."""

    demand: str
    quantity: str
    """TTFT, TPOT or E2E, or the slowdown of one of them."""
    percentile: str
    bound: float | None
    """None if the input sets no bound, and only the simulated time is shown."""
    simulated: float | None
    """Simulated time, or None if it is unknown."""
    slowdown: bool = False
    """Whether both values are multiples of an idle replica's time."""

    @property
    def kept(self) -> bool | None:
        """Whether the simulated time keeps the bound, or None if either is None."""
        if self.bound is None or self.simulated is None:
            return None
        return self.simulated <= self.bound

    @property
    def name(self) -> str:
        """Name of the time that is checked, such as "TTFT P95"."""
        return f"{self.quantity} {formatting.percentile(self.percentile)}"

    @property
    def bound_text(self) -> str:
        return formatting.measured(self.bound, slowdown=self.slowdown)

    @property
    def simulated_text(self) -> str:
        return formatting.measured(self.simulated, slowdown=self.slowdown)


def of(plan: Plan) -> list[SloCheck]:
    """Return the checks of all request classes of a plan."""
    return [check for forecast in plan.latency_forecasts for check in _of(forecast)]


def verdict(check: SloCheck) -> tuple[str, Literal["good", "bad", "soft"]]:
    """Return the result of a check in one or two words, and its style."""
    if check.kept is None:
        return ("no bound" if check.bound is None else "unknown"), "soft"
    return ("kept", "good") if check.kept else ("MISSED", "bad")


def _of(forecast: LatencyForecast) -> Iterator[SloCheck]:
    """Yield a check for each bound, and one at the SLO's first percentile for each time without a bound."""
    found = [b for b in forecast.bounds if b.bound is not None]
    quantities = {b.quantity for b in found}
    for b in forecast.bounds:
        unbounded = b.quantity not in quantities and b.percentile == forecast.slo_percentile
        if b.bound is not None or (unbounded and not b.slowdown and b.simulated is not None):
            quantities.add(b.quantity)
            quantity = b.quantity.upper() + (" slowdown" if b.slowdown else "")
            name = f"{forecast.app}/{forecast.request}"
            yield SloCheck(name, quantity, b.percentile, b.bound, b.simulated, b.slowdown)
