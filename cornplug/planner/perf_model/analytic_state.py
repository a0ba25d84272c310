"""State of one replica under a steady rate of requests, and the share of requests with slow tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cornplug.planner.perf_model.request_costs import Floats


@dataclass(frozen=True)
class AnalyticState:
    """State of one replica. Times are in seconds, and arrays have one entry per sample."""

    service: Floats
    """Time in which the replica does the work that occurs once per request."""
    own: Floats
    """Time from the end of the wait to the first token, or until the request leaves a station without
    prefill."""
    token_s: float = 0.0
    """Time of an iteration that only decodes, with some standard deviations more than the mean number of
    requests.
    """
    tpot_mean: float = 0.0
    interruptions: Floats | None = None
    """Mean number of iterations with prompts of other requests while a request decodes."""
    interruption_s: float = 0.0
    """Time that an iteration with prompts of other requests adds."""
    steps: Floats | None = None
    """Number of iterations in which a request decodes."""

    def slower_than(self, tpot_s: Floats) -> float:
        """Return the share of requests whose time per token exceeds their entry in `tpot_s`."""
        if self.steps is None:
            return 0.0
        many = self.steps > 0
        steps = self.steps[many]
        if not steps.size:
            return 0.0
        spare = (tpot_s[many] - self.token_s * (1 + 0.5 / steps)) * steps
        if self.interruptions is None or self.interruption_s <= 0:
            return float(np.mean(spare < 0))
        allowed = np.floor(spare / self.interruption_s)
        return float(np.mean(_poisson_exceeds(self.interruptions[many], allowed)))


def _poisson_exceeds(mean: Floats, count: Floats) -> Floats:
    """Return P(Poisson(mean) > count) with Wilson and Hilferty's approximation, or 1 for a negative count."""
    k = np.maximum(count, 0.0) + 1
    x = ((mean / k) ** (1 / 3) - 1 + 1 / (9 * k)) * 3 * np.sqrt(k)
    return np.where(count < 0, 1.0, _normal_below(x))


def _normal_below(x: Floats) -> Floats:
    """Return the normal distribution function with an error of 3e-4, which is sufficient for screening."""
    below: Floats = 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return below
