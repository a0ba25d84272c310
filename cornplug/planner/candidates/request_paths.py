"""Request paths of a class. A path consists of services, a division of the SLO among the stages, and cache
sizes.

The sum of the stages' percentiles is almost always an upper bound on the percentile of the sum. A path
therefore meets the SLO if each stage meets its bounds and the remaining time is sufficient for transfers
between the stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Final

from cornplug.planner.candidates import cache_sizes
from cornplug.planner.candidates.cache_sizes import CacheScenario
from cornplug.planner.candidates.samples import (
    Samples,
    mean_idle_times,
    output_token_percentile,
    prompt_token_percentile,
)
from cornplug.planner.candidates.services import PathTemplate, Service
from cornplug.planner.inputs import request_sampling
from cornplug.planner.inputs.request_classes import RequestClass, SampledRequest
from cornplug.planner.inputs.schema import Component
from cornplug.planner.inputs.slo import IdleTimes

ENCODER_SHARES: Final = (0.3, 0.5, 0.7)
"""Shares of the time to first token that encoders may use."""
TTFT_SHARES: Final = (0.15, 0.4)
"""Shares of a bounded end-to-end latency that the time to first token may use."""
GENERATOR_SHARES: Final = (0.25, 0.5, 0.75)
EMBEDDING_EDGE_S: Final = 0.010
"""Time in seconds to fetch an embedding from another process: lookup, notification and copy."""


@dataclass(frozen=True)
class StageBudget:
    """Bounds on the times of one stage, at the first percentile for which the class's SLO has bounds."""

    service: Service
    seconds: float
    tpot_s: float


@dataclass(frozen=True)
class RequestPath:
    request_class: RequestClass
    template: PathTemplate
    stage_budgets: tuple[StageBudget, ...]
    scenario: CacheScenario
    network_bytes: float
    """Mean number of bytes per request that are transferred between nodes."""
    name: str


@dataclass(frozen=True)
class SloDivision:
    first_s: float
    tpot_s: float
    generate_s: float


def request_paths(
    request_class: RequestClass,
    llm: Component,
    path: PathTemplate,
    scenario: CacheScenario,
    samples: Samples,
    nic_bytes_s: float,
) -> Iterator[RequestPath]:
    """Yield all divisions of the class's SLO on one path with these cache sizes."""
    embeddings, kv = _moved_bytes(request_class, llm, path, samples, scenario)
    edge_s = EMBEDDING_EDGE_S + embeddings / nic_bytes_s if path.stages[0].tasks == "E" else 0.0
    seen = set()
    for division in _divisions(
        request_class, path, samples.for_class(request_class, scenario), kv / nic_bytes_s
    ):
        for part in _encoder_shares(path, division):
            stage_budgets = tuple(_stage_budget(s, path, division, part, edge_s) for s in path.stages)
            if stage_budgets in seen or any(p.seconds <= 0 or p.tpot_s <= 0 for p in stage_budgets):
                continue
            seen.add(stage_budgets)
            name = f"{request_class.name}:{'>'.join(s.name for s in path.stages)}"
            name += "".join(f"+{n}" for n in sorted(scenario.level_names)) + f"#{len(seen)}"
            yield RequestPath(request_class, path, stage_budgets, scenario, embeddings + kv, name)


def _stage_budget(
    service: Service, path: PathTemplate, division: SloDivision, encoder_share: float, edge_s: float
) -> StageBudget:
    encoders = sum(s.tasks == "E" for s in path.stages)
    if service.tasks == "E":
        return StageBudget(service, encoder_share * division.first_s / encoders, inf)
    if service.tasks == "G":
        return StageBudget(service, division.generate_s, inf)
    if service.tasks == "D":
        return StageBudget(service, inf, division.tpot_s)
    first_s = division.first_s * (1 - encoder_share) - edge_s if encoders else division.first_s
    if "G" in service.tasks:  # The response arrives after generation, so its end is bounded.
        first_s = min(first_s, division.generate_s)
    return StageBudget(service, first_s, division.tpot_s if "D" in service.tasks else inf)


def _encoder_shares(path: PathTemplate, division: SloDivision) -> tuple[float, ...]:
    if path.stages[0].tasks != "E":
        return (0.0,)
    return ENCODER_SHARES if division.first_s < inf else ENCODER_SHARES[:1]


def _divisions(
    request_class: RequestClass, path: PathTemplate, sampled: Sequence[SampledRequest], kv_edge_s: float
) -> Iterator[SloDivision]:
    slo = request_class.slo
    idle = mean_idle_times(sampled)
    first = slo.first_bound_s("ttft", idle) or inf
    tpot = slo.first_bound_s("tpot", idle) or inf
    whole = next(iter(slo.all_bounds("e2e")), None)
    if whole is None:
        yield SloDivision(first, tpot, inf)
        return
    if whole.relative and idle is not None:
        if first < inf and tpot < inf:
            # These bounds are usually sufficient for the end-to-end latency. The simulation verifies this.
            yield SloDivision(first, tpot, inf)
        yield from _slack_divisions(whole.value, idle, first, tpot)
        return
    gaps = max(output_token_percentile(sampled, whole.percentile) - 1, 1.0)
    generates = request_class.request.generates is not None
    for generator_part, first_part in product(GENERATOR_SHARES if generates else (0.0,), TTFT_SHARES):
        left = whole.value * (1 - generator_part) - (
            kv_edge_s if "D" in {s.tasks for s in path.stages} else 0.0
        )
        first_s = min(first, left * first_part)
        yield SloDivision(
            first_s, min(tpot, (left - first_s) / gaps), whole.value * generator_part if generates else inf
        )


def _slack_divisions(slowdown: float, idle: IdleTimes, first: float, tpot: float) -> Iterator[SloDivision]:
    """Yield divisions of a mean request's end-to-end latency.

    Each stage gets its latency on the idle replica, plus a share of the remaining time.
    """
    slack, decode_s = (slowdown - 1) * idle.e2e_s, idle.e2e_s - idle.ttft_s
    for part in TTFT_SHARES:
        token_s = idle.tpot_s * (1 + (1 - part) * slack / decode_s) if decode_s > 0 else inf
        yield SloDivision(min(first, idle.ttft_s + part * slack), min(tpot, token_s), inf)


def _moved_bytes(
    request_class: RequestClass, llm: Component, path: PathTemplate, samples: Samples, scenario: CacheScenario
) -> tuple[float, float]:
    """Return (bytes of embeddings, bytes of KV) that are transferred between stages for one request.

    The KV is for a prompt length at the SLO's percentile.
    """
    tasks = {s.tasks for s in path.stages}
    embeddings = kv = 0.0
    if "E" in tasks:
        embeddings = sum(
            request_sampling.mean_length(m.items) * cache_sizes.embedding_bytes(m, llm)
            for m in request_class.request.media
        )
    if "D" in tasks:
        per_token = cache_sizes.kv_bytes_per_token(llm)
        kv = per_token * prompt_token_percentile(
            samples.for_class(request_class, scenario), request_class.slo.percentile
        )
    return embeddings, kv
