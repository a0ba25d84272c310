"""A service on a footprint with its times, and which of several no plan can need."""

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
"""Workload -> the engine that it goes to where nothing was measured on either."""


@dataclass(frozen=True)
class TimedConfig:
    service: Service
    footprint: ReplicaConfig
    hardware: CellHardware

    @property
    def favoured(self) -> bool:
        return FAVOURED[self.footprint.workload] == self.footprint.engine

    def station(self, router: RouterPolicy, replicas: int, *, name: str = "") -> Station:
        """As the simulator and the closed forms see it."""
        hardware = self.hardware
        return Station(
            name=name,
            replicas=replicas,
            groups=self.footprint.dp,
            tasks=self.service.tasks,
            steps=hardware.steps,
            encode=hardware.encode,
            generate=hardware.generate,
            kv_tokens=hardware.kv_tokens if hardware.steps else 1 << 60,
            max_batch=self.footprint.max_batch,
            chunk_tokens=self.footprint.chunk_tokens,
            # An encoder service divides its replicas' work itself.
            router="least_work" if self.service.tasks == "E" else router,
        )


def without_needless_estimates(found: Iterable[TimedConfig]) -> list[TimedConfig]:
    """Without estimates of an engine beside a measurement or a favoured engine at the same place.

    An estimate knows nothing of engines, so it must not choose between them.
    """
    places: defaultdict[tuple[object, ...], list[TimedConfig]] = defaultdict(list)
    for one in found:
        f = one.footprint
        places[f.nodes.name, f.tp, f.pp, f.dp, f.dcp, f.pcp, f.share, f.quantisation, f.workload].append(one)
    kept: list[TimedConfig] = []
    for same in places.values():
        better = any(one.hardware.measured or one.favoured for one in same)
        kept += [one for one in same if one.hardware.measured or one.favoured or not better]
    return kept


def undominated(found: Iterable[TimedConfig], enough_kv_tokens: int) -> list[TimedConfig]:
    """Without those that another on the same GPUs, with the same settings, outdoes in every time.

    `enough_kv_tokens`: more KV than this is no advantage.
    """
    rivals: defaultdict[tuple[object, ...], list[TimedConfig]] = defaultdict(list)
    for one in found:
        f = one.footprint
        rivals[f.nodes.name, f.gpus, f.dp, f.workload].append(one)
    kept: list[TimedConfig] = []
    for same in rivals.values():
        for i, one in enumerate(same):
            others = ((k, other) for k, other in enumerate(same) if k != i)
            if not any(_outdoes(other, one, enough_kv_tokens, first=k < i) for k, other in others):
                kept.append(one)
    return kept


def _outdoes(one: TimedConfig, other: TimedConfig, enough: int, *, first: bool) -> bool:
    """Never slower and never with less room; of two equals the first does."""
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
    """At every corner of either curve, and so between them."""
    if one is None or other is None:
        return one is other
    return all(one(x) <= other(x) * (1 + 1e-12) for x in {*one.x, *other.x})
