"""Samples of a class as arrays, and the time that each sample takes alone.

The times equal those of the simulator's `replicas.py` for single requests. Closed forms use the arrays,
because they evaluate a class at hundreds of cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cornplug.planner.inputs.request_classes import SampledRequest
from cornplug.planner.simulator.replicas import batches_s
from cornplug.planner.simulator.stations import Station

Floats = NDArray[np.float64]


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
def sizes_of(samples: tuple[SampledRequest, ...]) -> RequestCosts:
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
        return np.array([batches_s(station, d.patches) for d in sizes.samples])
    return np.where(sizes.patches > 0, station.encode.on(sizes.patches), 0.0)


def prefill_s(sizes: RequestCosts, station: Station) -> Floats:
    if station.steps is None or "P" not in station.tasks:
        return np.zeros_like(sizes.prompts)
    prefill = station.steps.alone
    if not station.chunked:
        return prefill.on(sizes.computed)
    whole, rest = np.divmod(sizes.computed, float(station.chunk_tokens))
    isolated: Floats = whole * prefill(station.chunk_tokens) + np.where(rest > 0, prefill.on(rest), 0.0)
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
    return np.zeros_like(sizes.units) if station.generate is None else station.generate.on(sizes.units)
