"""Replica configurations with their times, and the removal of configurations that no plan needs.

The times of a configuration are from the profiles of the service's components. They may be corrected with
factors from engine metrics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import Final

from cornplug.planner.candidates.replica_configs import ReplicaConfig, Service
from cornplug.planner.inputs.schema import Component, GeneratorShape, PlanRules, RouterPolicy, TowerShape
from cornplug.planner.perf_model import profile_lookup
from cornplug.planner.perf_model.engine_spec import CellHardware, PiecewiseCurve
from cornplug.planner.perf_model.stations import Station
from cornplug.planner.plan import ReplicaGroup, TimesCorrection

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
