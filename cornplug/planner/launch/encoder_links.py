"""Choice of how engines reach the encoder services: through a unix socket on their host, or by URL.

An engine uses one socket, or a list of URLs with weights (rendezvous hashing). The weights are the planned
flows from the services to the engine's group. A socket does not need the network, so sockets are used if the
services' loads stay close to the plan.

Messages between hosts are encrypted with a common secret, a file of 32 bytes of which each host has a copy.
Processes on the same host use the secret for authentication.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cornplug.config import load
from cornplug.encoder_service.client.endpoints import url_name
from cornplug.errors import ConfigError
from cornplug.planner.launch.addresses import ReplicaAddress
from cornplug.planner.plan import Deployment, ReplicaGroup
from cornplug.private_paths import is_default_secret, read_secret

_LLM_ENGINES: Final = ("vllm", "sglang")
_OVERLOAD_TOLERANCE: Final = 1.1
"""Factor by which the largest overload of a service may exceed the smallest possible overload if sockets are
used."""

ReplicaHost = tuple[str, str]
"""(name of a group, host of the rank that serves requests)."""
Flow = Sequence[tuple[ReplicaAddress, float]]
"""(service, planned rate of requests to it) for several services."""
_SECRET_VARIABLE: Final = "CORNPLUG_STORE_SECRET_FILE"  # noqa: S105
_SECRET_PLACEHOLDER: Final = "${SECRET_FILE}"  # noqa: S105
SECRET_ENV: Final[Mapping[str, str]] = {_SECRET_VARIABLE: _SECRET_PLACEHOLDER}


@dataclass(frozen=True)
class EncoderLink:
    """Value of an engine's `--cornplug-encoder`."""

    socket: str | None = None
    urls: tuple[str, ...] = ()
    """URLs of services, which may be on other hosts. With URLs, the hosts need a common secret."""

    @property
    def flags(self) -> list[str]:
        value = self.socket or ",".join(self.urls)
        return ["--cornplug-encoder", value] if value else []

    @property
    def extra_config(self) -> dict[str, str]:
        """Return the flag in the form of vLLM's `..._connector_extra_config`."""
        if self.socket:
            return {"encoder.socket": self.socket}
        return {"encoder.engine_urls": ",".join(self.urls)} if self.urls else {}


def encoder_socket(site: ReplicaAddress) -> str:
    """Return the path of an encoder service's unix socket.

    The path does not contain the group's name, because the path may have at most 107 bytes.
    """
    return f"${{RUN_DIR}}/encoder-{site.port}.sock"


def encoder_url(site: ReplicaAddress, model: str) -> str:
    """Return the URL with which SGLang sends media of `model` to an encoder service.

    If the service has several models, the URL contains the model's name.
    """
    return site.url if len(site.group.encoder_models) < 2 else f"{site.url}/sglang/{url_name(model)}"


def replica_host(site: ReplicaAddress) -> ReplicaHost:
    """Return the key of a process in the result of `encoder_links`. All ranks of a replica have the same key
    as rank 0."""
    return site.group.name, site.master.rpartition(":")[0]


def encoders_of(deployment: Deployment, group: ReplicaGroup) -> list[str]:
    """Return the names of the encoder groups that encode media for an engine's group on any route."""
    if group.engine not in _LLM_ENGINES:
        return []
    found: dict[str, None] = {}
    for route in deployment.routes:
        before: list[str] = []
        for stage in route.stages:
            if group.name in stage.groups and "P" in stage.tasks:
                found |= dict.fromkeys(before)
            if stage.tasks == "E":
                before += stage.groups
    return list(found)


def services_of(
    deployment: Deployment, group: ReplicaGroup, placed: Sequence[ReplicaAddress]
) -> list[ReplicaAddress]:
    """Return the first replica of each service that encodes media for a group.

    The replicas of an encoder group on one host are one service.
    """
    names = encoders_of(deployment, group)
    first: dict[ReplicaHost, ReplicaAddress] = {}
    for site in placed:
        if site.group.name in names and site.rank == 0:
            first.setdefault((site.group.name, site.host), site)
    found = list(first.values())
    return [site for site in found if group.model in site.group.encoder_models] or found


def is_towerless(deployment: Deployment, group: ReplicaGroup) -> bool:
    """Return whether a group's engines do not load a tower.

    This is the case if the input requires it and encoder services encode all media of the group.
    """
    return group.tower == "service" and "E" not in group.tasks and bool(encoders_of(deployment, group))


def encoder_links(deployment: Deployment, placed: Sequence[ReplicaAddress]) -> dict[ReplicaHost, EncoderLink]:
    """Return the encoder link of each engine, by group and host. Engines without an encoder service are
    omitted."""
    flows = _PlannedFlows(deployment, placed)
    to = {
        group.name: flows.flows_to(group, services_of(deployment, group, placed))
        for group in deployment.groups
    }
    asked = {replica_host(s): to[s.group.name] for s in placed if s.rank == 0 and to[s.group.name]}
    beside = {
        engine: next(s for s, _ in flow if s.host == engine[1])
        for engine, flow in asked.items()
        if any(s.host == engine[1] for s, _ in flow)
    }
    # vLLM without a tower needs a URL, because the service fetches and decodes its images.
    by_url = {g.name for g in deployment.groups if g.engine == "vllm" and is_towerless(deployment, g)}
    beside = {engine: site for engine, site in beside.items() if engine[0] not in by_url}
    local = _engines_using_socket(flows, asked, beside)
    return {
        engine: EncoderLink(socket=encoder_socket(beside[engine]))
        if engine in local
        else EncoderLink(urls=_weighted_urls(flow))
        for engine, flow in asked.items()
    }


def _weighted_urls(flow: Flow) -> tuple[str, ...]:
    rates = [rate for _, rate in flow]
    if max(rates) <= min(rates) * 1.001:
        return tuple(site.url for site, _ in flow)
    return tuple(f"{site.url}#{rate / min(rates):.3g}" for site, rate in flow)


def _engines_using_socket(
    flows: _PlannedFlows,
    engine_flows: Mapping[ReplicaHost, Flow],
    local_services: Mapping[ReplicaHost, ReplicaAddress],
) -> set[ReplicaHost]:
    """Return the engines that use the socket on their host. The choice depends on the services' planned
    loads."""
    if all(len({site.host for site, _ in flow}) == 1 for flow in engine_flows.values()):
        return set(local_services)

    def overload(local: Collection[ReplicaHost]) -> float:
        """Return the largest ratio of a service's load to its planned load."""
        loads: dict[ReplicaHost, float] = defaultdict(float)
        for engine, flow in engine_flows.items():
            parts = [(local_services[engine], 1.0)] if engine in local else flow
            whole = sum(part for _, part in parts)
            for service, part in parts:
                loads[replica_host(service)] += flows.rate(engine) * part / whole
        planned = {service: flows.rate(service) for service in loads}
        return max((load / planned[s] for s, load in loads.items() if planned[s]), default=1.0)

    needs: dict[ReplicaHost, float] = defaultdict(float)
    for engine, service in local_services.items():
        needs[replica_host(service)] += flows.rate(engine)
    covered = {
        e for e, s in local_services.items() if needs[replica_host(s)] <= flows.rate(replica_host(s)) * 1.001
    }
    choices: tuple[set[ReplicaHost], ...] = (set(local_services), covered, set())
    least = min(map(overload, choices))
    return next(choice for choice in choices if overload(choice) <= least * _OVERLOAD_TOLERANCE)


class _PlannedFlows:
    """Planned rates of requests with media, for encoder services and engines."""

    def __init__(self, deployment: Deployment, placed: Sequence[ReplicaAddress]) -> None:
        self._host_replicas = Counter(replica_host(site) for site in placed if site.rank == 0)
        self._group_replicas = {group.name: group.replicas for group in deployment.groups}
        self._flow_rates: dict[tuple[str, str], float] = defaultdict(float)
        self._rates: dict[str, float] = defaultdict(float)
        for route in deployment.routes:
            encoding = [s for s in route.stages if s.tasks == "E"]
            reading = [s for s in route.stages if "P" in s.tasks] if encoding else []
            for stage in (*encoding, *reading):
                for name, weight in stage.groups.items():
                    self._rates[name] += route.rate * weight
            for encoder, part in (pair for stage in encoding for pair in stage.groups.items()):
                for engine, weight in (pair for stage in reading for pair in stage.groups.items()):
                    self._flow_rates[encoder, engine] += route.rate * part * weight

    def rate(self, replicas: ReplicaHost) -> float:
        """Return the planned rate of requests with media for a group's replicas on one host."""
        return self._rates[replicas[0]] * self._host_share(replicas)

    def flows_to(self, engine: ReplicaGroup, services: Sequence[ReplicaAddress]) -> Flow:
        """Return the planned flow from each service to an engine's group.

        Services without a flow are omitted. If no service has a flow, all services have the same flow.
        """
        rates = [
            self._flow_rates[s.group.name, engine.name] * self._host_share(replica_host(s)) for s in services
        ]
        return [(site, rate) for site, rate in zip(services, rates, strict=True) if rate > 0] or [
            (site, 1.0) for site in services
        ]

    def _host_share(self, replicas: ReplicaHost) -> float:
        return self._host_replicas[replicas] / self._group_replicas[replicas[0]]


def common_secret(secret_file: Path | None) -> Path | None:
    """Return the secret file: `secret_file` from the command line, or else the file in the settings.

    Returns None if this is the host's own secret, which other hosts do not have.
    """
    path = secret_file or load().store.secret_file
    return None if is_default_secret(path) else path


def check_secret_set(environments: Iterable[Mapping[str, str]]) -> None:
    """Raise ConfigError if a command needs the common secret but its file was not set."""
    if any(env.get(_SECRET_VARIABLE) == _SECRET_PLACEHOLDER for env in environments):
        raise ConfigError(
            "--secret-file",
            "missing; engines use encoder services of other hosts, so all hosts need the same secret",
            "Create it (head -c 32 /dev/urandom > secret && chmod 600 secret), copy it to each host (scp -p) "
            f"and add --secret-file FILE or set {_SECRET_VARIABLE}.",
        )


def check_secret_readable(environments: Iterable[Mapping[str, str]]) -> None:
    """Raise ConfigError if the secret file is missing or invalid.

    If the file were missing, each host's store would create its own secret.
    """
    for path in sorted({env[_SECRET_VARIABLE] for env in environments if _SECRET_VARIABLE in env}):
        read_secret(Path(path), create=False)
