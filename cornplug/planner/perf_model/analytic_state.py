"""State of one replica under a steady rate of requests, and the samples of a class as arrays.

Closed forms evaluate a class at hundreds of cells, so they use arrays. The times of isolated samples are
equal to the simulator's times (`replicas.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cornplug.planner.inputs.request_classes import SampledRequest
from cornplug.planner.simulator.replicas import encode_batches_s
from cornplug.planner.simulator.stations import Station

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AnalyticState:
    """State of one replica. Times are in seconds, and arrays have one entry per sample."""

    service_s: Floats
    """Time in which the replica does the work that occurs once per request."""
    own_s: Floats
    """Time from the end of the wait to the first token, or until the request leaves a station without
    prefill."""
    token_s: float = 0.0
    """Time of an iteration that only decodes, for the mean number of requests plus some standard
    deviations."""
    tpot_mean: float = 0.0
    interruptions: Floats | None = None
    """Mean number of iterations with prompts of other requests while a request decodes."""
    interruption_s: float = 0.0
    """Time that an iteration with prompts of other requests adds."""
    steps: Floats | None = None
    """Number of iterations in which a request decodes."""

    def share_slower_than(self, tpot_s: Floats) -> float:
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
    return np.where(count < 0, 1.0, _normal_cdf(x))


def _normal_cdf(x: Floats) -> Floats:
    """Return the normal distribution function with an error of 3e-4, which is sufficient for screening."""
    below: Floats = 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return below


@dataclass(frozen=True, eq=False)
class RequestCosts:
    """Sizes of a class's sampled requests, as arrays with one entry per sample."""

    samples: tuple[SampledRequest, ...]
    prompts: Floats
    computed: Floats
    outputs: Floats
    patches: Floats
    """Number of patches of all items of a sample."""
    units: Floats
    idle_ttft: Floats
    """TTFT on the idle replica in seconds, or NaN if the class's SLO bounds no slowdown."""
    idle_tpot: Floats


@lru_cache(maxsize=512)
def request_costs(samples: tuple[SampledRequest, ...]) -> RequestCosts:
    return RequestCosts(
        samples,
        np.array([float(d.prompt_tokens) for d in samples]),
        np.array([float(d.computed_tokens) for d in samples]),
        np.array([float(d.output_tokens) for d in samples]),
        np.array([float(sum(d.patches)) for d in samples]),
        np.array([d.units for d in samples]),
        np.array([d.idle.ttft_s if d.idle else np.nan for d in samples]),
        np.array([d.idle.tpot_s if d.idle else np.nan for d in samples]),
    )


def encode_s(sizes: RequestCosts, station: Station) -> Floats:
    if station.encode is None or "E" not in station.tasks:
        return np.zeros_like(sizes.prompts)
    if sizes.patches.max() > station.max_patches:
        # Items are not split, so the number of batches depends on the order of the items.
        return np.array([encode_batches_s(station, d.patches) for d in sizes.samples])
    return np.where(sizes.patches > 0, station.encode.evaluate(sizes.patches), 0.0)


def prefill_s(sizes: RequestCosts, station: Station) -> Floats:
    if station.steps is None or "P" not in station.tasks:
        return np.zeros_like(sizes.prompts)
    prefill = station.steps.isolated_prefill
    if not station.chunked:
        return prefill.evaluate(sizes.computed)
    whole, rest = np.divmod(sizes.computed, float(station.chunk_tokens))
    isolated: Floats = whole * prefill(station.chunk_tokens) + np.where(rest > 0, prefill.evaluate(rest), 0.0)
    return isolated


def decode_s(sizes: RequestCosts, station: Station) -> Floats:
    """Return the time of each request's decode iterations after the first token, in seconds."""
    if station.steps is None or "D" not in station.tasks:
        return np.zeros_like(sizes.prompts)
    steps = np.maximum(sizes.outputs - 1, 0.0)
    context = steps * (sizes.prompts + (steps - 1) / 2)
    isolated: Floats = steps * station.steps.decode(1) + station.steps.kv_token_s * context
    return isolated


def generate_s(sizes: RequestCosts, station: Station) -> Floats:
    return np.zeros_like(sizes.units) if station.generate is None else station.generate.evaluate(sizes.units)
