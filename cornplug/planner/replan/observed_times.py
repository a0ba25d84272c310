"""First tokens that come later than planned, at no more than the planned load.

No other plan helps then: its times are not those of the engines that run, and a plan made again with the
same times is as wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cornplug.planner.plan import Plan
from cornplug.planner.replan import attribution
from cornplug.planner.replan.observed_load import ObservedWindow
from cornplug.planner.report import formatting

SLOWER: Final = 1.5
"""Times the planned mean: a mean of so few requests varies less, and so do good profiles."""
LEAST_REQUESTS: Final = 100
"""Of a window; fewer may be those of a cold start."""
MORE_LOAD: Final = 1.1
"""Times the planned rate: beyond it the load explains slow tokens."""


@dataclass(frozen=True)
class SlowEngines:
    """Engines of one scope, and their mean TTFT."""

    scope: str
    observed_s: float
    planned_s: float

    @property
    def text(self) -> str:
        """The sentence for an operator."""
        engines = self.scope or "the plan's engines"
        times = (
            f"{formatting.seconds(self.observed_s)} in the mean, planned {formatting.seconds(self.planned_s)}"
        )
        return (
            f"First tokens of {engines} take {times}, at no more than the planned load: the plan's times are "
            "not theirs. Measure them with `cornplug profile` and plan again."
        )


def slow_engines(plan: Plan, windows: Mapping[str, ObservedWindow]) -> Iterator[SlowEngines]:
    """Scopes whose engines are `SLOWER` than the plan's simulation.

    The plan's TTFT holds a request's encoding elsewhere, too, so that the comparison errs towards silence.
    """
    means = {f"{o.app}/{o.request}": o.ttft.mean for o in plan.latency_forecasts}
    for scope, window in windows.items():
        rates = attribution.planned_rates(plan, scope)
        known = {name: rate for name, rate in rates.items() if means.get(name) is not None}
        if window.ttft is None or window.ttft.number < LEAST_REQUESTS or known.keys() != rates.keys():
            continue
        whole = sum(rates.values())
        planned_s = sum((means[name] or 0.0) * rate for name, rate in rates.items()) / whole if whole else 0.0
        if planned_s and window.rate <= MORE_LOAD * whole and window.ttft.mean > SLOWER * planned_s:
            yield SlowEngines(scope, window.ttft.mean, planned_s)
