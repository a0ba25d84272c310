"""Reasons why no cell can serve a request class: the bound on a service, and the best achievable time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from cornplug.planner.candidates.request_paths import RequestPath, StageBudget
from cornplug.planner.candidates.samples import mean_idle_times
from cornplug.planner.candidates.timed_configs import TimedConfig
from cornplug.planner.inputs.request_classes import RequestClass, SampledRequest
from cornplug.planner.inputs.slo import Slo
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem
from cornplug.planner.perf_model.latency_bound import LatencyBound, stage_bound
from cornplug.planner.simulator.replicas import isolated_decode_s, isolated_prefill_s
from cornplug.planner.simulator.simulator import Station


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
