"""Computes the work of a service per request, and by how much a larger cache reduces this work.

Capacities are computed for the smallest caches of the input. With a larger cache, a request counts only with
the share of its encoding and prefill that is still necessary.
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
"""Assumed number of requests in a decode iteration, among which its time is divided."""


def items_to_encode(
    of: RequestClass, scenario: CacheScenario, encoders: Mapping[str, Component]
) -> dict[str, float]:
    """Return the mean number of media items per request whose embeddings are not cached, by encoder."""
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
    """Return the number of items that an encoder service must encode, relative to the smallest caches.

    Returns 0 if the class has no items for the service's towers.
    """
    with_it, without = items_to_encode(of, scenario, encoders), items_to_encode(of, base, encoders)
    names = [t.name for t in service.towers]
    before = sum(without.get(n, 0.0) for n in names)
    return sum(with_it.get(n, 0.0) for n in names) / before if before else 0.0


def seconds(hardware: CellHardware, tasks: str, samples: Sequence[SampledRequest]) -> float:
    """Return the mean time in seconds that a replica needs per request.

    The time of a decode iteration is divided among its requests.
    """
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
