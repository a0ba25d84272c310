"""Samples of each class's requests, with statistics, and with latencies on the reference replica of an
SLO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final

import numpy as np

from cornplug.errors import ConfigError
from cornplug.planner.candidates.cache_sizes import CacheScenario
from cornplug.planner.candidates.replica_configs import ReplicaConfig
from cornplug.planner.candidates.services import Service
from cornplug.planner.candidates.timed_configs import TimedConfig, service_times
from cornplug.planner.inputs import request_sampling
from cornplug.planner.inputs.request_classes import RequestClass, RequestSamples, SampledRequest
from cornplug.planner.inputs.schema import Component, GpuSpec, NodeClass, PlanRules, TowerShape
from cornplug.planner.inputs.slo import IdleReplica, IdleTimes, Percentile
from cornplug.planner.plan import Parallelism
from cornplug.planner.simulator.replicas import isolated_decode_s, isolated_prefill_s, off_device_s
from cornplug.planner.simulator.simulator import Station

SAMPLE_SIZE: Final = 512
QUANTILE: Final[Mapping[Percentile, float | None]] = {
    "mean": None,
    "p50": 0.5,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
}


@dataclass
class Samples:
    """Samples of every class's requests, which are the same for every cache size.

    All classes are sampled with the same seed, so that a plan does not depend on the names or order of
    classes.
    """

    encoders: Mapping[str, Component]
    """Result of `services.canonical_encoders`."""
    seed: int
    idle_replicas: IdleReplicas | None = None
    """Idle replicas, required if an SLO bounds a slowdown."""
    _cached: dict[tuple[str, tuple[str, ...], frozenset[str]], RequestSamples] = field(default_factory=dict)

    def for_class(
        self, request_class: RequestClass, scenario: CacheScenario, encoders: tuple[str, ...] | None = None
    ) -> RequestSamples:
        """Return a class's samples. With `encoders`, only media items of these encoders have patches."""
        key = (request_class.name, encoders or ("*",), scenario.level_names)
        if key not in self._cached:
            self._cached[key] = RequestSamples(self._sample(request_class, scenario, encoders))
        return self._cached[key]

    def for_service(
        self, service: Service, request_class: RequestClass, scenario: CacheScenario
    ) -> RequestSamples:
        """Return a class's samples in which only media items for the service's own towers have patches."""
        return self.for_class(request_class, scenario, tuple(t.name for t in service.towers) or ("",))

    def _sample(
        self, request_class: RequestClass, scenario: CacheScenario, encoders: tuple[str, ...] | None
    ) -> list[SampledRequest]:
        rng = np.random.default_rng([self.seed, 0])
        sampled = request_sampling.sample_requests(
            request_class.request,
            rng,
            SAMPLE_SIZE,
            patches_per_token=self._patches_per_token(),
            hits=scenario.hits,
        )
        if self.idle_replicas is not None:
            sampled = self.idle_replicas.with_times(request_class, sampled)
        if encoders is None:
            return sampled
        if {self.encoders[m.encoder].name for m in request_class.request.media} <= set(encoders):
            return sampled
        others = [m for m in request_class.request.media if self.encoders[m.encoder].name not in encoders]
        if len(others) == len(request_class.request.media):
            return [replace(d, patches=()) for d in sampled]
        return [
            replace(d, patches=p)
            for d, p in zip(sampled, self._patches(request_class, scenario, encoders), strict=True)
        ]

    def _patches(
        self, request_class: RequestClass, scenario: CacheScenario, encoders: tuple[str, ...]
    ) -> list[tuple[int, ...]]:
        mine = [m for m in request_class.request.media if self.encoders[m.encoder].name in encoders]
        rng = np.random.default_rng([self.seed, 1])
        request = request_class.request.model_copy(update={"media": mine, "trace": None})
        sampled = request_sampling.sample_requests(
            request, rng, SAMPLE_SIZE, patches_per_token=self._patches_per_token(), hits=scenario.hits
        )
        return [d.patches for d in sampled]

    def _patches_per_token(self) -> Mapping[str, int]:
        return {
            encoder: tower.shape.patches_per_token
            for encoder, tower in self.encoders.items()
            if isinstance(tower.shape, TowerShape)
        }


def output_token_percentile(sampled: Sequence[SampledRequest], percentile: Percentile) -> float:
    return _percentile([d.output_tokens for d in sampled], percentile)


def prompt_token_percentile(sampled: Sequence[SampledRequest], percentile: Percentile) -> float:
    return _percentile([d.prompt_tokens for d in sampled], percentile)


def _percentile(values: list[int], percentile: Percentile) -> float:
    q = QUANTILE[percentile]
    return float(np.mean(values) if q is None else np.quantile(values, q))


@dataclass(frozen=True)
class IdleReplicas:
    """Idle replicas for classes whose SLO bounds a slowdown. Each idle replica is an engine with the class's
    towers."""

    components: Mapping[str, Component]
    encoders: Mapping[str, Component]
    """Result of `services.canonical_encoders`."""
    gpus: Mapping[str, GpuSpec]
    rules: PlanRules

    def with_times(self, request_class: RequestClass, sampled: list[SampledRequest]) -> list[SampledRequest]:
        """Return the requests. If the class's SLO bounds a slowdown, add the latencies on the idle replica.

        Raises ConfigError if no profile has the replica's times, or if the model does not fit on the replica.
        """
        idle = request_class.slo.idle
        if idle is None or not request_class.slo.has_slowdowns:
            return sampled
        station = self._station(request_class, idle, sampled)
        return [replace(d, idle=idle_times(station, d)) for d in sampled]

    def _station(
        self, request_class: RequestClass, idle: IdleReplica, sampled: Sequence[SampledRequest]
    ) -> Station:
        llm = self.components[request_class.app.llm]
        towers = tuple(dict.fromkeys(self.encoders[m.encoder] for m in request_class.request.media))
        service = Service("EPD" if towers else "PD", llm, towers)
        gpu = self.gpus[idle.gpu]
        nodes = NodeClass(name="idle", gpu=gpu.name, gpus=8, price_per_hour=0.0)
        engine, workload = idle.engine or llm.engines[0], request_class.app.workload
        config = ReplicaConfig(engine, nodes, gpu, Parallelism(idle.tp), 1.0, idle.quantisation, workload)
        context_tokens = max(round(fmean(d.prompt_tokens for d in sampled)), 1)
        hardware = service_times(service, config, self.rules, context_tokens)
        if hardware is None or hardware.steps is None:
            raise ConfigError(
                f"slo.idle of {request_class.name}",
                f"{service.name} has no times on {idle.gpu} with tp = {idle.tp}, or does not fit",
                f"Add a profile (table or roofline) to {llm.name}, or use another replica.",
            )
        return TimedConfig(service, config, hardware).station("random", 1)


def idle_times(station: Station, request: SampledRequest) -> IdleTimes:
    """Return the latencies of one request that runs alone, with the cache hits of `request`."""
    ttft_s = isolated_prefill_s(station, request) + off_device_s(station, request)
    decode_s = isolated_decode_s(station, request)
    return IdleTimes(ttft_s, decode_s / max(request.output_tokens - 1, 1), ttft_s + decode_s)


def mean_idle_times(sampled: Sequence[SampledRequest]) -> IdleTimes | None:
    """Return the mean idle latencies of a class, or None if the class's SLO bounds no slowdown.

    The mean TPOT is over requests whose output has several tokens.
    """
    known = [d.idle for d in sampled if d.idle is not None]
    if not known:
        return None
    tokens = [idle.tpot_s for idle in known if idle.tpot_s > 0]
    ttft_s, e2e_s = fmean(idle.ttft_s for idle in known), fmean(idle.e2e_s for idle in known)
    return IdleTimes(ttft_s, fmean(tokens) if tokens else 0.0, e2e_s)
