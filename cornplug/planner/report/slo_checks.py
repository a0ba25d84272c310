"""Each bound of each request class beside the simulated time, and whether it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cornplug.planner.latency_forecast import LatencyForecast
from cornplug.planner.plan import Plan
from cornplug.planner.report import formatting


@dataclass(frozen=True)
class SloCheck:
    """One bound of one class: seconds, or a slowdown against an idle replica. None: not known."""

    demand: str
    quantity: str
    """TTFT, TPOT or E2E, or the slowdown of one."""
    percentile: str
    bound: float | None
    """None: the input sets no bound; the times are shown all the same."""
    simulated: float | None
    slowdown: bool = False

    @property
    def kept(self) -> bool | None:
        """None where there is no bound, or no time to compare with it."""
        if self.bound is None or self.simulated is None:
            return None
        return self.simulated <= self.bound

    @property
    def name(self) -> str:
        """ "TTFT P95"."""
        return f"{self.quantity} {formatting.percentile(self.percentile)}"

    @property
    def bound_text(self) -> str:
        return formatting.measured(self.bound, slowdown=self.slowdown)

    @property
    def simulated_text(self) -> str:
        return formatting.measured(self.simulated, slowdown=self.slowdown)


def of(plan: Plan) -> list[SloCheck]:
    """All bounds and times of a plan, class by class."""
    return [check for forecast in plan.latency_forecasts for check in _of(forecast)]


def verdict(check: SloCheck) -> tuple[str, Literal["good", "bad", "soft"]]:
    """In a word, and how it is to be taken."""
    if check.kept is None:
        return ("no bound" if check.bound is None else "not known"), "soft"
    return ("kept", "good") if check.kept else ("MISSED", "bad")


def _of(forecast: LatencyForecast) -> Iterator[SloCheck]:
    """The bounds; and the times without one, at the first percentile."""
    found = [b for b in forecast.bounds if b.bound is not None]
    quantities = {b.quantity for b in found}
    for b in forecast.bounds:
        unbounded = b.quantity not in quantities and b.percentile == forecast.slo_percentile
        if b.bound is not None or (unbounded and not b.slowdown and b.simulated is not None):
            quantities.add(b.quantity)
            quantity = b.quantity.upper() + (" slowdown" if b.slowdown else "")
            name = f"{forecast.app}/{forecast.request}"
            yield SloCheck(name, quantity, b.percentile, b.bound, b.simulated, b.slowdown)
