"""Components with their shapes and fingerprints filled in from the checkpoints that they name."""

from __future__ import annotations

from collections.abc import Mapping

from cornplug.planner.given import shapes
from cornplug.planner.given.inputs import Component, PlanInput


def resolve(given: PlanInput) -> PlanInput:
    """The same input, told what its checkpoints tell.

    A component of which nothing but a throughput or a table is known keeps its shape None. Raises
    ConfigError: a checkpoint is named that cannot be read.
    """
    components = given.component
    return given.model_copy(update={"components": [_resolved(c, components) for c in given.components]})


def _resolved(component: Component, components: Mapping[str, Component]) -> Component:
    if component.kind == "generator" or shapes.checkpoint_of(component, components) is None:
        return component
    known = {
        "shape": shapes.shape_of(component, components),
        "fingerprint": shapes.fingerprint_of(component, components),
    }
    return component.model_copy(update=known)
