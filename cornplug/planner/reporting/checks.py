"""Is each bound of each request class kept, as predicted and as simulated?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cornplug.planner.plan import Outlook, Plan, Times


@dataclass(frozen=True)
class Check:
    """One bound of one class. Times in seconds; None: not known."""

    demand: str
    quantity: str
    """TTFT, TPOT or E2E."""
    percentile: str
    bound_s: float | None
    """None: nobody asked for one; the times are shown all the same."""
    predicted_s: float | None
    simulated_s: float | None

    @property
    def worst_s(self) -> float | None:
        return max((t for t in (self.predicted_s, self.simulated_s) if t is not None), default=None)

    @property
    def kept(self) -> bool | None:
        """None where there is no bound, or no time to compare with it."""
        if self.bound_s is None or self.worst_s is None:
            return None
        return self.worst_s <= self.bound_s


def of(plan: Plan) -> list[Check]:
    """All bounds and times of a plan, class by class."""
    return [check for outlook in plan.outlook for check in _of(outlook)]


def verdict(check: Check) -> tuple[str, Literal["good", "bad", "soft"]]:
    """In a word, and how it is to be taken."""
    if check.kept is None:
        return ("no bound" if check.bound_s is None else "not known"), "soft"
    return ("kept", "good") if check.kept else ("MISSED", "bad")


def _of(outlook: Outlook) -> Iterator[Check]:
    for quantity, bound, predicted, simulated in (
        ("TTFT", outlook.slo_ttft_s, outlook.ttft, outlook.simulated_ttft),
        ("TPOT", outlook.slo_tpot_s, outlook.tpot, outlook.simulated_tpot),
        ("E2E", outlook.slo_e2e_s, outlook.e2e, outlook.simulated_e2e),
    ):
        at = outlook.slo_percentile
        check = Check(
            f"{outlook.app}/{outlook.request}", quantity, at, bound, _at(predicted, at), _at(simulated, at)
        )
        if bound is not None or check.worst_s is not None:
            yield check


def _at(times: Times | None, percentile: str) -> float | None:
    value: float | None = None if times is None else getattr(times, percentile)
    return value
