"""Ways of a request class: a path, how its SLO is divided among the stages, and cache sizes.

The sum of the stages' percentiles bounds the percentile of the sum from above, nearly always, so a
way's promise is safe when its stages keep theirs and the transfers between them fit in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Final

from cornplug.planner.candidates import cache_sizes
from cornplug.planner.candidates.cache_sizes import CacheScenario
from cornplug.planner.candidates.samples import Samples, output_tokens, prompt_tokens
from cornplug.planner.candidates.services import PathTemplate, Service
from cornplug.planner.inputs import length_distributions
from cornplug.planner.inputs.demand import SampledRequest
from cornplug.planner.inputs.request_classes import RequestClass
from cornplug.planner.inputs.schema import Component

ENCODER_PARTS: Final = (0.3, 0.5, 0.7)
"""Parts of the time to first token that the encoders may take."""
FIRST_PARTS: Final = (0.15, 0.4)
"""Parts of the time to the end that the first token may take, where only the end is bounded."""
GENERATOR_PARTS: Final = (0.25, 0.5, 0.75)
EMBEDDING_EDGE_S: Final = 0.010
"""Fetching an embedding from another process: lookup, notification, copy."""


@dataclass(frozen=True)
class Promise:
    """What a stage is asked to keep at the class's percentile."""

    service: Service
    seconds: float
    tpot_s: float


@dataclass(frozen=True)
class RequestPath:
    of: RequestClass
    path: PathTemplate
    promises: tuple[Promise, ...]
    assumed: CacheScenario
    network: float
    """Bytes between nodes, one request."""
    name: str


@dataclass(frozen=True)
class Budget:
    first_s: float
    tpot_s: float
    generate_s: float


def ways(
    of: RequestClass,
    llm: Component,
    path: PathTemplate,
    assumed: CacheScenario,
    samples: Samples,
    nic_bytes_s: float,
) -> Iterator[RequestPath]:
    """All divisions of the class's SLO on one path with these cache sizes."""
    embeddings, kv = _moved_bytes(of, llm, path, samples, assumed)
    edge_s = EMBEDDING_EDGE_S + embeddings / nic_bytes_s if path.stages[0].tasks == "E" else 0.0
    seen = set()
    for budget in _budgets(of, path, samples.of(of, assumed), kv / nic_bytes_s):
        for part in _encoder_parts(path, budget):
            promises = tuple(_promise(s, path, budget, part, edge_s) for s in path.stages)
            if promises in seen or any(p.seconds <= 0 or p.tpot_s <= 0 for p in promises):
                continue
            seen.add(promises)
            name = f"{of.name}:{'>'.join(s.name for s in path.stages)}"
            name += "".join(f"+{n}" for n in sorted(assumed.names)) + f"#{len(seen)}"
            yield RequestPath(of, path, promises, assumed, embeddings + kv, name)


def _promise(service: Service, path: PathTemplate, budget: Budget, part: float, edge_s: float) -> Promise:
    encoders = sum(s.tasks == "E" for s in path.stages)
    if service.tasks == "E":
        return Promise(service, part * budget.first_s / encoders, inf)
    if service.tasks == "G":
        return Promise(service, budget.generate_s, inf)
    if service.tasks == "D":
        return Promise(service, inf, budget.tpot_s)
    first_s = budget.first_s * (1 - part) - edge_s if encoders else budget.first_s
    if "G" in service.tasks:  # it answers when all is done: only the end is bounded
        first_s = min(first_s, budget.generate_s)
    return Promise(service, first_s, budget.tpot_s if "D" in service.tasks else inf)


def _encoder_parts(path: PathTemplate, budget: Budget) -> tuple[float, ...]:
    if path.stages[0].tasks != "E":
        return (0.0,)
    return ENCODER_PARTS if budget.first_s < inf else ENCODER_PARTS[:1]


def _budgets(
    of: RequestClass, path: PathTemplate, drawn: list[SampledRequest], kv_edge_s: float
) -> Iterator[Budget]:
    slo = of.slo
    first = slo.ttft_s or inf
    tpot = slo.tpot_s or inf
    if slo.e2e_s is None:
        yield Budget(first, tpot, inf)
        return
    gaps = max(output_tokens(drawn, slo) - 1, 1.0)
    generates = of.request.generates is not None
    for generator_part, first_part in product(GENERATOR_PARTS if generates else (0.0,), FIRST_PARTS):
        left = slo.e2e_s * (1 - generator_part) - (
            kv_edge_s if "D" in {s.tasks for s in path.stages} else 0.0
        )
        first_s = min(first, left * first_part)
        yield Budget(
            first_s, min(tpot, (left - first_s) / gaps), slo.e2e_s * generator_part if generates else inf
        )


def _moved_bytes(
    of: RequestClass, llm: Component, path: PathTemplate, samples: Samples, assumed: CacheScenario
) -> tuple[float, float]:
    """Of embeddings and of KV, one request at the SLO's percentile of lengths."""
    tasks = {s.tasks for s in path.stages}
    embeddings = kv = 0.0
    if "E" in tasks:
        embeddings = sum(
            length_distributions.mean(m.items) * cache_sizes.embedding_bytes(m, llm) for m in of.request.media
        )
    if "D" in tasks:
        per_token = cache_sizes.kv_bytes_per_token(llm)
        kv = per_token * prompt_tokens(samples.of(of, assumed), of.slo)
    return embeddings, kv
