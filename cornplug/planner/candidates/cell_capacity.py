"""Creation of the pool's cells. A cell is a replica configuration of a service, with its capacity.

Capacities are computed from profiles, for the smallest caches of the input. With a larger cache, a request
counts only with the share of its encoding and prefill that is still necessary.

If only throughputs are known, but no times, an encoder's throughput is in items per second, and that of a
language model or a generator in requests per second. A replica runs its components one after another, so its
rate is 1 / (sum of 1 / rate).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean
from typing import Final

from cornplug.planner.candidates.cells import CellSpec, build_cell
from cornplug.planner.candidates.latency_tiers import MAX_TIERS, LatencyTier, TierChain
from cornplug.planner.candidates.replica_configs import (
    MAX_BATCH,
    ReplicaConfig,
    Service,
    engine_settings,
    footprints,
)
from cornplug.planner.candidates.samples import CacheScenario, Samples, mean_idle_times
from cornplug.planner.candidates.timed_configs import (
    PREFERRED_ENGINE,
    ProfileKey,
    TimedConfig,
    corrected_times,
    drop_dominated_configs,
    drop_redundant_estimates,
    profile_key,
    service_times,
)
from cornplug.planner.inputs import component_shapes, request_sampling
from cornplug.planner.inputs.request_sampling import RequestClass, SampledRequest
from cornplug.planner.inputs.request_tables import stage_bound
from cornplug.planner.inputs.schema import (
    Component,
    GpuSpec,
    LLMShape,
    MeasuredProfile,
    NodeClass,
    PlanRules,
    Profile,
    ThroughputProfile,
    Workload,
)
from cornplug.planner.perf_model import profile_lookup as measured
from cornplug.planner.perf_model.capacity import capacity
from cornplug.planner.perf_model.engine_spec import CellHardware
from cornplug.planner.plan import TimesCorrection

WORKLOADS_BY_URGENCY: Final[tuple[Workload, ...]] = ("online", "semi-online", "offline")
UNFAVOURED_ENGINE_PENALTY: Final = 0.02
"""Disadvantage of an engine that the workload does not favour, as a share of a cell's price. It is smaller
than any measured difference between engines."""
TIGHT_TIER_PENALTY: Final = 0.001
"""Disadvantage of a cell, as a share of its price, for each latency tier by which the cell is tighter
than the loosest tier."""
ESTIMATE_STRIDE: Final = 8
"""Step between the samples of a class that are used to estimate the number of replicas."""
MAX_REPLICAS_PER_ROUTER: Final = 32
"""Maximum number of replicas behind one router. With more replicas, the capacity per replica hardly grows."""

Users = Mapping[str, RequestClass]
_DECODE_BATCH: Final = 32
"""Assumed number of requests in a decode iteration. The time of the iteration is divided among them."""


@dataclass
class CellBuilder:
    rules: PlanRules
    nodes: tuple[NodeClass, ...]
    gpus: Mapping[str, GpuSpec]
    base_scenarios: Mapping[str, CacheScenario]
    """Scenario with the smallest caches by request class. Capacities are computed with the scenario's hit
    rates."""
    samples: Samples
    corrections: Mapping[ProfileKey, TimesCorrection] = field(default_factory=dict)
    """Corrections of the profiles' times, which `cornplug replan` derived from engine metrics."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of excluded cells by reason."""
    timed_configs: dict[str, list[TimedConfig]] = field(default_factory=dict)
    """Replica configurations that can run a service, whether or not they are fast enough, by service name."""
    _reference_times: dict[str, CellHardware] = field(default_factory=dict)

    def build_cells(
        self, service: Service, users: Users, tiers: TierChain, loosest: Mapping[str, LatencyTier]
    ) -> Iterator[CellSpec]:
        """Yield the cells of a service that have capacity and that no faster configuration replaces.

        `users` are the request classes that visit the service. `loosest` is the loosest tier of each class,
        which cannot use cells with a looser tier.
        """
        workloads = tuple(w for w in WORKLOADS_BY_URGENCY if any(u.app.workload == w for u in users.values()))
        timed: list[TimedConfig] = []
        context_tokens = self._context_tokens(users)
        for footprint in footprints(service, self.nodes, self.gpus, self.rules, workloads, self.dropped):
            profiles = self._throughputs(service, footprint)
            if not profiles:
                timed += self._timed_config(service, footprint, context_tokens)
            elif len(profiles) < len(service.components):
                self.dropped[f"{service.name}: one component has times, another has only a throughput"] += 1
            elif footprint.workload == workloads[0]:
                yield from self._throughput_cells(service, footprint, profiles, users, tiers)
        enough = self._max_useful_kv_tokens(users)
        self.timed_configs[service.name] = drop_dominated_configs(drop_redundant_estimates(timed), enough)
        for config in self.timed_configs[service.name]:
            yield from self._timed_cells(config, users, tiers, loosest)

    def confirm(self, spec: CellSpec, users: Users, replicas: int) -> CellSpec:
        """Return the cell with capacities that the simulator determines for `replicas` replicas."""
        assert spec.hardware is not None
        config = TimedConfig(spec.service, spec.footprint, spec.hardware)
        found = {
            name: self._rate(config, spec.tier, users[name], replicas, confirm=True)
            for name in spec.cell.capacity
        }
        return spec.with_capacity(found, simulated_replicas=replicas)

    def relative_work(self, service: Service, request_class: RequestClass, scenario: CacheScenario) -> float:
        """Return a service's work per request, relative to the work with the smallest caches."""
        base = self.base_scenarios[request_class.name]
        if service.tasks == "E":
            return _relative_encode_work(service, request_class, scenario, base, self.samples.encoders)
        hardware = self._reference_times.get(service.name)
        if scenario.level_names == base.level_names or hardware is None:
            return 1.0
        now, before = (self.samples.for_service(service, request_class, a) for a in (scenario, base))
        return _seconds_per_request(hardware, service.tasks, now) / _seconds_per_request(
            hardware, service.tasks, before
        )

    def _timed_config(
        self, service: Service, footprint: ReplicaConfig, context_tokens: int
    ) -> list[TimedConfig]:
        hardware = service_times(service, footprint, self.rules, context_tokens)
        if hardware is None:
            self.dropped[f"{service.name}: no profile, or too little memory, on {footprint.gpu.name}"] += 1
            return []
        hardware = corrected_times(hardware, self.corrections.get(profile_key(service, footprint)))
        self._reference_times.setdefault(service.name, hardware)
        return [TimedConfig(service, footprint, hardware)]

    def _max_useful_kv_tokens(self, users: Users) -> int:
        """Return the number of KV tokens in a replica's largest batch. A larger KV cache is of no use."""
        longest = max(
            d.prompt_tokens + d.output_tokens
            for of in users.values()
            for d in self.samples.for_class(of, self.base_scenarios[of.name])
        )
        return longest * max(MAX_BATCH.values())

    def _timed_cells(
        self, config: TimedConfig, users: Users, tiers: TierChain, loosest: Mapping[str, LatencyTier]
    ) -> Iterator[CellSpec]:
        service, gpu = config.service, config.footprint.gpu.name
        replicas = self._replicas_needed(config, users)
        for tier in tiers.tiers:
            rates = {
                name: self._rate(config, tier, of, replicas, confirm=False)
                for name, of in users.items()
                if tier.rank <= loosest[name].rank
            }
            if not any(rates.values()):
                self.dropped[f"{service.name}: too slow for its bounds on {gpu}"] += 1
                continue
            yield self._timed_cell(config, tier, rates, users)

    def _timed_cell(
        self,
        config: TimedConfig,
        tier: LatencyTier,
        rates: Mapping[str, float],
        users: Users,
    ) -> CellSpec:
        service, footprint, hardware = config.service, config.footprint, config.hardware
        shape = service.llm.shape if service.llm else None
        settings = (
            engine_settings(service, footprint, shape, hardware) if isinstance(shape, LLMShape) else None
        )
        # Measurements show which engine is better. Only estimates need a preference for an engine.
        preference = self._engine_penalty(footprint, users) if service.llm and not hardware.measured else 0.0
        # If two tiers cost the same, prefer the looser tier, which is sufficient.
        preference += TIGHT_TIER_PENALTY * (MAX_TIERS - tier.rank)
        start_s = self._start_s(service, footprint, users)
        cell = build_cell(service, footprint, tier, rates, preference, has_times=True, start_s=start_s)
        return CellSpec(
            cell, service, footprint, tier, hardware.source, hardware, settings, self.rules.router
        )

    def _rate(
        self,
        config: TimedConfig,
        tier: LatencyTier,
        request_class: RequestClass,
        replicas: int,
        *,
        confirm: bool,
    ) -> float:
        """Return the maximum rate per replica if `replicas` replicas serve only this class."""
        samples = self.samples.for_service(
            config.service, request_class, self.base_scenarios[request_class.name]
        )
        bound = stage_bound(request_class.slo, tier.seconds, tier.tpot_s, mean_idle_times(samples))
        place = config.station(self.rules.router, replicas)
        seed = self.rules.seed
        found = capacity(place, samples, bound, burst=request_class.request.burst, seed=seed, confirm=confirm)
        return found / replicas * self._pairing_efficiency(config)

    def _pairing_efficiency(self, config: TimedConfig) -> float:
        """Return the share of a prefill or decode replica's capacity that can be used.

        The ratio of prefill to decode replicas never matches the current mix of requests exactly.
        """
        tasks = config.service.tasks.strip("EG")
        if config.hardware.measured or tasks not in ("P", "D"):
            return 1.0
        rules = self.rules
        return rules.disaggregation_efficiency_p if tasks == "P" else rules.disaggregation_efficiency_d

    def _replicas_needed(self, config: TimedConfig, users: Users) -> int:
        """Return the number of replicas that could serve all classes of a service if there were no bounds."""
        busy = sum(
            of.rate
            * _seconds_per_request(
                config.hardware,
                config.service.tasks,
                self.samples.for_service(config.service, of, self.base_scenarios[of.name])[::ESTIMATE_STRIDE],
            )
            for of in users.values()
        )
        return min(
            max(ceil(busy / config.footprint.parallelism.dp / self.rules.max_utilisation), 1),
            MAX_REPLICAS_PER_ROUTER,
        )

    def _context_tokens(self, users: Users) -> int:
        """Return the mean prompt length of a service's classes, weighted by rate."""
        total = sum(of.rate for of in users.values())
        mean = sum(
            of.rate
            / total
            * fmean(d.prompt_tokens for d in self.samples.for_class(of, self.base_scenarios[of.name]))
            for of in users.values()
        )
        return max(round(mean), 1)

    def _throughputs(self, service: Service, footprint: ReplicaConfig) -> dict[str, ThroughputProfile]:
        """Return the throughput profiles for this service and footprint, by component."""
        found = {c.name: _throughput_profile(service, c, footprint) for c in service.components}
        return {name: profile for name, profile in found.items() if profile is not None}

    def _throughput_cells(
        self,
        service: Service,
        footprint: ReplicaConfig,
        profiles: Mapping[str, ThroughputProfile],
        users: Users,
        tiers: TierChain,
    ) -> Iterator[CellSpec]:
        rates = {
            name: _measured_rate(service, profiles, footprint, of, self._items(of), self.rules)
            for name, of in users.items()
        }
        if not any(rates.values()):
            self.dropped[f"{service.name}: no throughput for its requests under their SLOs"] += 1
            return
        preference = self._engine_penalty(footprint, users) if service.llm else 0.0
        tier = tiers.tiers[0]
        start_s = self._start_s(service, footprint, users)
        cell = build_cell(service, footprint, tier, rates, preference, has_times=False, start_s=start_s)
        source = "; ".join(dict.fromkeys(p.source for p in profiles.values()))
        yield CellSpec(cell, service, footprint, tier, f"throughput: {source}")

    def _start_s(self, service: Service, footprint: ReplicaConfig, users: Users) -> float:
        """Return the seconds to start another replica, for engine startup and loading of weights.

        Weights of components without a known shape are ignored. Returns 0 if the rate of no class grows,
        because the plan then does not depend on the start time.
        """
        if not any(of.online and of.request.growth_per_minute for of in users.values()):
            return 0.0
        shapes = (c.shape for c in service.components)
        total = sum(
            component_shapes.weights_bytes(s, footprint.quantisation) for s in shapes if s is not None
        )
        return self.rules.start_s + total / (footprint.nodes.weights_gb_s * 1e9)

    def _items(self, request_class: RequestClass) -> dict[str, float]:
        return _items_to_encode(request_class, self.base_scenarios[request_class.name], self.samples.encoders)

    def _engine_penalty(self, footprint: ReplicaConfig, users: Users) -> float:
        against = sum(u.rate for u in users.values() if PREFERRED_ENGINE[u.app.workload] != footprint.engine)
        return UNFAVOURED_ENGINE_PENALTY * against / sum(u.rate for u in users.values())


def _items_to_encode(
    request_class: RequestClass, scenario: CacheScenario, encoders: Mapping[str, Component]
) -> dict[str, float]:
    """Return the mean number of media items per request whose embeddings are not cached, by encoder."""
    found: dict[str, float] = {}
    for media in request_class.request.media:
        missed = request_sampling.mean_length(media.items) * (
            1 - scenario.hits.embedding.get(media.encoder, 0.0)
        )
        name = encoders[media.encoder].name
        found[name] = found.get(name, 0.0) + missed
    return found


def _relative_encode_work(
    service: Service,
    request_class: RequestClass,
    scenario: CacheScenario,
    base: CacheScenario,
    encoders: Mapping[str, Component],
) -> float:
    """Return the number of items that an encoder service must encode, relative to the smallest caches.

    Returns 0 if the class has no items for the service's towers.
    """
    with_it, without = (
        _items_to_encode(request_class, scenario, encoders),
        _items_to_encode(request_class, base, encoders),
    )
    names = [t.name for t in service.towers]
    before = sum(without.get(n, 0.0) for n in names)
    return sum(with_it.get(n, 0.0) for n in names) / before if before else 0.0


def _seconds_per_request(hardware: CellHardware, tasks: str, samples: Sequence[SampledRequest]) -> float:
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
            total += (d.output_tokens - 1) * hardware.steps.decode(_DECODE_BATCH) / _DECODE_BATCH
        if "G" in tasks and hardware.generate and d.units:
            total += hardware.generate(d.units)
    return total / len(samples)


def _throughput_profile(
    service: Service, component: Component, footprint: ReplicaConfig
) -> ThroughputProfile | None:
    """Return the component's throughput profile, or None if the first matching profile is of another kind."""
    for profile in component.profiles:
        if _fits(profile, service, component, footprint):
            return profile if isinstance(profile, ThroughputProfile) else None
    return None


def _role(service: Service, component: Component) -> str:
    """Return the tasks of the service that `component` does."""
    if component.kind == "encoder":
        return "E"
    return "G" if component.kind == "generator" else service.tasks.strip("EG")


def _measured_rate(
    service: Service,
    profiles: Mapping[str, ThroughputProfile],
    footprint: ReplicaConfig,
    request_class: RequestClass,
    items: Mapping[str, float],
    rules: PlanRules,
) -> float:
    """Return a class's requests per second on one replica, or 0 if it is not known or misses the SLO.

    The rate is proportional to the replica's share of a GPU, and reduced because of other replicas on the GPU
    (`rules.interference`).

    Args:
        profiles: Throughputs by component.
        items: Mean number of items to encode per request, by encoder.
    """
    whole = profiles.get(service.llm.name) if service.llm else None
    parts = {service.name: whole} if whole and whole.role == service.tasks else dict(profiles)
    seconds = 0.0
    for name, profile in parts.items():
        per_s = _requests_per_s(profile, request_class)
        if not per_s:
            return 0.0
        seconds += _uses_per_request(name, service, request_class, items) / per_s
    scale = footprint.share * (1 - rules.interference if footprint.share < 1 else 1)
    return scale * _efficiency(service, profiles, rules) / seconds if seconds else float("inf")


def _requests_per_s(profile: ThroughputProfile, request_class: RequestClass) -> float:
    bound = request_class.slo.first_bound_s("tpot")
    if bound is not None and profile.tpot_s.get(request_class.name, 0.0) > bound:
        return 0.0
    if isinstance(profile.requests_per_s, dict):
        return profile.requests_per_s.get(request_class.name, 0.0)
    return profile.requests_per_s


def _uses_per_request(
    name: str, service: Service, request_class: RequestClass, items: Mapping[str, float]
) -> float:
    """Return the number of times that a request uses a component.

    This is the number of items for an encoder, and 0 for a generator that the class does not use.
    """
    if any(t.name == name for t in service.towers):
        return items.get(name, 0.0)
    if service.generator and service.generator.name == name:
        return 1.0 if request_class.request.generates else 0.0
    return 1.0


def _efficiency(service: Service, profiles: Mapping[str, ThroughputProfile], rules: PlanRules) -> float:
    """Return the efficiency of a separate prefill or decode replica, or 1 if the throughput was measured in
    this role."""
    tasks = service.tasks.strip("EG")
    if tasks not in ("P", "D") or any(p.role == tasks for p in profiles.values()):
        return 1.0
    return rules.disaggregation_efficiency_p if tasks == "P" else rules.disaggregation_efficiency_d


def _fits(profile: Profile, service: Service, component: Component, f: ReplicaConfig) -> bool:
    if not isinstance(profile, ThroughputProfile | MeasuredProfile):
        return True
    fits = measured.profile_matches(profile, f.engine_spec(), _quantisation(component, f))
    if isinstance(profile, ThroughputProfile):
        fits = fits and profile.role in (None, _role(service, component), service.tasks)
    return fits


def _quantisation(component: Component, f: ReplicaConfig) -> str:
    """Return the quantisation of a component. Towers and generators in an LLM's engine may not be
    quantised."""
    return f.quantisation if f.quantisation in component.any_quantisations else "none"
