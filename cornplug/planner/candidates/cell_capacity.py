"""The rate that each service's replicas carry on each footprint: from profiles to the pool's cells."""

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
"""Of a cell's price, against the engine that a workload class does not favour: less than any
measured difference."""
NEEDLESSLY_TIGHT: Final = 0.001
"""Of a cell's price, for each tier that it is tighter than the loosest there can be."""
ROUGHLY: Final = 8
"""Of a class's draws every eighth tells how many replicas it will take."""
MOST_TOGETHER: Final = 32
"""Replicas behind one router for which a capacity is asked: more gain next to nothing."""

Users = Mapping[str, RequestClass]


@dataclass
class CellBuilder:
    rules: PlanRules
    nodes: tuple[NodeClass, ...]
    gpus: Mapping[str, GpuSpec]
    bases: Mapping[str, CacheScenario]
    """Request class -> its smallest caches; capacities are computed with their hit rates."""
    samples: Samples
    corrections: Mapping[Place, TimesCorrection] = field(default_factory=dict)
    """Of profiles' times, by their engines' metrics."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> cells that were left out for it."""
    config: dict[str, list[TimedConfig]] = field(default_factory=dict)
    """Service -> the replica configurations that could run it, fast enough or not."""
    _reference: dict[str, CellHardware] = field(default_factory=dict)

    def cells(
        self, service: Service, users: Users, tiers: Chain, loosest: Mapping[str, LatencyTier]
    ) -> Iterator[CellSpec]:
        """All cells of a service that carry something, and that no quicker hardware makes needless.

        `loosest`: user -> the loosest tier that it comes to; it may use no cell that promises less.
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
        """The cell with capacities that the simulator finds for so many replicas together."""
        assert spec.hardware is not None
        config = TimedConfig(spec.service, spec.footprint, spec.hardware)
        found = {
            name: self._rate(config, spec.tier, users[name], replicas, confirm=True)
            for name in spec.cell.capacity
        }
        return spec.with_capacity(found, simulated_replicas=replicas)

    def work(self, service: Service, of: RequestClass, scenario: CacheScenario) -> float:
        """Visits of a service for one request, in requests as they are with the smallest caches."""
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
        """Tokens of KV beyond which more is of no use to a replica: all that it may decode together."""
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
        # Measurements tell which engine is better; only an estimate needs a prior.
        preference = self._prior(footprint, users) if service.llm and not hardware.measured else 0.0
        # Of two promises that cost the same the looser one is enough.
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
        """Of one class alone, one replica among so many."""
        samples = self.samples.at(config.service, of, self.bases[of.name])
        bound = stage_bound(of.slo, tier.seconds, tier.tpot_s, idle_replica.means(samples))
        place = config.station(self.rules.router, replicas)
        seed = self.rules.seed
        found = capacity(place, samples, bound, burst=of.request.burst, seed=seed, confirm=confirm)
        return found / replicas * self._pairing(config)

    def _pairing(self, config: TimedConfig) -> float:
        """Share of capacity that a prefill or decode replica keeps: no pair ever matches the current mix."""
        tasks = config.service.tasks.strip("EG")
        if config.hardware.measured or tasks not in ("P", "D"):
            return 1.0
        rules = self.rules
        return rules.disaggregation_efficiency_p if tasks == "P" else rules.disaggregation_efficiency_d

    def _replicas_needed(self, config: TimedConfig, users: Users) -> int:
        """Replicas that would serve all users of a service, without any bound."""
        busy = sum(
            of.rate
            * service_demand.seconds(
                config.hardware,
                config.service.tasks,
                self.samples.at(config.service, of, self.bases[of.name])[::ROUGHLY],
            )
            for of in users.values()
        )
        return min(max(ceil(busy / config.footprint.dp / self.rules.max_utilisation), 1), MOST_TOGETHER)

    def _context_tokens(self, users: Users) -> int:
        """Typical prompt of a service's users: their mean, by rate."""
        total = sum(of.rate for of in users.values())
        mean = sum(
            of.rate / total * fmean(d.prompt_tokens for d in self.samples.of(of, self.bases[of.name]))
            for of in users.values()
        )
        return max(round(mean), 1)

    def _throughputs(self, service: Service, footprint: ReplicaConfig) -> dict[str, ThroughputProfile]:
        """Component -> its throughput, of those that have one there."""
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
        """Of a further replica: the engine's own start, and its weights; unknown shapes weigh nothing.

        0 where no user grows: it would only keep apart cells that are alike.
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
