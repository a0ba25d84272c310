"""Replica configurations of a service with their times. Removes configurations that no plan needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cornplug.planner.candidates.replica_configs import ReplicaConfig
from cornplug.planner.candidates.services import Service
from cornplug.planner.inputs.schema import RouterPolicy
from cornplug.planner.simulator.simulator import Station
from cornplug.planner.simulator.step_times import CellHardware, PiecewiseCurve

FAVOURED: Final = {"online": "sglang", "semi-online": "sglang", "offline": "vllm"}
"""Preferred engine by workload if there are no measurements."""


@dataclass(frozen=True)
class TimedConfig:
    service: Service
    footprint: ReplicaConfig
    hardware: CellHardware

    @property
    def favoured(self) -> bool:
        return FAVOURED[self.footprint.workload] == self.footprint.engine

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


def without_needless_estimates(found: Iterable[TimedConfig]) -> list[TimedConfig]:
    """Return the configurations without unnecessary estimates.

    An estimate is unnecessary if the same GPUs and settings have a measurement, or an estimate with the
    favoured engine. An estimate does not depend on the engine, so it must not decide between engines.
    """
    places: defaultdict[tuple[object, ...], list[TimedConfig]] = defaultdict(list)
    for one in found:
        f = one.footprint
        places[f.nodes.name, f.parallelism, f.share, f.quantisation, f.workload].append(one)
    kept: list[TimedConfig] = []
    for same in places.values():
        better = any(one.hardware.measured or one.favoured for one in same)
        kept += [one for one in same if one.hardware.measured or one.favoured or not better]
    return kept


def undominated(found: Iterable[TimedConfig], enough_kv_tokens: int) -> list[TimedConfig]:
    """Remove each configuration for which another configuration is never slower and has at least as much KV.

    Only configurations with the same number of GPUs, DP and workload are compared. More KV than
    `enough_kv_tokens` is not an advantage.
    """
    rivals: defaultdict[tuple[object, ...], list[TimedConfig]] = defaultdict(list)
    for one in found:
        f = one.footprint
        rivals[f.nodes.name, f.gpus, f.parallelism.dp, f.workload].append(one)
    kept: list[TimedConfig] = []
    for same in rivals.values():
        for i, one in enumerate(same):
            others = ((k, other) for k, other in enumerate(same) if k != i)
            if not any(_outdoes(other, one, enough_kv_tokens, first=k < i) for k, other in others):
                kept.append(one)
    return kept


def _outdoes(one: TimedConfig, other: TimedConfig, enough: int, *, first: bool) -> bool:
    """Return whether `one` is never slower and has no less KV than `other`.

    If both are equal, returns `first`, which is whether `one` comes first.
    """
    a, b = one.hardware, other.hardware
    if one.favoured < other.favoured or a.measured != b.measured:
        return False
    if min(a.kv_tokens, enough) < min(b.kv_tokens, enough):
        return False
    if not (_quicker(a.encode, b.encode) and _quicker(a.generate, b.generate)):
        return False
    if a.steps is None or b.steps is None:
        return a.steps is b.steps and (first or a != b)
    steps = _quicker(a.steps.prefill, b.steps.prefill) and _quicker(a.steps.decode, b.steps.decode)
    rest = (
        a.steps.kv_token_s <= b.steps.kv_token_s
        and a.steps.mixed_factor <= b.steps.mixed_factor
        and a.steps.request_overhead_s <= b.steps.request_overhead_s
        and a.steps.pipeline <= b.steps.pipeline
    )
    return steps and rest and (first or a != b)


def _quicker(one: PiecewiseCurve | None, other: PiecewiseCurve | None) -> bool:
    """Return whether the first curve is nowhere above the second, or whether neither exists."""
    if one is None or other is None:
        return one is other
    return all(one(x) <= other(x) * (1 + 1e-12) for x in {*one.x, *other.x})
