"""How each engine asks the encoder services of a plan: its host's by the unix socket, or all by URL.

An engine asks one socket, or a list of URLs of which each gets an equal part of the media (rendezvous). The
socket costs no network, so it is taken where the services' loads stay as planned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cornplug.encoder_service.client.endpoints import url_name
from cornplug.planner.launch.addresses import ReplicaAddress
from cornplug.planner.plan import Plan, ReplicaGroup

_PULLING: Final = ("vllm", "sglang")
_TOLERANCE: Final = 1.1
"""Times the least overload of a service that the sockets may cost."""

ReplicaHost = tuple[str, str]
"""Group, and host of the rank that serves."""


@dataclass(frozen=True)
class EncoderLink:
    """The value of an engine's `--cornplug-encoder`."""

    socket: str | None = None
    urls: tuple[str, ...] = ()
    """Of services on several hosts, or on another one: these hosts need one secret."""

    @property
    def flags(self) -> list[str]:
        value = self.socket or ",".join(self.urls)
        return ["--cornplug-encoder", value] if value else []

    @property
    def extra_config(self) -> dict[str, str]:
        """The flag as vLLM's `..._connector_extra_config` takes it."""
        if self.socket:
            return {"encoder.socket": self.socket}
        return {"encoder.engine_urls": ",".join(self.urls)} if self.urls else {}


def encoder_socket(site: ReplicaAddress) -> str:
    """Path of the encoder's unix socket, without the group's name: it may have at most 107 bytes."""
    return f"${{RUN_DIR}}/encoder-{site.port}.sock"


def encoder_url(site: ReplicaAddress, model: str) -> str:
    """Where SGLang finds the encoder of `model`: a service of several models wants its name."""
    return site.url if len(site.group.encoder_models) < 2 else f"{site.url}/sglang/{url_name(model)}"


def replica_host(site: ReplicaAddress) -> ReplicaHost:
    """Key of a process in `encoder_links`: all ranks of a replica have the link of rank 0."""
    return site.group.name, site.master.rpartition(":")[0]


def encoders_of(plan: Plan, group: ReplicaGroup) -> list[str]:
    """Names of the groups that encode for an engine's group, on some route."""
    if group.engine not in _PULLING:
        return []
    found: dict[str, None] = {}
    for route in plan.routes:
        before: list[str] = []
        for stage in route.stages:
            if group.name in stage.groups and "P" in stage.tasks:
                found |= dict.fromkeys(before)
            if stage.tasks == "E":
                before += stage.groups
    return list(found)


def services_of(plan: Plan, group: ReplicaGroup, placed: Sequence[ReplicaAddress]) -> list[ReplicaAddress]:
    """The first replica of each service that encodes for a group: replicas on one host are one service."""
    names = encoders_of(plan, group)
    first: dict[ReplicaHost, ReplicaAddress] = {}
    for site in placed:
        if site.group.name in names and site.rank == 0:
            first.setdefault((site.group.name, site.host), site)
    found = list(first.values())
    return [site for site in found if group.model in site.group.encoder_models] or found


def encoder_links(plan: Plan, placed: Sequence[ReplicaAddress]) -> dict[ReplicaHost, EncoderLink]:
    """The link of each group's replicas on a host; engines that no service encodes for have none."""
    services = {group.name: services_of(plan, group, placed) for group in plan.groups}
    engines = {
        replica_host(site): services[site.group.name]
        for site in placed
        if site.rank == 0 and services[site.group.name]
    }
    local = _local(plan, placed, engines)
    return {
        engine: EncoderLink(socket=encoder_socket(next(s for s in asked if s.host == engine[1])))
        if engine in local
        else EncoderLink(urls=tuple(s.url for s in asked))
        for engine, asked in engines.items()
    }


def _local(
    plan: Plan, placed: Sequence[ReplicaAddress], engines: Mapping[ReplicaHost, Sequence[ReplicaAddress]]
) -> set[ReplicaHost]:
    """The engines that ask their host's socket, chosen by the planned loads."""
    beside = {
        engine: next(s for s in asked if s.host == engine[1])
        for engine, asked in engines.items()
        if any(s.host == engine[1] for s in asked)
    }
    if all(len({s.host for s in asked}) == 1 for asked in engines.values()):
        return set(beside)
    planned = _encode_rates(plan, placed)
    asking: dict[ReplicaHost, float] = defaultdict(float)
    for engine, service in beside.items():
        asking[replica_host(service)] += planned[engine]
    served = {e for e, s in beside.items() if asking[replica_host(s)] <= planned[replica_host(s)] * 1.001}

    def overload(local: Collection[ReplicaHost]) -> float:
        """The largest ratio of a service's load to the planned one."""
        loads: dict[ReplicaHost, float] = defaultdict(float)
        for engine, asked in engines.items():
            these = [beside[engine]] if engine in local else asked
            for service in these:
                loads[replica_host(service)] += planned[engine] / len(these)
        return max((load / planned[s] for s, load in loads.items() if planned[s]), default=1.0)

    choices: list[set[ReplicaHost]] = [set(beside), served, set()]
    least = min(map(overload, choices))
    return next(choice for choice in choices if overload(choice) <= least * _TOLERANCE)


def _encode_rates(plan: Plan, placed: Sequence[ReplicaAddress]) -> dict[ReplicaHost, float]:
    """Planned requests a second with media of a remote encoder: those of each service, and of each engine."""
    each: dict[str, float] = defaultdict(float)
    for route in plan.routes:
        if not any(stage.tasks == "E" for stage in route.stages):
            continue
        for stage in route.stages:
            if stage.tasks == "E" or "P" in stage.tasks:
                for name, weight in stage.groups.items():
                    each[name] += route.rate * weight
    found: dict[ReplicaHost, float] = defaultdict(float)
    for site in placed:
        if site.rank == 0:
            found[replica_host(site)] += each[site.group.name] / site.group.replicas
    return found
