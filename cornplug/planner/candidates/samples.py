"""Samples of each class's requests with statistics, and cache sizes with each class's hit rates.

The statistics of a class include latencies on the reference replica of an SLO.

There is a cache of embeddings per encoder, and a cache of prefixes' KV per language model, both in the nodes'
DRAM. Hit rates are part of the input, or are computed for an LRU cache and items whose popularity follows a
Zipf distribution.

Source: Che, Tung and Wang 2002. An item stays in the cache for a characteristic time t after its last use.
This time is the same for all items, so the hit probability of an item with request rate p is 1 - exp(-p t).
The time t is chosen so that the expected number of cached items equals the cache's size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from statistics import fmean
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from cornplug.errors import ConfigError
from cornplug.planner.candidates.replica_configs import ReplicaConfig, Service
from cornplug.planner.candidates.timed_configs import TimedConfig, service_times
from cornplug.planner.inputs import component_shapes, request_sampling
from cornplug.planner.inputs.component_shapes import ELEMENT_BYTES
from cornplug.planner.inputs.request_sampling import HitRates, RequestClass, RequestSamples, SampledRequest
from cornplug.planner.inputs.request_tables import IdleReplica, IdleTimes, Percentile
from cornplug.planner.inputs.schema import (
    CacheOptions,
    Component,
    GpuSpec,
    LLMShape,
    NodeClass,
    PlanRules,
    RequestMedia,
    TowerShape,
)
from cornplug.planner.optimizer.optimization_problem import CacheLevel
from cornplug.planner.perf_model.stations import Station, isolated_decode_s, isolated_prefill_s, off_device_s
from cornplug.planner.plan import Parallelism
from cornplug.settings import GIB

Floats = NDArray[np.float64]
_ITEMS_WITH_OWN_BIN: Final = 10_000
"""Number of most popular items that have their own bins. All other items share 200 bins per decade of ranks,
with similar probabilities."""
SAMPLE_SIZE: Final = 512
QUANTILE: Final[Mapping[Percentile, float | None]] = {
    "mean": None,
    "p50": 0.5,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
}


@dataclass(frozen=True)
class CacheSizeOption:
    kind: Literal["embedding", "prefix"]
    component: str
    gib: float
    hit_rate: Mapping[str, float]
    """Hit rate by request class."""

    @property
    def cache(self) -> str:
        return f"{self.kind}:{self.component}"

    @property
    def name(self) -> str:
        return f"{self.cache}={self.gib:g}GiB"

    @property
    def cache_level(self) -> CacheLevel:
        return CacheLevel(self.name, self.cache, self.gib * GIB)


@dataclass(frozen=True)
class CacheScenario:
    """Cache levels that a variant requires, and the resulting hit rates of one request class."""

    levels: tuple[CacheSizeOption, ...] = ()
    hits: HitRates = field(default_factory=lambda: HitRates({}, 0.0))

    @property
    def level_names(self) -> frozenset[str]:
        return frozenset(level.name for level in self.levels)


def cache_levels(
    sizes: CacheOptions,
    classes: Mapping[str, RequestClass],
    llms: Mapping[str, Component],
    encoders: Mapping[str, Component],
) -> tuple[CacheSizeOption, ...]:
    """Return all sizes of each cache whose size affects the hit rate of a class.

    `llms` contains the language models by name. `encoders` is the result of
    `replica_configs.canonical_encoders`.
    """
    found: list[CacheSizeOption] = []
    for encoder in {c.name: c for c in encoders.values()}:
        users = {
            n: c
            for n, c in classes.items()
            if any(encoders[m.encoder].name == encoder for m in c.request.media)
        }
        if any(m.hit_rate is None and m.catalogue for c in users.values() for m in c.request.media):
            for gib in sizes.embedding_gib:
                rates = {
                    n: _embedding_hits(c, encoder, gib, users, llms[c.app.llm], encoders)
                    for n, c in users.items()
                }
                found.append(CacheSizeOption("embedding", encoder, gib, rates))
    for llm in {c.app.llm for c in classes.values()}:
        users = {n: c for n, c in classes.items() if c.app.llm == llm and c.request.prefix}
        if any(c.request.prefix and c.request.prefix.hit_rate is None for c in users.values()):
            for gib in sizes.prefix_gib:
                rates = {n: _prefix_hits(c, gib, users, llms[llm]) for n, c in users.items()}
                found.append(CacheSizeOption("prefix", llm, gib, rates))
    return tuple(found)


def cache_scenarios(
    request_class: RequestClass, options: tuple[CacheSizeOption, ...], encoders: Mapping[str, Component]
) -> list[CacheScenario]:
    """Return all combinations of the cache levels that affect a class, with the smallest caches first."""
    mine = [level for level in options if request_class.name in level.hit_rate]
    by_cache: dict[str, list[CacheSizeOption]] = {}
    for level in sorted(mine, key=lambda level: level.gib):
        by_cache.setdefault(level.cache, []).append(level)
    return [
        CacheScenario(levels, _hits(request_class, levels, encoders))
        for levels in product(*by_cache.values())
    ]


def _hits(
    request_class: RequestClass, levels: tuple[CacheSizeOption, ...], encoders: Mapping[str, Component]
) -> HitRates:
    by_cache = {level.cache: level.hit_rate[request_class.name] for level in levels}
    embedding = {
        m.encoder: by_cache.get(f"embedding:{encoders[m.encoder].name}", 0.0)
        if m.hit_rate is None
        else m.hit_rate
        for m in request_class.request.media
    }
    prefix = request_class.request.prefix
    if prefix is None:
        return HitRates(embedding, 0.0)
    known = prefix.hit_rate
    return HitRates(
        embedding, by_cache.get(f"prefix:{request_class.app.llm}", 0.0) if known is None else known
    )


def embedding_bytes(media: RequestMedia, llm: Component) -> float:
    """Return the size in bytes of one item's embedding for this language model, with 16 bits per value.

    Returns 0 if the model's shape is not known.
    """
    hidden = llm.shape.hidden if isinstance(llm.shape, LLMShape) else 0
    return request_sampling.mean_length(media.tokens) * hidden * ELEMENT_BYTES


def kv_bytes_per_token(llm: Component) -> int:
    """Return the size in bytes of the model's KV per token, or 0 if its shape is not known."""
    return component_shapes.kv_bytes_per_token(llm.shape) if isinstance(llm.shape, LLMShape) else 0


def _embedding_hits(
    request_class: RequestClass,
    encoder: str,
    gib: float,
    users: Mapping[str, RequestClass],
    llm: Component,
    encoders: Mapping[str, Component],
) -> float:
    media = next(m for m in request_class.request.media if encoders[m.encoder].name == encoder)
    if media.hit_rate is not None or not media.catalogue:
        return media.hit_rate or 0.0
    one = embedding_bytes(media, llm)
    if not one or not gib:
        return 0.0
    cached = _cache_share(request_class, users) * gib * GIB / one
    return lru_hit_rate(media.catalogue, media.zipf, min(cached, media.catalogue))


def _prefix_hits(
    request_class: RequestClass, gib: float, users: Mapping[str, RequestClass], llm: Component
) -> float:
    prefix = request_class.request.prefix
    assert prefix is not None
    if prefix.hit_rate is not None:
        return prefix.hit_rate
    one = prefix.tokens * kv_bytes_per_token(llm)
    # An engine's own prefix cache keeps at least the most recently used prefix.
    cached = 1 + (_cache_share(request_class, users) * gib * GIB / one if one else 0.0)
    return lru_hit_rate(prefix.distinct, prefix.zipf, min(cached, prefix.distinct))


def _cache_share(request_class: RequestClass, users: Mapping[str, RequestClass]) -> float:
    """Return the class's share of a cache's bytes, in proportion to its rate."""
    return request_class.rate / sum(c.rate for c in users.values())


@lru_cache(maxsize=4096)
def lru_hit_rate(catalogue: int, zipf: float, cached: float) -> float:
    """Return the hit rate of an LRU cache that can hold `cached` items of a catalogue of `catalogue` items.

    Requests are independent, and item k of the catalogue is requested with a probability proportional to
    k^-zipf. A cache for the complete catalogue has a hit rate of 1, because first uses are not counted.
    """
    if catalogue < 1 or zipf < 0:
        raise ValueError(f"invalid catalogue of {catalogue} items with Zipf exponent {zipf:g}")
    if cached <= 0:
        return 0.0
    if cached >= catalogue:
        return 1.0
    probability, count = _popularity(catalogue, zipf)
    time = _characteristic_time(probability, count, cached)
    return float(np.dot(probability * count, -np.expm1(-probability * time)))


def _popularity(catalogue: int, zipf: float) -> tuple[Floats, Floats]:
    """Return (probability of each item in a bin, number of items in the bin) for all bins, as two arrays."""
    edges = np.arange(1.0, min(catalogue, _ITEMS_WITH_OWN_BIN) + 2)
    if catalogue > _ITEMS_WITH_OWN_BIN:
        bins = max(int(200 * math.log10(catalogue / _ITEMS_WITH_OWN_BIN)), 1)
        edges = np.unique(
            np.concatenate([edges, np.rint(np.geomspace(_ITEMS_WITH_OWN_BIN + 1, catalogue + 1, bins + 1))])
        )
    count = np.diff(edges)
    weight = ((edges[:-1] + edges[1:] - 1) / 2) ** -zipf
    return weight / np.dot(weight, count), count


def _characteristic_time(probability: Floats, count: Floats, cached: float) -> float:
    """Return the number of requests after which an unused item is evicted, by bisection of its logarithm."""
    low, high = math.log(cached), math.log(cached)
    while np.dot(count, -np.expm1(-probability * math.exp(high))) < cached:
        high += 2.0
    for _ in range(60):
        middle = (low + high) / 2
        if np.dot(count, -np.expm1(-probability * math.exp(middle))) < cached:
            low = middle
        else:
            high = middle
    return math.exp(high)


@dataclass
class Samples:
    """Samples of every class's requests, which are the same for every cache size.

    All classes are sampled with the same seed, so that a plan does not depend on the names or order of
    classes.
    """

    encoders: Mapping[str, Component]
    """Result of `replica_configs.canonical_encoders`."""
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
    """Result of `replica_configs.canonical_encoders`."""
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
