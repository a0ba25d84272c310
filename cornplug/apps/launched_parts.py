"""Components of an apps file that a launch starts, and the path of each request class through them."""

from __future__ import annotations

from cornplug.planner.inputs.schema import Application, Component, PlanInput, RequestSpec


def launched(file: PlanInput, name: str) -> bool:
    """Return whether a launch starts this component."""
    return file.component[name].resources is not None


def encoder_of(file: PlanInput, name: str) -> Component | None:
    """Return the launched encoder that runs this encoder's tower: itself, or one with the same fingerprint
    or model."""
    wanted = file.component[name]
    started = [c for c in file.components if c.kind == "encoder" and c.resources is not None]
    for candidate in started:
        if candidate.name == name:
            return candidate
    for candidate in started:
        if wanted.fingerprint is not None and candidate.fingerprint == wanted.fingerprint:
            return candidate
        if wanted.model is not None and candidate.model == wanted.model:
            return candidate
    return None


def models_of(file: PlanInput, encoder: Component) -> list[str]:
    """Return the models whose towers a launched encoder runs, its own model first."""
    served = [c for c in file.components if c.kind == "encoder" and encoder_of(file, c.name) is encoder]
    first = sorted(served, key=lambda c: c is not encoder)
    return list(dict.fromkeys(model_of(c) for c in first))


def model_of(component: Component) -> str:
    """Return the component's model for a command line."""
    return component.model or str(component.checkpoint or component.name)


def path_of(file: PlanInput, application: Application, request: RequestSpec) -> list[Component]:
    """Return the launched components of one request class in processing order: those of its route, or all."""
    named = next((route.path for route in application.routes if route.request == request.name), None)
    encoders = [encoder_of(file, m.encoder) for m in request.media if named is None or m.encoder in named]
    generator = request.generates.generator if request.generates else None
    path = [*encoders, file.component[application.llm]]
    if generator is not None and launched(file, generator) and (named is None or generator in named):
        path.append(file.component[generator])
    return list({c.name: c for c in path if c is not None}.values())
