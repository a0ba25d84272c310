"""Request paths of a class, and the reasons why no cell can serve a class.

A path consists of services, a division of the SLO among the stages, and cache sizes. The sum of the stages'
percentiles is almost always an upper bound on the percentile of the sum. A path therefore meets the SLO if
each stage meets its bounds and the remaining time is sufficient for transfers between the stages.

A class is infeasible if the bound on a service is lower than the best achievable time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Final

import numpy as np

from cornplug.planner.candidates.replica_configs import PathTemplate, Service
from cornplug.planner.candidates.samples import (
    CacheScenario,
    Samples,
    embedding_bytes,
    kv_bytes_per_token,
    mean_idle_times,
    output_token_percentile,
    prompt_token_percentile,
)
from cornplug.planner.candidates.timed_configs import TimedConfig
from cornplug.planner.inputs import request_sampling
from cornplug.planner.inputs.request_sampling import RequestClass, SampledRequest
from cornplug.planner.inputs.request_tables import IdleTimes, LatencyBound, Slo, stage_bound
from cornplug.planner.inputs.schema import Component
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem
from cornplug.planner.perf_model.stations import Station, isolated_decode_s, isolated_prefill_s

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
            request_sampling.mean_length(m.items) * embedding_bytes(m, llm)
            for m in request_class.request.media
        )
    if "D" in tasks:
        per_token = kv_bytes_per_token(llm)
        kv = per_token * prompt_token_percentile(
            samples.for_class(request_class, scenario), request_class.slo.percentile
        )
    return embeddings, kv


def find_unserved_demands(pool: OptimizationProblem) -> list[str]:
    """Return the demands for which no variant has a cell at each of its services."""
    capacities: dict[str, list[tuple[float, Mapping[str, float]]]] = {}
    for c in pool.cells:
        capacities.setdefault(c.service, []).append((c.tier, c.capacity))

    def served(demand: str) -> bool:
        return any(
            all(
                any(tier <= n.tier and demand in carries for tier, carries in capacities.get(n.service, ()))
                for n in v.needs
            )
            for v in pool.variants
            if v.demand == demand
        )

    return [u.name for u in pool.demands if not served(u.name)]


def describe_infeasibility(
    request_class: RequestClass,
    request_paths: Iterable[RequestPath],
    timed_configs: Mapping[str, list[TimedConfig]],
    dropped: Mapping[str, int],
    samples: Mapping[str, Sequence[SampledRequest]],
) -> str:
    """Return a description of the stage that fails on the path that is closest to feasible.

    `timed_configs` contains the configurations that can run each service, and `samples` the class's requests
    at each service.
    """
    nearest = min(
        (_worst_stage(request_class, request_path, timed_configs, samples) for request_path in request_paths),
        key=lambda fit: fit.excess,
        default=None,
    )
    if nearest is None:
        return "no structure fits its requests. Allow another structure"
    if nearest.best_config is None:
        return _no_replica_message(nearest.stage_budget.service.name, dropped)
    if nearest.excess <= 1:
        return _small_kv_message(nearest.stage_budget.service.name, nearest.best_config, samples)
    return nearest.text


@dataclass(frozen=True)
class StageFit:
    """Comparison of a stage's bound with the latency of isolated requests on the best replica."""

    stage_budget: StageBudget
    best_config: TimedConfig | None
    bound: LatencyBound
    """Bound at the percentile that is missed most."""
    first_s: float
    tpot_s: float

    @property
    def excess(self) -> float:
        """Factor by which the replica exceeds the bounds: the larger of the factors for the first token (or
        stage) and for each further token.

        The factor is infinite if no replica can run the service.
        """
        return max(
            _bound_ratio(self.first_s, self.bound.seconds), _bound_ratio(self.tpot_s, self.bound.tpot_s)
        )

    @property
    def text(self) -> str:
        assert self.best_config is not None
        late = _bound_ratio(self.first_s, self.bound.seconds) >= _bound_ratio(self.tpot_s, self.bound.tpot_s)
        allowed, takes = (self.bound.seconds, self.first_s) if late else (self.bound.tpot_s, self.tpot_s)
        what = (
            "a token"
            if not late
            else "its stage"
            if self.stage_budget.service.tasks in ("E", "G")
            else "TTFT"
        )
        unit = "times the idle replica's latency" if self.bound.relative else "s"
        name, percentile = self.stage_budget.service.name, self.bound.percentile
        return (
            f"{name} may take at most {allowed:.3g} {unit} for {what} ({percentile}), but the fastest, "
            f"{self.best_config.footprint.name}, takes {takes:.3g} {unit} for an isolated request. "
            "Loosen the SLO, or add a faster GPU, a higher tp or a quantisation"
        )


def _worst_stage(
    request_class: RequestClass,
    request_path: RequestPath,
    timed_configs: Mapping[str, list[TimedConfig]],
    samples: Mapping[str, Sequence[SampledRequest]],
) -> StageFit:
    fits = [
        _best_fit(p, timed_configs.get(p.service.name, []), samples[p.service.name], request_class.slo)
        for p in request_path.stage_budgets
    ]
    return max(fits, key=lambda fit: fit.excess)


def _best_fit(
    stage_budget: StageBudget,
    timed_configs: list[TimedConfig],
    samples: Sequence[SampledRequest],
    slo: Slo,
) -> StageFit:
    bounds = stage_bound(slo, stage_budget.seconds, stage_budget.tpot_s, mean_idle_times(samples))
    fits = [
        max(
            (
                StageFit(stage_budget, e, one, *_isolated_latency(e.station("power_of_two", 1), samples, one))
                for one in bounds.all_bounds
            ),
            key=lambda fit: fit.excess,
        )
        for e in timed_configs
    ]
    return min(fits, key=lambda fit: fit.excess, default=StageFit(stage_budget, None, bounds, inf, inf))


def _no_replica_message(service: str, dropped: Mapping[str, int]) -> str:
    reasons = [text.partition(": ")[2] for text in dropped if text.startswith(f"{service}: ")]
    return (
        f"no replica can run {service} ({'; '.join(reasons) or 'none fits'}). Add a larger GPU or a profile"
    )


def _small_kv_message(
    service: str, best: TimedConfig, samples: Mapping[str, Sequence[SampledRequest]]
) -> str:
    """Return the reason for a service whose latency is feasible, but whose KV cache is too small for a
    request."""
    longest = max(d.prompt_tokens + d.output_tokens for d in samples[service])
    return (
        f"{service} meets its bounds for an isolated request, but KV memory is too small: requests have up "
        f"to {longest} tokens, and the KV cache of {best.footprint.name} holds {best.hardware.kv_tokens}. "
        "Add a GPU with more memory, a higher tp or a quantisation, or loosen the SLO"
    )


def _bound_ratio(value: float, allowed: float | None) -> float:
    return inf if value == inf else 0.0 if allowed is None else value / allowed


def _isolated_latency(
    station: Station, samples: Sequence[SampledRequest], bound: LatencyBound
) -> tuple[float, float]:
    """Return (time to first token, time per token) of isolated requests at the bound's percentile."""
    overhead = station.steps.request_overhead_s if station.steps and "P" in station.tasks else 0.0
    first = [isolated_prefill_s(station, d) + overhead for d in samples]
    if station.generate:
        first = [f + station.generate(d.units) for f, d in zip(first, samples, strict=True)]
    per_token = [
        isolated_decode_s(station, d) / (d.output_tokens - 1) for d in samples if d.output_tokens > 1
    ]
    if bound.relative:
        first = [f / d.idle.ttft_s for f, d in zip(first, samples, strict=True) if d.idle]
        idle = [d.idle.tpot_s for d in samples if d.idle and d.output_tokens > 1]
        per_token = [t / i for t, i in zip(per_token, idle, strict=True)]
    return bound.statistic_of(np.array(first)), bound.statistic_of(np.array(per_token))
