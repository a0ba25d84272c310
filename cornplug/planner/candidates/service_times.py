"""Combines the profiles of a service's components into the times of its replicas."""

from __future__ import annotations

from dataclasses import replace

from cornplug.planner.candidates.replica_configs import ReplicaConfig
from cornplug.planner.candidates.services import Service
from cornplug.planner.inputs.schema import Component, GeneratorShape, PlanRules, TowerShape
from cornplug.planner.perf_model import profile_lookup
from cornplug.planner.simulator.step_times import CellHardware


def service_times(
    service: Service,
    footprint: ReplicaConfig,
    rules: PlanRules,
    context_tokens: int,
) -> CellHardware | None:
    """Return the times and memory of one replica, or None if a profile is missing or the model does not fit.

    A replica on a share of a GPU is slower because of other replicas on the GPU (`rules.interference`). If an
    engine has several towers, the times of the largest tower are used for all.
    """
    main = service.components[0]
    found = profile_lookup.hardware(
        main,
        main.shape,
        footprint.engine_spec(context_tokens),
        role=service.tasks,
        tower=_with_tower(service),
        generator=_with_generator(service),
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


def _with_tower(service: Service) -> tuple[Component, TowerShape | None] | None:
    tower = max(service.towers, key=_parameters, default=None)
    if tower is None or service.llm is None:
        return None
    return tower, tower.shape if isinstance(tower.shape, TowerShape) else None


def _with_generator(service: Service) -> tuple[Component, GeneratorShape | None] | None:
    generator = service.generator
    if generator is None or service.llm is None:
        return None
    return generator, generator.shape if isinstance(generator.shape, GeneratorShape) else None
