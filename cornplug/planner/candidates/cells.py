"""Replica configurations with their times, and cells: combinations of a service, a configuration and a tier.

The times of a configuration are from the profiles of the service's components. They may be corrected with
factors from engine metrics. Configurations that no plan needs are removed.

A tier is a bound on a percentile of a stage's time and on the time per token. A variant is a path of a
class's requests, with a bound for each stage. The bounds of all variants are merged into a short chain of
tiers, rounded to the tighter bound, so that every cell of a tier can do the work of all looser tiers.

Cells and variants that no plan needs are removed. This does not change the best plan: replicas of the
dominating cell can replace a replica of the dominated cell on the same GPUs, because GPU counts of cells
divide one another. If two variants need the same work, the variant with the looser bounds can replace the
other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from math import inf, isinf
from typing import Final

from cornplug.planner.candidates.replica_configs import ReplicaConfig, Service
from cornplug.planner.inputs.schema import Component, GeneratorShape, PlanRules, RouterPolicy, TowerShape
from cornplug.planner.optimizer.optimization_problem import Cell, PathVariant
from cornplug.planner.perf_model import profile_lookup
from cornplug.planner.perf_model.engine_spec import CellHardware, PiecewiseCurve
from cornplug.planner.perf_model.stations import Station
from cornplug.planner.plan import EngineSettings, ReplicaGroup, TimesCorrection

PREFERRED_ENGINE: Final = {"online": "sglang", "semi-online": "sglang", "offline": "vllm"}
"""Preferred engine by workload if there are no measurements."""
ProfileKey = tuple[str, str, str, int, int, int, int, int, float, str]
"""(service, engine, GPU, TP, PP, DP, DCP, PCP, share, quantisation) of a replica. Replicas with equal values
use the same profile."""


@dataclass(frozen=True)
class TimedConfig:
    service: Service
    footprint: ReplicaConfig
    hardware: CellHardware

    @property
    def has_preferred_engine(self) -> bool:
        return PREFERRED_ENGINE[self.footprint.workload] == self.footprint.engine

    def station(self, router: RouterPolicy, replicas: int, *, name: str = "") -> Station:
        hardware = self.hardware
        return Station(
            name=name,
            replicas=replicas,
            groups=self.footprint.parallelism.dp,
            tasks=self.service.tasks,
            steps=hardware.steps,
            encode=hardware.encode,
            generate=hardware.generate,
            kv_tokens=hardware.kv_tokens if hardware.steps else 1 << 60,
            max_batch=self.footprint.max_batch,
            chunk_tokens=self.footprint.chunk_tokens,
            # An encoder service distributes the work among its replicas itself.
            router="least_work" if self.service.tasks == "E" else router,
        )


def drop_redundant_estimates(configs: Iterable[TimedConfig]) -> list[TimedConfig]:
    """Return the configurations without unnecessary estimates.

    An estimate is unnecessary if the same GPUs and settings have a measurement, or an estimate with the
    favoured engine. An estimate does not depend on the engine, so it must not decide between engines.
    """
    places: defaultdict[tuple[object, ...], list[TimedConfig]] = defaultdict(list)
    for one in configs:
        f = one.footprint
        places[f.nodes.name, f.parallelism, f.share, f.quantisation, f.workload].append(one)
    kept: list[TimedConfig] = []
    for same in places.values():
        better = any(one.hardware.measured or one.has_preferred_engine for one in same)
        kept += [one for one in same if one.hardware.measured or one.has_preferred_engine or not better]
    return kept


def drop_dominated_configs(configs: Iterable[TimedConfig], enough_kv_tokens: int) -> list[TimedConfig]:
    """Remove each configuration for which another configuration is never slower and has at least as much KV.

    Only configurations with the same number of GPUs, DP and workload are compared. More KV than
    `enough_kv_tokens` is not an advantage.
    """
    rivals: defaultdict[tuple[object, ...], list[TimedConfig]] = defaultdict(list)
    for one in configs:
        f = one.footprint
        rivals[f.nodes.name, f.gpus, f.parallelism.dp, f.workload].append(one)
    kept: list[TimedConfig] = []
    for same in rivals.values():
        for i, one in enumerate(same):
            others = ((k, other) for k, other in enumerate(same) if k != i)
            if not any(
                _config_dominates(other, one, enough_kv_tokens, comes_first=k < i) for k, other in others
            ):
                kept.append(one)
    return kept


def _config_dominates(
    candidate: TimedConfig, other: TimedConfig, enough_kv_tokens: int, *, comes_first: bool
) -> bool:
    """Return whether `candidate` is never slower and has no less KV than `other`.

    If both are equal, returns `comes_first`, which is whether `candidate` comes first.
    """
    a, b = candidate.hardware, other.hardware
    if candidate.has_preferred_engine < other.has_preferred_engine or a.measured != b.measured:
        return False
    if min(a.kv_tokens, enough_kv_tokens) < min(b.kv_tokens, enough_kv_tokens):
        return False
    if not (_is_never_slower(a.encode, b.encode) and _is_never_slower(a.generate, b.generate)):
        return False
    if a.steps is None or b.steps is None:
        return a.steps is b.steps and (comes_first or a != b)
    steps = _is_never_slower(a.steps.prefill, b.steps.prefill) and _is_never_slower(
        a.steps.decode, b.steps.decode
    )
    rest = (
        a.steps.kv_token_s <= b.steps.kv_token_s
        and a.steps.mixed_factor <= b.steps.mixed_factor
        and a.steps.request_overhead_s <= b.steps.request_overhead_s
        and a.steps.pipeline <= b.steps.pipeline
    )
    return steps and rest and (comes_first or a != b)


def _is_never_slower(candidate: PiecewiseCurve | None, other: PiecewiseCurve | None) -> bool:
    """Return whether the first curve is nowhere above the second curve, or whether both are None."""
    if candidate is None or other is None:
        return candidate is other
    return all(candidate(x) <= other(x) * (1 + 1e-12) for x in {*candidate.x, *other.x})


def service_times(
    service: Service,
    footprint: ReplicaConfig,
    rules: PlanRules,
    context_tokens: int,
) -> CellHardware | None:
    """Return the times and memory of one replica, or None if a profile is missing or the model does not fit.

    A replica on a share of a GPU is slower because of other replicas on the GPU (`rules.interference`). If an
    engine has several towers, the times of the largest tower are used for all towers.
    """
    main = service.components[0]
    found = profile_lookup.hardware(
        main,
        main.shape,
        footprint.engine_spec(context_tokens),
        role=service.tasks,
        tower=_largest_tower(service),
        generator=_engine_generator(service),
    )
    if found is None or (found.steps is not None and not found.kv_tokens):
        return None
    slower = 1 / (1 - rules.interference) if footprint.share < 1 else 1.0
    return _scaled(found, slower)


def _scaled(hardware: CellHardware, factor: float) -> CellHardware:
    return replace(
        hardware,
        steps=hardware.steps and hardware.steps.scaled(factor),
        encode=hardware.encode and hardware.encode.scaled(factor),
        generate=hardware.generate and hardware.generate.scaled(factor),
    )


def _parameters(component: Component) -> float:
    return component.shape.parameters if component.shape else 0.0


def _largest_tower(service: Service) -> tuple[Component, TowerShape | None] | None:
    tower = max(service.towers, key=_parameters, default=None)
    if tower is None or service.llm is None:
        return None
    return tower, tower.shape if isinstance(tower.shape, TowerShape) else None


def _engine_generator(service: Service) -> tuple[Component, GeneratorShape | None] | None:
    generator = service.generator
    if generator is None or service.llm is None:
        return None
    return generator, generator.shape if isinstance(generator.shape, GeneratorShape) else None


def profile_key_of(source: TimesCorrection | ReplicaGroup) -> ProfileKey:
    return (
        source.service,
        source.engine,
        source.gpu,
        *astuple(source.parallelism),
        source.share,
        source.quantisation,
    )


def profile_key(service: Service, config: ReplicaConfig) -> ProfileKey:
    f = config
    return service.name, f.engine, f.gpu.name, *astuple(f.parallelism), f.share, f.quantisation


def neutral_correction(key: ProfileKey) -> TimesCorrection:
    """Return a correction that does not change the profile's times."""
    service, engine, gpu, tp, pp, dp, dcp, pcp, share, quantisation = key
    return TimesCorrection(
        service=service,
        engine=engine,
        gpu=gpu,
        tp=tp,
        pp=pp,
        dp=dp,
        dcp=dcp,
        pcp=pcp,
        share=share,
        quantisation=quantisation,
    )


def corrections_by_key(corrections: Iterable[TimesCorrection]) -> dict[ProfileKey, TimesCorrection]:
    return {profile_key_of(one): one for one in corrections}


def merged_corrections(
    earlier: Iterable[TimesCorrection], later: Iterable[TimesCorrection]
) -> list[TimesCorrection]:
    """Return one correction per `ProfileKey`.

    Later corrections replace earlier corrections, because both are relative to the profile.
    """
    return list({**corrections_by_key(earlier), **corrections_by_key(later)}.values())


def corrected_times(hardware: CellHardware, correction: TimesCorrection | None) -> CellHardware:
    """Return the replica's times with a correction. The replica's memory does not change.

    The prefill factor also applies to a tower in the engine.
    """
    if correction is None:
        return hardware
    steps = hardware.steps
    if steps is not None:
        steps = steps.corrected(correction.prefill, correction.decode)
    encode = hardware.encode and hardware.encode.scaled(correction.prefill)
    return replace(hardware, steps=steps, encode=encode)


MAX_RATE: Final = 1e9
"""Capacity for a class whose requests cause no work at a service."""
PREFERENCE_TOLERANCE: Final = 0.005
"""Difference of preferences up to which a cell can dominate another cell. The preference for a tier is only a
tie-break, so it must not protect a dominated cell from removal."""
MAX_TIERS: Final = 4
"""Maximum number of tiers per service. More tiers would save little, but multiply the number of cells."""
UNBOUNDED_TIER_S: Final = 1e6
TIER_SPACING: Final = 1e-5
"""Relative difference between tiers with equal seconds. It is large enough for different names with six
digits."""


@dataclass(frozen=True)
class CellSpec:
    """Cell of a pool, with all information about it."""

    cell: Cell
    service: Service
    footprint: ReplicaConfig
    tier: LatencyTier
    source: str
    """Source of the cell's times."""
    hardware: CellHardware | None = None
    """Times and memory of a replica, or None if the cell has only a throughput."""
    settings: EngineSettings | None = None
    router: RouterPolicy = "power_of_two"
    simulated_replicas: int = 0
    """Number of replicas for which the capacity was simulated. 0 means that the capacity was computed with
    closed forms."""
    derating: float = 1.0
    """Factor by which the capacity is reduced, because simulated plans missed a bound
    (`pipeline/decide.py`)."""

    @property
    def has_times(self) -> bool:
        return self.hardware is not None

    def station(self, replicas: int) -> Station:
        """Return the cell as a station of the simulator, with this number of replicas. Raises ValueError if
        the cell has only a throughput."""
        if self.hardware is None:
            raise ValueError(f"{self.cell.name}: only its throughput is known, not its times")
        config = TimedConfig(self.service, self.footprint, self.hardware)
        return config.station(self.router, replicas, name=self.cell.name)

    def with_capacity(self, capacity: Mapping[str, float], *, simulated_replicas: int) -> CellSpec:
        """Return the cell with a capacity that was simulated for this number of replicas.

        The capacity is multiplied by the cell's derating.
        """
        found = {u: rate * self.derating for u, rate in capacity.items()}
        return replace(
            self,
            cell=replace(self.cell, capacity=_usable_capacity(found)),
            simulated_replicas=simulated_replicas,
        )

    def derate(self, factor: float) -> CellSpec:
        capacity = {u: rate * factor for u, rate in self.cell.capacity.items()}
        cell = replace(self.cell, capacity=capacity)
        return replace(self, cell=cell, derating=self.derating * factor)


def make_cell(
    service: Service,
    footprint: ReplicaConfig,
    tier: LatencyTier,
    capacity: Mapping[str, float],
    preference: float,
    *,
    has_times: bool,
    start_s: float,
) -> Cell:
    """Create a cell. Its name contains the tier's rank in the service's chain (0 is the tightest tier)."""
    suffix = f":t{tier.rank}" if has_times else ""
    return Cell(
        name=f"{service.name}@{footprint.name}{suffix}",
        service=service.name,
        nodes=footprint.nodes.name,
        gpus=footprint.gpus,
        # A throughput is measured under its own latency conditions, so the cell can serve every tier.
        tier=tier.value if has_times else 0.0,
        capacity=_usable_capacity(capacity),
        role=service.tasks,
        preference=preference,
        start_s=start_s,
    )


def _usable_capacity(capacity: Mapping[str, float]) -> dict[str, float]:
    return {u: min(rate, MAX_RATE) for u, rate in capacity.items() if rate > 0}


def undominated_cells(specs: Iterable[CellSpec]) -> list[CellSpec]:
    """Return the cells that no other cell dominates."""
    groups: defaultdict[tuple[str, str], list[CellSpec]] = defaultdict(list)
    for spec in specs:
        groups[spec.cell.service, spec.cell.nodes].append(spec)
    kept: list[CellSpec] = []
    for group in groups.values():
        better: list[CellSpec] = []
        # Smallest first, because only cells with at most as many GPUs can dominate a cell.
        for spec in sorted(group, key=lambda s: (s.cell.gpus, s.cell.preference, s.cell.tier)):
            if not any(_dominates(other, spec) for other in better):
                better.append(spec)
        kept += better
    return kept


def _dominates(candidate: CellSpec, other: CellSpec) -> bool:
    copies = other.cell.gpus / candidate.cell.gpus
    return (
        copies >= 1
        and candidate.cell.tier <= other.cell.tier
        and candidate.cell.start_s <= other.cell.start_s
        and candidate.cell.preference <= other.cell.preference + PREFERENCE_TOLERANCE
        and all(
            copies * candidate.cell.capacity.get(u, 0.0) >= rate for u, rate in other.cell.capacity.items()
        )
    )


def loosest_variants(variants: Iterable[PathVariant]) -> tuple[PathVariant, ...]:
    """Remove each variant that differs from another variant only by tighter bounds."""
    groups: defaultdict[tuple[object, ...], list[PathVariant]] = defaultdict(list)
    for v in variants:
        services = tuple((n.service, n.work) for n in v.needs)
        groups[v.demand, v.structure, services, v.levels].append(v)
    return tuple(v for same in groups.values() for i, v in enumerate(same) if not _is_redundant(v, i, same))


def _is_redundant(variant: PathVariant, index: int, group: list[PathVariant]) -> bool:
    """Return whether a variant is tighter than another, or equal to an earlier variant."""
    tiers = [n.tier for n in variant.needs]
    for i, other in enumerate(group):
        others = [n.tier for n in other.needs]
        if (
            i != index
            and all(a <= b for a, b in zip(tiers, others, strict=True))
            and (tiers != others or i < index)
        ):
            return True
    return False


@dataclass(frozen=True, order=True)
class LatencyTier:
    seconds: float
    """Upper bound on a percentile of the stage's time. inf means no bound."""
    tpot_s: float
    rank: int
    """Position in the service's chain. 0 is the tightest tier."""
    value: float
    """Value that orders the tiers in the pool: seconds, or seconds per token if only these are bounded."""


@dataclass(frozen=True)
class TierChain:
    tiers: tuple[LatencyTier, ...]

    def loosest_within(self, seconds: float, tpot_s: float) -> LatencyTier:
        """Return the loosest tier within both bounds. Such a tier exists if this pair of bounds was passed to
        `tier_chain`."""
        return max(t for t in self.tiers if t.seconds <= seconds and t.tpot_s <= tpot_s)


def tiers_per_service(services: int, node_classes: int) -> int:
    """Return the number of tiers per service for a problem of this size.

    Cells of adjacent tiers are almost equal for a solver, which makes the search slow. With 26 services on
    six node classes, the solver found a plan of $161/h in 20 s with two tiers, and a plan of $816/h with
    four.
    """
    size = services * node_classes
    return MAX_TIERS if size <= 12 else 3 if size <= 40 else 2


def tier_chain(bounds: Iterable[tuple[float, float]], max_tiers: int = MAX_TIERS) -> TierChain:
    """Return at most `max_tiers` tiers for these (seconds, seconds per token) pairs.

    The time per token of a tier is at most the time per token of each looser tier, because cells of the tier
    may also do the work of looser tiers.
    """
    groups = [[pair] for pair in sorted(set(bounds))]
    while len(groups) > max_tiers:
        i = min(range(len(groups) - 1), key=lambda i: _distance(groups[i][0], groups[i + 1][0]))
        groups[i : i + 2] = [groups[i] + groups[i + 1]]
    by_token = all(isinf(group[0][0]) for group in groups)
    tiers = []
    for rank, group in enumerate(groups):
        seconds, tpot_s = group[0][0], min(tpot for g in groups[rank:] for _, tpot in g)
        ordered_by = tpot_s if by_token else min(seconds, UNBOUNDED_TIER_S)
        tiers.append(LatencyTier(seconds, tpot_s, rank, ordered_by * (1 + TIER_SPACING * rank)))
    return TierChain(tuple(tiers))


def _distance(tighter: tuple[float, float], looser: tuple[float, float]) -> float:
    """Return the disadvantage of merging two pairs: the factor by which the looser pair becomes tighter."""
    return _tightening_factor(tighter[0], looser[0]) * _tightening_factor(tighter[1], looser[1])


def _tightening_factor(tighter: float, looser: float) -> float:
    if isinf(looser):
        return 1.0 if isinf(tighter) else inf
    return max(looser / tighter, 1.0) if tighter > 0 else inf
