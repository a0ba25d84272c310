"""Creates the pool's cells: computes the capacity of each service's replicas, on each footprint, from
profiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean
from typing import Final

from cornplug.planner.candidates import idle_replica, throughput_profiles
from cornplug.planner.candidates import service_demand as service_demand
from cornplug.planner.candidates.cache_sizes import CacheScenario
from cornplug.planner.candidates.cells import CellSpec, make_cell
from cornplug.planner.candidates.engine_settings import engine_settings
from cornplug.planner.candidates.latency_tiers import MOST, Chain, LatencyTier
from cornplug.planner.candidates.replica_configs import MAX_BATCH, ReplicaConfig, footprints
from cornplug.planner.candidates.samples import Samples
from cornplug.planner.candidates.service_times import service_times
from cornplug.planner.candidates.services import Service
from cornplug.planner.candidates.stage_bounds import stage_bound
from cornplug.planner.candidates.time_corrections import Place, corrected, place
from cornplug.planner.candidates.timed_configs import (
    FAVOURED,
    TimedConfig,
    undominated,
    without_needless_estimates,
)
from cornplug.planner.inputs import component_shapes
from cornplug.planner.inputs.request_classes import RequestClass
from cornplug.planner.inputs.schema import (
    GpuSpec,
    LLMShape,
    NodeClass,
    PlanRules,
    ThroughputProfile,
    Workload,
)
from cornplug.planner.perf_model.capacity import capacity
from cornplug.planner.plan import TimesCorrection
from cornplug.planner.simulator.step_times import CellHardware

URGENCY: Final[tuple[Workload, ...]] = ("online", "semi-online", "offline")
PRIOR: Final = 0.02
"""Disadvantage of an engine that the workload does not favour, as a share of a cell's price. It is smaller
than any measured difference between engines."""
NEEDLESSLY_TIGHT: Final = 0.001
"""Disadvantage of a cell for each tier by which it is tighter than the loosest tier, as a share of its
price."""
ROUGHLY: Final = 8
"""Step between the samples of a class that are used to estimate the number of its replicas."""
MOST_TOGETHER: Final = 32
"""Maximum number of replicas behind one router. With more replicas, the capacity per replica hardly grows."""

Users = Mapping[str, RequestClass]


@dataclass
class CellBuilder:
    rules: PlanRules
    nodes: tuple[NodeClass, ...]
    gpus: Mapping[str, GpuSpec]
    bases: Mapping[str, CacheScenario]
    """Request class -> scenario with the smallest caches. Capacities are computed with its hit rates."""
    samples: Samples
    corrections: Mapping[Place, TimesCorrection] = field(default_factory=dict)
    """Corrections of the profiles' times, from engine metrics."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> number of cells that were excluded for this reason."""
    config: dict[str, list[TimedConfig]] = field(default_factory=dict)
    """Service -> replica configurations that can run the service, whether or not they are fast enough."""
    _reference: dict[str, CellHardware] = field(default_factory=dict)

    def cells(
        self, service: Service, users: Users, tiers: Chain, loosest: Mapping[str, LatencyTier]
    ) -> Iterator[CellSpec]:
        """Yield the cells of a service that have capacity and that no faster configuration replaces.

        `users` are the request classes that visit the service. `loosest` is the loosest tier of each class,
        which cannot use cells with a looser tier.
        """
        workloads = tuple(w for w in URGENCY if any(u.app.workload == w for u in users.values()))
        timed: list[TimedConfig] = []
        context_tokens = self._context_tokens(users)
        for footprint in footprints(service, self.nodes, self.gpus, self.rules, workloads, self.dropped):
            profiles = self._throughputs(service, footprint)
            if not profiles:
                timed += self._timed_config(service, footprint, context_tokens)
            elif len(profiles) < len(service.components):
                self.dropped[f"{service.name}: one component has times, another has only a throughput"] += 1
            elif footprint.workload == workloads[0]:
                yield from self._untimed(service, footprint, profiles, users, tiers)
        enough = self._enough_kv(users)
        self.config[service.name] = undominated(without_needless_estimates(timed), enough)
        for config in self.config[service.name]:
            yield from self._timed(config, users, tiers, loosest)

    def confirm(self, spec: CellSpec, users: Users, replicas: int) -> CellSpec:
        """Return the cell with capacities that the simulator determines for `replicas` replicas."""
        assert spec.hardware is not None
        config = TimedConfig(spec.service, spec.footprint, spec.hardware)
        found = {
            name: self._rate(config, spec.tier, users[name], replicas, confirm=True)
            for name in spec.cell.capacity
        }
        return spec.with_capacity(found, simulated_replicas=replicas)

    def work(self, service: Service, of: RequestClass, scenario: CacheScenario) -> float:
        """Return a service's work per request, relative to the work with the smallest caches."""
        base = self.bases[of.name]
        if service.tasks == "E":
            return service_demand.encoding_left(service, of, scenario, base, self.samples.encoders)
        hardware = self._reference.get(service.name)
        if scenario.names == base.names or hardware is None:
            return 1.0
        now, before = (self.samples.at(service, of, a) for a in (scenario, base))
        return service_demand.seconds(hardware, service.tasks, now) / service_demand.seconds(
            hardware, service.tasks, before
        )

    def _timed_config(
        self, service: Service, footprint: ReplicaConfig, context_tokens: int
    ) -> list[TimedConfig]:
        hardware = service_times(service, footprint, self.rules, context_tokens)
        if hardware is None:
            self.dropped[f"{service.name}: no profile, or too little memory, on {footprint.gpu.name}"] += 1
            return []
        hardware = corrected(hardware, self.corrections.get(place(service, footprint)))
        self._reference.setdefault(service.name, hardware)
        return [TimedConfig(service, footprint, hardware)]

    def _enough_kv(self, users: Users) -> int:
        """Return the number of KV tokens in a replica's largest batch. More KV tokens are of no use."""
        longest = max(
            d.prompt_tokens + d.output_tokens
            for of in users.values()
            for d in self.samples.of(of, self.bases[of.name])
        )
        return longest * max(MAX_BATCH.values())

    def _timed(
        self, config: TimedConfig, users: Users, tiers: Chain, loosest: Mapping[str, LatencyTier]
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
        preference = self._prior(footprint, users) if service.llm and not hardware.measured else 0.0
        # If two tiers cost the same, prefer the looser tier, which is sufficient.
        preference += NEEDLESSLY_TIGHT * (MOST - tier.rank)
        start_s = self._start_s(service, footprint, users)
        cell = make_cell(service, footprint, tier, rates, preference, timed=True, start_s=start_s)
        return CellSpec(
            cell, service, footprint, tier, hardware.source, hardware, settings, self.rules.router
        )

    def _rate(
        self,
        config: TimedConfig,
        tier: LatencyTier,
        of: RequestClass,
        replicas: int,
        *,
        confirm: bool,
    ) -> float:
        """Return the maximum rate per replica if `replicas` replicas serve only this class."""
        samples = self.samples.at(config.service, of, self.bases[of.name])
        bound = stage_bound(of.slo, tier.seconds, tier.tpot_s, idle_replica.means(samples))
        place = config.station(self.rules.router, replicas)
        seed = self.rules.seed
        found = capacity(place, samples, bound, burst=of.request.burst, seed=seed, confirm=confirm)
        return found / replicas * self._pairing(config)

    def _pairing(self, config: TimedConfig) -> float:
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
            * service_demand.seconds(
                config.hardware,
                config.service.tasks,
                self.samples.at(config.service, of, self.bases[of.name])[::ROUGHLY],
            )
            for of in users.values()
        )
        return min(
            max(ceil(busy / config.footprint.parallelism.dp / self.rules.max_utilisation), 1), MOST_TOGETHER
        )

    def _context_tokens(self, users: Users) -> int:
        """Return the mean prompt length of a service's classes, weighted by rate."""
        total = sum(of.rate for of in users.values())
        mean = sum(
            of.rate / total * fmean(d.prompt_tokens for d in self.samples.of(of, self.bases[of.name]))
            for of in users.values()
        )
        return max(round(mean), 1)

    def _throughputs(self, service: Service, footprint: ReplicaConfig) -> dict[str, ThroughputProfile]:
        """Return the throughput profiles for this service and footprint, by component."""
        found = {c.name: throughput_profiles.given(service, c, footprint) for c in service.components}
        return {name: profile for name, profile in found.items() if profile is not None}

    def _untimed(
        self,
        service: Service,
        footprint: ReplicaConfig,
        profiles: Mapping[str, ThroughputProfile],
        users: Users,
        tiers: Chain,
    ) -> Iterator[CellSpec]:
        rates = {
            name: throughput_profiles.rate(service, profiles, footprint, of, self._items(of), self.rules)
            for name, of in users.items()
        }
        if not any(rates.values()):
            self.dropped[f"{service.name}: no throughput for its requests under their SLOs"] += 1
            return
        preference = self._prior(footprint, users) if service.llm else 0.0
        tier = tiers.tiers[0]
        start_s = self._start_s(service, footprint, users)
        cell = make_cell(service, footprint, tier, rates, preference, timed=False, start_s=start_s)
        source = "; ".join(dict.fromkeys(p.source for p in profiles.values()))
        yield CellSpec(cell, service, footprint, tier, f"throughput: {source}")

    def _start_s(self, service: Service, footprint: ReplicaConfig, users: Users) -> float:
        """Return the seconds to start another replica, for engine startup and loading of weights.

        Weights of components without a known shape are ignored. Returns 0 if no class grows, because the time
        would only distinguish similar cells.
        """
        if not any(of.online and of.request.growth_per_minute for of in users.values()):
            return 0.0
        shapes = (c.shape for c in service.components)
        total = sum(
            component_shapes.weights_bytes(s, footprint.quantisation) for s in shapes if s is not None
        )
        return self.rules.start_s + total / (footprint.nodes.weights_gb_s * 1e9)

    def _items(self, of: RequestClass) -> dict[str, float]:
        return service_demand.items_to_encode(of, self.bases[of.name], self.samples.encoders)

    def _prior(self, footprint: ReplicaConfig, users: Users) -> float:
        against = sum(u.rate for u in users.values() if FAVOURED[u.app.workload] != footprint.engine)
        return PRIOR * against / sum(u.rate for u in users.values())
