"""Checks of an apps file before it is launched: resources, routes, namespaces and classes of service.

This module also determines which components of an apps file a launch starts, and the path of each request
class through these components.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, Final

from pydantic import ValidationError

from cornplug.config import ClassConfig, NamespaceConfig, QosConfig, StoreConfig
from cornplug.errors import ConfigError
from cornplug.planner.inputs.cross_checks import application_errors, duplicates
from cornplug.planner.inputs.field_types import InputError, Location, suggest_known_name
from cornplug.planner.inputs.schema import Application, Component, PlanInput, RequestSpec, Route
from cornplug.settings import parse_metrics_address
from cornplug.store.daemon.main import store_parser

STORE_FLAGS: Final = ("--far", "--disk", "--disk-size", "--metrics", "--quarantine-s", "--clamp")
"""Store flags that an apps file may set. The launch itself sets the flags for the socket, the size
(`launch.store_gib`), the secret, and when the process ends."""
_STORE_FLAGS_PLACE: Final[Location] = ("launch", "store_flags")
_STORE_FLAGS_HELP: Final = "Run `cornplug serve-store --help` for the values of each flag."


def is_launched(file: PlanInput, name: str) -> bool:
    """Return whether a launch starts this component."""
    return file.components_by_name[name].resources is not None


def encoder_of(file: PlanInput, name: str) -> Component | None:
    """Return the launched encoder that runs the tower of encoder `name`, or None.

    This is the encoder itself if it is launched, otherwise an encoder with the same fingerprint or model.
    """
    wanted = file.components_by_name[name]
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
    """Return the models whose towers a launched encoder runs, beginning with its own model."""
    served = [c for c in file.components if c.kind == "encoder" and encoder_of(file, c.name) is encoder]
    first = sorted(served, key=lambda c: c is not encoder)
    return list(dict.fromkeys(c.model_argument for c in first))


def path_of(file: PlanInput, application: Application, request: RequestSpec) -> list[Component]:
    """Return the launched components that process the requests of a class, in processing order.

    If the class has a route, only components of the route are returned.
    """
    named = next((route.path for route in application.routes if route.request == request.name), None)
    encoders = [encoder_of(file, m.encoder) for m in request.media if named is None or m.encoder in named]
    generator = request.generates.generator if request.generates else None
    path = [*encoders, file.components_by_name[application.llm]]
    if generator is not None and is_launched(file, generator) and (named is None or generator in named):
        path.append(file.components_by_name[generator])
    return list({c.name: c for c in path if c is not None}.values())


def store_flag_errors(file: PlanInput) -> Iterator[InputError]:
    """Yield an error for each store flag that is not allowed.

    If all flags are allowed, yield an error if the store would reject their values.
    """
    words = file.launch.store_flags
    # Only complete names of flags are allowed, although argparse accepts abbreviations.
    named = [word.partition("=")[0] for word in words if word.startswith("-")]
    if strange := [flag for flag in named if flag not in STORE_FLAGS]:
        for flag in strange:
            yield InputError(
                _STORE_FLAGS_PLACE,
                f"flag {flag!r} is not allowed for a launched store",
                suggest_known_name(flag, STORE_FLAGS),
            )
    elif refused := _flag_problem(words):
        yield InputError(_STORE_FLAGS_PLACE, *refused)


def _flag_problem(words: list[str]) -> tuple[str, str] | None:
    """Return (problem, remedy) if `cornplug serve-store` rejects these arguments, else None."""
    parser = store_parser(StoreConfig())
    parser.exit_on_error = False
    try:
        options, left = parser.parse_known_args(words)
        if left:
            return f"{left[0]!r} does not belong to a flag", _STORE_FLAGS_HELP
        if options.metrics:
            parse_metrics_address(options.metrics)
    except ConfigError as e:
        problem = str(e).removeprefix(f"{e.field}: ").removesuffix(f". {e.remedy}")
        return problem, e.remedy
    except (argparse.ArgumentError, ValueError) as e:
        return str(e), _STORE_FLAGS_HELP
    return None


def errors(file: PlanInput) -> Iterator[InputError]:
    """Yield all errors of the first stage that has errors.

    The stages are names, then resources, then routes and shares.
    """
    for stage in (application_errors, _resource_and_store_errors, _path_and_share_errors):
        found = list(stage(file))
        yield from found
        if found:
            return


def _resource_and_store_errors(file: PlanInput) -> Iterator[InputError]:
    yield from store_flag_errors(file)
    yield from _resource_errors(file)


def _resource_errors(file: PlanInput) -> Iterator[InputError]:
    ports: dict[int, str] = {}
    used: dict[int, float] = {}
    for i, component in enumerate(file.components):
        its = component.resources
        if its is None:
            continue
        place: Location = ("components", i, "resources")
        yield from _program_errors(("components", i), component)
        yield from _device_errors((*place, "devices"), component, used)
        for port in range(its.port, its.port + its.replicas) if its.port else ():
            if port in ports:
                yield InputError(
                    (*place, "port"),
                    f"port {port} is already used by {ports[port]}",
                    "Choose another port.",
                )
            ports[port] = component.name


def _program_errors(place: Location, component: Component) -> Iterator[InputError]:
    its = component.resources
    assert its is not None
    serves = component.kind == "generator" and component.server is not None
    if serves and its.command:
        remedy = "Remove one of them. With server, the command is derived from the model."
        yield InputError(
            (*place, "resources", "command"), f"not allowed with server = {component.server!r}", remedy
        )
    if component.kind == "generator" and not serves and not its.command:
        remedy = 'Write command = ["python", "server.py", "--port", "{port}"], or remove resources.'
        yield InputError(
            (*place, "resources", "command"), "missing, but it is needed to start a generator", remedy
        )
    if component.kind == "generator" and its.replicas > 1:
        remedy = "Set replicas = 1. Generators have no router."
        yield InputError(
            (*place, "resources", "replicas"),
            f"{its.replicas} replicas of a generator are not supported",
            remedy,
        )
    if component.kind != "generator" and its.command:
        remedy = "Remove it. The engine has its own command."
        yield InputError(
            (*place, "resources", "command"), f"not allowed in a component of kind {component.kind!r}", remedy
        )
    if (component.kind != "generator" or serves) and component.model is None and component.checkpoint is None:
        remedy = 'Set model to "HUB/ID" or to a folder ("./NAME" is relative to this file).'
        yield InputError((*place, "model"), "missing, but the engine needs it", remedy)


def _device_errors(place: Location, component: Component, used: dict[int, float]) -> Iterator[InputError]:
    its = component.resources
    assert its is not None
    if not its.devices:
        return
    ranks = component.tp[0] * component.pp[0] * component.dp[0] * component.pcp[0]
    share = component.shares[0]
    if its.devices != list(range(its.devices[0], its.devices[0] + len(its.devices))):
        yield InputError(
            place, f"{its.devices} is not a contiguous range", "Write ascending numbers without a gap."
        )
        return
    wanted = ranks * its.replicas if share == 1 else -(-its.replicas // round(1 / share))
    if len(its.devices) != wanted:
        remedy = f"Write {wanted} devices: {ranks} for each of {its.replicas} replicas."
        yield InputError(place, f"{len(its.devices)} devices", remedy)
    for device in its.devices if its.device == "gpu" else ():
        used[device] = used.get(device, 0.0) + share
        if used[device] > 1:
            remedy = "Choose another GPU, or set shares = [0.5] for the components that share it."
            yield InputError(place, f"components use {used[device]:g} of GPU {device}", remedy)


def _path_and_share_errors(file: PlanInput) -> Iterator[InputError]:
    for i, application in enumerate(file.applications):
        place: Location = ("applications", i)
        if not is_launched(file, application.llm):
            remedy = (
                f"Add resources to component {application.llm!r}, such as resources = {{ devices = [0] }}."
            )
            yield InputError((*place, "llm"), f"{application.llm!r} is not launched", remedy)
            continue
        names = [c.name for c in file.qos]
        if names and application.qos != "default" and application.qos not in names:
            remedy = f"{suggest_known_name(application.qos, names)} Or add a [[qos]] table of this name."
            yield InputError((*place, "qos"), f"no class {application.qos!r}", remedy)
        yield from _route_errors(place, file, application)
    yield from _namespace_errors(file)
    yield from _class_errors(file)


def _route_errors(place: Location, file: PlanInput, application: Application) -> Iterator[InputError]:
    requests = {request.name: request for request in application.requests}
    yield from (
        InputError((*e.location[:-1], "request"), e.problem, "Write one route for each request class.")
        for e in duplicates((*place, "routes"), [route.request for route in application.routes])
    )
    for k, route in enumerate(application.routes):
        at = (*place, "routes", k)
        if route.request not in requests:
            remedy = suggest_known_name(route.request, list(requests))
            yield InputError((*at, "request"), f"no request class {route.request!r}", remedy)
            continue
        yield from _path_errors((*at, "path"), file, application, requests[route.request], route)
    routed = {route.request for route in application.routes}
    for k, request in enumerate(application.requests):
        generated = request.generates
        if request.name not in routed and generated and not is_launched(file, generated.generator):
            at = (*place, "requests", k, "generates", "generator")
            remedy = "Add resources with a command, or a route that ends at the LLM."
            yield InputError(at, f"{generated.generator!r} is not launched", remedy)


def _path_errors(
    place: Location, file: PlanInput, application: Application, request: RequestSpec, route: Route
) -> Iterator[InputError]:
    known = file.components_by_name
    if unknown := [name for name in route.path if name not in known]:
        yield InputError(place, f"no component {unknown[0]!r}", suggest_known_name(unknown[0], list(known)))
        return
    encoders = [media.encoder for media in request.media]
    generators = [request.generates.generator] if request.generates else []
    allowed = [*encoders, application.llm, *generators]
    if strange := [name for name in route.path if name not in allowed]:
        remedy = f"The components of this request class are: {', '.join(dict.fromkeys(allowed))}."
        yield InputError(place, f"{strange[0]!r} is not used by {request.name}", remedy)
    elif application.llm not in route.path:
        yield InputError(place, f"the LLM {application.llm!r} is missing", f"Add {application.llm!r}.")
    elif route.path != [name for name in dict.fromkeys(allowed) if name in route.path]:
        ordered = [name for name in dict.fromkeys(allowed) if name in route.path]
        yield InputError(place, "not in processing order", f"Write {ordered}.".replace("'", '"'))
    for name in route.path:
        served = encoder_of(file, name) if known[name].kind == "encoder" else is_launched(file, name)
        if not served:
            yield InputError(place, f"{name!r} is not launched", "Add resources to it, or remove it here.")


def _namespace_errors(file: PlanInput) -> Iterator[InputError]:
    try:
        StoreConfig(
            namespaces={
                app.name: NamespaceConfig(**app.namespace.model_dump())
                for app in file.applications
                if app.namespace is not None
            }
        )
    except ValidationError as e:
        yield _convert_error(e, ("applications",), [app.name for app in file.applications], "namespace")


def _class_errors(file: PlanInput) -> Iterator[InputError]:
    try:
        QosConfig(classes={c.name: ClassConfig(**c.model_dump(exclude={"name"})) for c in file.qos})
    except ValidationError as e:
        yield _convert_error(e, ("qos",), [c.name for c in file.qos], "share")


def _convert_error(error: ValidationError, place: Location, names: list[str], key: str) -> InputError:
    """Convert an error of the store's or the classes' settings into an error of the apps file.

    The position is the table that the error's text names, or all tables if the text names no table.
    """
    text = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    problem, _, remedy = text.rpartition(": ")
    named: list[Any] = [i for i, name in enumerate(names) if f"namespaces.{name}:" in text]
    at: Location = (*place, named[0], key) if named else place
    return InputError(at, problem.rpartition(": ")[2], remedy[:1].upper() + remedy[1:] + ".")
