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
    """One bound of one class: seconds, or a slowdown against an idle replica. None if unknown."""

    demand: str
    quantity: str
    """TTFT, TPOT or E2E, or the slowdown of one of them."""
    percentile: str
    bound: float | None
    """Bound, or None if the input sets none. The time is shown anyway."""
    simulated: float | None
    slowdown: bool = False

    @property
    def kept(self) -> bool | None:
        """Whether the bound is kept. None without a bound, or without a time to compare with it."""
        if self.bound is None or self.simulated is None:
            return None
        return self.simulated <= self.bound

    @property
    def name(self) -> str:
        """Name of the check: "TTFT P95"."""
        return f"{self.quantity} {formatting.percentile(self.percentile)}"

    @property
    def bound_text(self) -> str:
        return formatting.measured(self.bound, slowdown=self.slowdown)

    @property
    def simulated_text(self) -> str:
        return formatting.measured(self.simulated, slowdown=self.slowdown)


def of(plan: Plan) -> list[SloCheck]:
    """Return all bounds and times of a plan, class by class."""
    return [check for forecast in plan.latency_forecasts for check in _of(forecast)]


def verdict(check: SloCheck) -> tuple[str, Literal["good", "bad", "soft"]]:
    """Return the verdict in one word, and its style."""
    if check.kept is None:
        return ("no bound" if check.bound is None else "unknown"), "soft"
    return ("kept", "good") if check.kept else ("MISSED", "bad")


def _of(forecast: LatencyForecast) -> Iterator[SloCheck]:
    """Yield the bounds, and the times without a bound at the first percentile."""
    found = [b for b in forecast.bounds if b.bound is not None]
    quantities = {b.quantity for b in found}
    for b in forecast.bounds:
        unbounded = b.quantity not in quantities and b.percentile == forecast.slo_percentile
        if b.bound is not None or (unbounded and not b.slowdown and b.simulated is not None):
            quantities.add(b.quantity)
            quantity = b.quantity.upper() + (" slowdown" if b.slowdown else "")
            name = f"{forecast.app}/{forecast.request}"
            yield SloCheck(name, quantity, b.percentile, b.bound, b.simulated, b.slowdown)
