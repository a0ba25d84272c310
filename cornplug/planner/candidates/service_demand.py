"""Work of a service per request, and its reduction by a larger cache.

Capacities apply to the smallest caches of the input. With a larger cache, a request counts only for the share
of its encoding and prefill that remains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from cornplug.planner.candidates.cache_sizes import CacheScenario
from cornplug.planner.candidates.services import Service
from cornplug.planner.inputs import length_distributions
from cornplug.planner.inputs.request_classes import RequestClass, SampledRequest
from cornplug.planner.inputs.schema import Component
from cornplug.planner.simulator.step_times import CellHardware

DECODE_BATCH: Final = 32
"""Requests assumed in a decode iteration when weighing its work."""


def items_to_encode(
    of: RequestClass, scenario: CacheScenario, encoders: Mapping[str, Component]
) -> dict[str, float]:
    """Return the mean number of items per request, by encoder, whose embeddings are not cached."""
    found: dict[str, float] = {}
    for media in of.request.media:
        missed = length_distributions.mean(media.items) * (
            1 - scenario.hits.embedding.get(media.encoder, 0.0)
        )
        name = encoders[media.encoder].name
        found[name] = found.get(name, 0.0) + missed
    return found


def encoding_left(
    service: Service,
    of: RequestClass,
    scenario: CacheScenario,
    base: CacheScenario,
    encoders: Mapping[str, Component],
) -> float:
    """Return the items to encode at a service of towers, relative to those with the smallest caches, or 0."""
    with_it, without = items_to_encode(of, scenario, encoders), items_to_encode(of, base, encoders)
    names = [t.name for t in service.towers]
    before = sum(without.get(n, 0.0) for n in names)
    return sum(with_it.get(n, 0.0) for n in names) / before if before else 0.0


def seconds(hardware: CellHardware, tasks: str, samples: Sequence[SampledRequest]) -> float:
    """Return the mean seconds of a replica per request, with decode iterations shared among requests."""
    total = 0.0
    for d in samples:
        if "E" in tasks and hardware.encode and d.patches:
            total += hardware.encode(sum(d.patches))
        if "P" in tasks and hardware.steps:
            total += hardware.steps.prefill(d.computed_tokens)
        if "D" in tasks and hardware.steps:
            total += (d.output_tokens - 1) * hardware.steps.decode(DECODE_BATCH) / DECODE_BATCH
        if "G" in tasks and hardware.generate and d.units:
            total += hardware.generate(d.units)
    return total / len(samples)
