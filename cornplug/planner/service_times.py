"""Times of a service's replica on a footprint: its components' profiles, put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cornplug.planner import profiles, shapes
from cornplug.planner.footprints import Footprint
from cornplug.planner.inputs import Component, GeneratorShape, LLMShape, Rules, TowerShape
from cornplug.planner.services import Service
from cornplug.planner.times import Hardware

Shape = LLMShape | TowerShape | GeneratorShape


def known_shape(component: Component, components: Mapping[str, Component]) -> Shape | None:
    """None: nothing is given, and nothing need be where times were measured.

    Raises ConfigError: a checkpoint is named that does not tell.
    """
    tower_of = components.get(component.tower_of or "")
    if component.shape or component.checkpoint or (tower_of and (tower_of.checkpoint or tower_of.model)):
        return shapes.shape_of(component, components)
    if component.model and shapes.checkpoint_of(component, components) is not None:
        return shapes.shape_of(component, components)
    return None


def service_times(
    service: Service,
    footprint: Footprint,
    components: Mapping[str, Component],
    rules: Rules,
    context_tokens: int,
) -> Hardware | None:
    """What one replica does; None: a profile is missing there, or it has no room for the model.

    A part of a GPU is slower by what its neighbours cost, `rules.interference`. Of several towers in
    one engine the largest stands for all: it takes longest.
    """
    main = service.components[0]
    tower = max(service.towers, key=lambda t: _parameters(t, components), default=None)
    found = profiles.hardware(
        main,
        known_shape(main, components),
        footprint.gpu,
        engine=footprint.engine,
        tp=footprint.tp,
        pp=footprint.pp,
        share=footprint.share,
        quantisation=footprint.quantisation,
        role=service.tasks,
        tower=(tower, _tower_shape(tower, components)) if tower and tower is not main else None,
        generator=_beside(service.generator, main, components),
        chunk_tokens=footprint.chunk_tokens,
        max_batch=footprint.max_batch,
        context_tokens=context_tokens,
    )
    if found is None or (found.steps is not None and not found.kv_tokens):
        return None
    slower = 1 / (1 - rules.interference) if footprint.share < 1 else 1.0
    return _scaled(found, slower)


def _scaled(hardware: Hardware, factor: float) -> Hardware:
    return replace(
        hardware,
        steps=hardware.steps and hardware.steps.scaled(factor),
        encode=hardware.encode and hardware.encode.scaled(factor),
        generate=hardware.generate and hardware.generate.scaled(factor),
    )


def _parameters(component: Component, components: Mapping[str, Component]) -> float:
    shape = known_shape(component, components)
    return shape.parameters if shape else 0.0


def _tower_shape(component: Component, components: Mapping[str, Component]) -> TowerShape | None:
    shape = known_shape(component, components)
    return shape if isinstance(shape, TowerShape) else None


def _beside(
    generator: Component | None, main: Component, components: Mapping[str, Component]
) -> tuple[Component, GeneratorShape | None] | None:
    if generator is None or generator is main:
        return None
    shape = known_shape(generator, components)
    return generator, shape if isinstance(shape, GeneratorShape) else None
