"""Samples of each class's requests, and statistics of the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from cornplug.planner.candidates.cache_sizes import CacheScenario
from cornplug.planner.candidates.idle_replica import IdleReplicas
from cornplug.planner.candidates.services import Service
from cornplug.planner.inputs import request_sampling
from cornplug.planner.inputs.request_classes import RequestClass, RequestSamples, SampledRequest
from cornplug.planner.inputs.schema import Component, TowerShape
from cornplug.planner.inputs.slo import Percentile

SIZE: Final = 512
QUANTILE: Final[Mapping[Percentile, float | None]] = {
    "mean": None,
    "p50": 0.5,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
}


@dataclass
class Samples:
    """Samples of the requests of every class, which are the same for every cache size.

    All classes are sampled with the same seed, so that a plan does not depend on their names or order.
    """

    encoders: Mapping[str, Component]
    """Encoders, as in `services.canonical_encoders`."""
    seed: int
    idle: IdleReplicas | None = None
    """Idle replicas, required if an SLO bounds a slowdown."""
    _cached: dict[tuple[str, tuple[str, ...], frozenset[str]], RequestSamples] = field(default_factory=dict)

    def of(
        self, request_class: RequestClass, scenario: CacheScenario, encoders: tuple[str, ...] | None = None
    ) -> RequestSamples:
        """Return a class's samples. With `encoders`, only media items of these encoders have patches."""
        key = (request_class.name, encoders or ("*",), scenario.names)
        if key not in self._cached:
            self._cached[key] = RequestSamples(self._sample(request_class, scenario, encoders))
        return self._cached[key]

    def at(self, service: Service, request_class: RequestClass, scenario: CacheScenario) -> RequestSamples:
        """Return a class's samples in which only media items for the service's own towers have patches."""
        return self.of(request_class, scenario, tuple(t.name for t in service.towers) or ("",))

    def _sample(
        self, of: RequestClass, scenario: CacheScenario, encoders: tuple[str, ...] | None
    ) -> list[SampledRequest]:
        rng = np.random.default_rng([self.seed, 0])
        sampled = request_sampling.sample_requests(
            of.request, rng, SIZE, patches_per_token=self._patches_per_token(), hits=scenario.hits
        )
        if self.idle is not None:
            sampled = self.idle.with_times(of, sampled)
        if encoders is None:
            return sampled
        if {self.encoders[m.encoder].name for m in of.request.media} <= set(encoders):
            return sampled
        others = [m for m in of.request.media if self.encoders[m.encoder].name not in encoders]
        if len(others) == len(of.request.media):
            return [replace(d, patches=()) for d in sampled]
        return [
            replace(d, patches=p) for d, p in zip(sampled, self._patches(of, scenario, encoders), strict=True)
        ]

    def _patches(
        self, of: RequestClass, scenario: CacheScenario, encoders: tuple[str, ...]
    ) -> list[tuple[int, ...]]:
        mine = [m for m in of.request.media if self.encoders[m.encoder].name in encoders]
        rng = np.random.default_rng([self.seed, 1])
        request = of.request.model_copy(update={"media": mine, "trace": None})
        sampled = request_sampling.sample_requests(
            request, rng, SIZE, patches_per_token=self._patches_per_token(), hits=scenario.hits
        )
        return [d.patches for d in sampled]

    def _patches_per_token(self) -> Mapping[str, int]:
        return {
            encoder: tower.shape.patches_per_token
            for encoder, tower in self.encoders.items()
            if isinstance(tower.shape, TowerShape)
        }


def output_tokens(sampled: Sequence[SampledRequest], percentile: Percentile) -> float:
    return _percentile([d.output_tokens for d in sampled], percentile)


def prompt_tokens(sampled: Sequence[SampledRequest], percentile: Percentile) -> float:
    return _percentile([d.prompt_tokens for d in sampled], percentile)


def _percentile(values: list[int], percentile: Percentile) -> float:
    q = QUANTILE[percentile]
    return float(np.mean(values) if q is None else np.quantile(values, q))
