"""Reads the apps file (TOML) and converts it into a deployment on this host for the launcher.

An apps file is a planner input for a single host, whose pool is optional. `format_toml` writes TOML, because
the standard library can only read TOML.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import Field

from cornplug.apps import launch_checks
from cornplug.apps.launch_checks import models_of, path_of
from cornplug.errors import ConfigError
from cornplug.host import reachable_address
from cornplug.planner.candidates.replica_configs import PRIORITY
from cornplug.planner.inputs import toml_reader
from cornplug.planner.inputs.field_types import BARE_KEY, suggest_known_name
from cornplug.planner.inputs.schema import (
    Application,
    ClassOfService,
    Component,
    ComponentResources,
    NodeClass,
    PlanInput,
    RequestSpec,
    plan_schema,
)
from cornplug.planner.launch.connections import ENCODER_PORT, ENGINE_PORT
from cornplug.planner.launch.vllm_flags import generator_command
from cornplug.planner.plan import (
    CacheSize,
    Deployment,
    LatencyTargets,
    Nodes,
    PercentileSlo,
    PlannedApplication,
    PlannedNamespace,
    PlanRoute,
    QosReservation,
    ReplicaGroup,
    RouteStage,
)

if TYPE_CHECKING:
    import openai

    from cornplug.apps.engine_choice import MissPrice
    from cornplug.apps.routed_call import Addresses, CallRouter
_HOST: Final = "host"
_CACHE_KINDS: Final[tuple[Literal["prefix", "embedding"], ...]] = ("prefix", "embedding")


class AppsFile(PlanInput):
    """Input of `cornplug launch`."""

    pool: list[NodeClass] = Field(default_factory=list)
    """Machines that you can rent or own, for `cornplug plan`. A launch does not use them."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read an apps file. Raises ConfigError with the line and the remedy of each error."""
        return toml_reader.read_as(cls, path, launch_checks.errors)

    def check(self) -> Self:
        """Check this file, which was created in Python, and return it.

        Raises ConfigError with the first error.
        """
        for error in launch_checks.errors(self):
            raise error
        return self

    def application(self, name: str) -> RoutedApplication:
        """Return the application with this name, to create a client. Raises ConfigError for an unknown
        name."""
        for one in self.applications:
            if one.name == name:
                return RoutedApplication.model_validate(one.model_dump(exclude_unset=True))
        names = [one.name for one in self.applications]
        raise ConfigError("application", f"unknown application {name!r}", suggest_known_name(name, names))

    def to_toml(self) -> str:
        """Return the file as TOML that `read` accepts.

        The text contains only values that were set. Paths are unchanged.
        """
        return format_toml(self.model_dump(mode="json", exclude_unset=True, exclude_none=True))

    @classmethod
    def schema_of_file(cls) -> dict[str, Any]:
        """Return the JSON schema (draft 2020-12) of an apps file."""
        return plan_schema(cls)


class RoutedApplication(Application):
    """Requests to one LLM, with their latency targets."""

    def client(
        self,
        *,
        routes: Path | Addresses | None = None,
        request: str | None = None,
        retry_s: float = 30.0,
        price: MissPrice | None = None,
        **openai_arguments: Any,
    ) -> openai.OpenAI:
        """Create an `openai.OpenAI` client whose requests go to the engines of one request class.

        Raises ConfigError if `cornplug[client]` is not installed, or if the routes or another argument are
        invalid.

        Args:
            routes: Path of a launch's `routes.json` or run folder, or URLs of engines, optionally as a
                mapping from URLs to weights. The default is this user's only launch that has the request
                class.
            request: Name of the request class. The default is the application's only class.
            retry_s: Time in seconds during which a request may be sent again if no engine has executed it.
            price: Speeds in tokens per second, with which the client weighs the computation of a missing
                prefix against the wait in a longer queue.
            openai_arguments: Arguments for `openai.OpenAI`, such as `timeout` or `api_key`.
        """
        from cornplug.apps import client

        return client.sync_client(self._create_router(routes, request, retry_s, price), openai_arguments)

    def async_client(
        self,
        *,
        routes: Path | Addresses | None = None,
        request: str | None = None,
        retry_s: float = 30.0,
        price: MissPrice | None = None,
        **openai_arguments: Any,
    ) -> openai.AsyncOpenAI:
        """Create an `openai.AsyncOpenAI` client. The arguments are the same as in `client`."""
        from cornplug.apps import client

        return client.async_client(self._create_router(routes, request, retry_s, price), openai_arguments)

    def _create_router(
        self,
        routes: Path | Addresses | None,
        request: str | None,
        retry_s: float,
        price: MissPrice | None,
    ) -> CallRouter:
        from cornplug.apps import client
        from cornplug.apps.routed_call import resolve_routes

        found = resolve_routes(self.name, [one.name for one in self.requests], routes, request)
        return client.create_router(found, price, retry_s)


def deployment_of(file: AppsFile) -> Deployment:
    """Return the deployment that `cornplug launch` starts. The file must have been checked."""
    started = [c for c in file.components if c.resources is not None]
    classes = [(app, request) for app in file.applications for request in app.requests]
    groups = _Groups(file, started, classes)
    found = [groups.group_for(component) for component in started]
    size = max((place[1] + group.ranks for group in found for place in group.placement), default=1)
    return Deployment(
        name=file.name,
        nodes=[Nodes(name=_HOST, gpu="gpu", gpus=size, count=1, hosts=[reachable_address(file.launch.host)])],
        groups=found,
        routes=[groups.route_for(app, request) for app, request in classes],
        latency_forecasts=[_latency_targets(file, app, request) for app, request in classes],
        caches=list(_caches(file, started)),
        reservations=[_reservation(file, one) for one in file.qos],
        applications=[_planned_application(app) for app in file.applications],
        store_flags=file.launch.store_flags,
        listen=file.launch.host,
        allow_anonymous=file.launch.allow_anonymous,
    )


class _Groups:
    """Creates the replica groups and routes of an apps file, with their tasks, devices and ports."""

    def __init__(
        self, file: AppsFile, started: list[Component], classes: list[tuple[Application, RequestSpec]]
    ) -> None:
        self._file = file
        self._paths = {(app.name, request.name): path_of(file, app, request) for app, request in classes}
        self._first_device = dict(_first_devices(started))
        self._ports = dict(_ports(file, started))

    def group_for(self, component: Component) -> ReplicaGroup:
        """Return the replica group of one launched component."""
        its = _require_resources(component)
        users = self._served_applications(component)
        encodes = component.kind == "encoder"
        return ReplicaGroup(
            name=component.name,
            service=component.name,
            tasks=self._tasks(component),
            components=[component.name],
            model=component.model_argument,
            encoder_models=models_of(self._file, component) if encodes else [],
            engine={"encoder": "cornplug", "generator": "external"}.get(component.kind, component.engines[0]),  # type: ignore[arg-type]
            nodes=_HOST,
            gpu="cpu-core" if its.device == "cpu" else "gpu",
            tp=1 if encodes else component.tp[0],
            pp=1 if encodes else component.pp[0],
            dp=1 if encodes else component.dp[0],
            dcp=component.dcp[0],
            pcp=1 if encodes else component.pcp[0],
            expert_parallel=component.expert_parallel,
            share=component.shares[0],
            quantisation=component.quantisations[0],
            replicas=its.replicas,
            placement=list(_placement(component, self._first_device[component.name])),
            workload=max((app.workload for app in users), key=PRIORITY.__getitem__, default="online"),
            apps=[app.name for app in users],
            ports=self._ports[component.name],
            fixed_ports=its.port is not None,
            tower=component.tower,
            flags=its.flags,
            env=its.env,
            command=its.command
            or generator_command(
                component.server, component.model_argument, tp=component.tp[0], flags=its.flags
            ),
            health=its.health,
        )

    def route_for(self, app: Application, request: RequestSpec) -> PlanRoute:
        """Return the route of one request class."""
        path = self._paths[app.name, request.name]
        kinds = {component.kind for component in path}
        structure = ("E+PD" if "encoder" in kinds else "monolith") + ("+G" if "generator" in kinds else "")
        stages = [RouteStage(tasks=self._tasks(c), groups={c.name: 1.0}) for c in path]
        rate = request.rate * request.peak
        return PlanRoute(app=app.name, request=request.name, structure=structure, rate=rate, stages=stages)

    def _tasks(self, component: Component) -> str:
        """Return the component's tasks, such as "EPD".

        The engine of an LLM also encodes ("E") unless all its requests with media pass through an encoder.
        """
        if component.kind != "llm":
            return "E" if component.kind == "encoder" else "G"
        with_media = [
            any(c.kind == "encoder" for c in self._paths[app.name, request.name])
            for app in self._served_applications(component)
            for request in app.requests
            if request.media
        ]
        return "PD" if with_media and all(with_media) else "EPD"

    def _served_applications(self, component: Component) -> list[Application]:
        """Return the applications whose requests the component serves, highest priority first."""
        found = [
            app
            for app in self._file.applications
            if any(component in self._paths[app.name, request.name] for request in app.requests)
        ]
        return sorted(found, key=lambda app: -priority_of(self._file, app))


def priority_of(file: AppsFile, app: Application) -> int:
    """Return the priority of an application's requests in an engine. Higher priorities are served first.

    The class of service decides, then the workload. A class that the file does not define has priority 0, as
    in the encoder service.
    """
    of_class = next((c.priority for c in file.qos if c.name == app.qos), 0)
    return of_class * len(PRIORITY) + PRIORITY[app.workload]


def _require_resources(component: Component) -> ComponentResources:
    assert component.resources is not None, "launched components have resources"
    return component.resources


def _rank_count(component: Component) -> int:
    if component.kind == "encoder":
        return 1
    return component.tp[0] * component.pp[0] * component.dp[0] * component.pcp[0]


def _placement(component: Component, first: int) -> Iterator[list[int]]:
    share, ranks = component.shares[0], _rank_count(component)
    beside = round(1 / share)
    for replica in range(_require_resources(component).replicas):
        yield [0, first + (replica * ranks if share == 1 else replica // beside)]


def _first_devices(started: list[Component]) -> Iterator[tuple[str, int]]:
    """Yield (component name, number of its first device).

    A component without configured devices uses the next devices after all configured devices.
    """
    free = {
        device: max(
            (
                d + 1
                for c in started
                if _require_resources(c).device == device
                for d in _require_resources(c).devices
            ),
            default=0,
        )
        for device in ("gpu", "cpu")
    }
    for component in started:
        its = _require_resources(component)
        if its.devices:
            yield component.name, its.devices[0]
            continue
        yield component.name, free[its.device]
        free[its.device] = max(p[1] for p in _placement(component, free[its.device])) + _rank_count(component)


def _ports(file: AppsFile, started: list[Component]) -> Iterator[tuple[str, list[int]]]:
    """Yield (component name, its ports).

    The ports begin with the component's configured port. A component without a port uses the next free ports
    for its kind.
    """
    written = {
        port
        for c in started
        if (first := _require_resources(c).port) is not None
        for port in range(first, first + _require_resources(c).replicas)
    }
    base = dict.fromkeys(("llm", "generator"), file.launch.port)
    base["encoder"] = file.launch.port + ENCODER_PORT - ENGINE_PORT
    taken = set(written)
    for component in started:
        its = _require_resources(component)
        if its.port is not None:
            yield component.name, list(range(its.port, its.port + its.replicas))
            continue
        chosen: list[int] = []
        port = base[component.kind]
        while len(chosen) < its.replicas:
            if port not in taken:
                chosen.append(port)
            port += 1
        taken.update(chosen)
        yield component.name, chosen


def _latency_targets(file: AppsFile, app: Application, request: RequestSpec) -> LatencyTargets:
    first, *more = (request.slo or app.slo).tables
    return LatencyTargets(
        app=app.name,
        request=request.name,
        priority=priority_of(file, app),
        slo_percentile=first.percentile,
        slo_ttft_s=first.ttft_s,
        slo_tpot_s=first.tpot_s,
        slo_e2e_s=first.e2e_s,
        slo_also=[
            PercentileSlo(percentile=t.percentile, ttft_s=t.ttft_s, tpot_s=t.tpot_s, e2e_s=t.e2e_s)
            for t in more
        ],
    )


def _caches(file: AppsFile, started: list[Component]) -> Iterator[CacheSize]:
    """Yield a prefix cache and an embedding cache for each LLM, all with equal shares of the store."""
    llms = [c for c in started if c.kind == "llm"]
    size = file.launch.store_gib
    if size == 0:
        return
    for llm in llms:
        for kind in _CACHE_KINDS:
            yield CacheSize(
                name=f"{kind} {llm.name}",
                kind=kind,
                component=llm.name,
                gib=None if size is None else size / (2 * len(llms)),
            )


def _reservation(file: AppsFile, service_class: ClassOfService) -> QosReservation:
    apps = [app.name for app in file.applications if app.qos == service_class.name]
    return QosReservation(
        qos=service_class.name,
        share=service_class.share,
        priority=service_class.priority,
        deadline_s=service_class.deadline_s,
        apps=apps,
    )


def _planned_application(app: Application) -> PlannedApplication:
    namespace = None if app.namespace is None else PlannedNamespace(**app.namespace.model_dump())
    return PlannedApplication(
        name=app.name,
        tenant=app.tenant,
        system_prompt=app.system_prompt,
        prefixes=app.prefixes,
        namespace=namespace,
    )


def format_toml(data: Mapping[str, Any]) -> str:
    """Return `data` as TOML. Its values are tables, lists, strings, numbers and booleans."""
    return "\n".join(_format_table((), data)).lstrip("\n") + "\n"


def _format_table(path: tuple[str, ...], data: Mapping[str, Any]) -> Iterator[str]:
    later: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) or (isinstance(value, list) and _are_tables(value)):
            later[key] = value
        else:
            yield f"{_format_key(key)} = {_format_value(value)}"
    for key, value in later.items():
        inner = (*path, _format_key(key))
        head = ".".join(inner)
        for one in value if isinstance(value, list) else [value]:
            yield from ("", f"[[{head}]]" if isinstance(value, list) else f"[{head}]")
            yield from _format_table(inner, one)


def _are_tables(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(one, Mapping) for one in value)


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_format_key(k)} = {_format_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format_value, value)) + "]"
    if isinstance(value, str):
        # JSON strings are valid TOML strings, except for one control character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _format_key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _format_value(key)
