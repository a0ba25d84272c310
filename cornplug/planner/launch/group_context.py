"""Deployment context of an engine's command line, beyond its own group: the services that encode for
it, the entries that it shares on its host, the groups it hands KV to, the bounds of its requests.
Read off the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from cornplug.encoder_service.client.endpoints import url_name
from cornplug.planner.latency_forecast import LatencyForecast
from cornplug.planner.launch.addresses import ReplicaAddress, sites
from cornplug.planner.launch.kv_transfer import Transfer
from cornplug.planner.plan import CacheSize, Plan, ReplicaGroup

STORE_SOCKET: Final = "${RUN_DIR}/store.sock"
QUEUE_MARGIN: Final = 2
"""Times the longest queue of the simulation, which is of an hour or less."""
LEAST_STORE_GIB: Final = 1.0
"""Where a plan has no cache but engines take embeddings from a service beside them."""
_DRAIN_S: Final = (30, 600)

Role = Literal["P", "D", "PD"]


@dataclass(frozen=True)
class StoreSharing:
    """An engine's part in its host's store."""

    app: str
    kv: bool
    embeddings: bool
    encoder_socket: str | None
    """Of an encoder service on the same host."""

    @property
    def anything(self) -> bool:
        return self.kv or self.embeddings

    @property
    def env(self) -> dict[str, str]:
        """Settings that turn off sharing without a use in the plan: it would cost a copy for nothing."""
        off = {
            "CORNPLUG_ENGINE_SHARE_KV": self.kv,
            "CORNPLUG_ENGINE_SHARE_EMBEDDINGS": self.embeddings,
        }
        return {name: "false" for name, on in off.items() if not on} if self.anything else {}


@dataclass(frozen=True)
class GroupContext:
    bind_address: str
    """Address that servers listen at."""
    role: Role
    transfer: Transfer
    sharing: StoreSharing
    encoder_urls: tuple[str, ...]
    """URLs of the services that encode for this engine, on any host; none: it does so itself."""
    by_value: bool
    """Requests come with embeddings: some of those that prefill them have no encoder on their host."""
    unequal_pair: bool
    """It hands KV to, or takes it from, a group of another tensor parallelism."""
    pair_gpus: frozenset[str]
    """Device types of both sides of its transfers; its own alone without any."""
    ttft_s: float | None
    """Tightest bound of the classes that come here."""
    drain_s: int
    """Longest time that a request under way may still take."""
    ranks_requests: bool
    """Requests of different priority meet here."""
    limits_queue: bool
    """Online requests only: work that can wait is queued, never refused."""
    admits: bool
    """Classes of service with deadlines stand before it."""
    agrees_on_dtype: bool
    """Embeddings or KV pass between it and others: all are bfloat16."""


def role_of(group: ReplicaGroup) -> Role:
    has = {task for task in group.tasks if task in "PD"}
    return "PD" if has == {"P", "D"} or not has else ("P" if "P" in has else "D")


def is_cpu(group: ReplicaGroup) -> bool:
    """Whether its devices are cores: the device types of the table that begin with "cpu"."""
    return group.gpu.startswith("cpu")


def bind_address(plan: Plan, host: str) -> str:
    """Address that a server on `host` listens at. A plan of one host serves that host only."""
    return host if sum(nodes.count for nodes in plan.nodes) == 1 else "0.0.0.0"  # noqa: S104


def encoder_socket(site: ReplicaAddress) -> str:
    """Path of the encoder's unix socket, without the group's name: it may have at most 107 bytes."""
    return f"${{RUN_DIR}}/encoder-{site.port}.sock"


def encoder_url(site: ReplicaAddress, model: str) -> str:
    """Where SGLang finds the encoder of `model`: a service of several models wants its name."""
    return site.url if len(site.group.encoder_models) < 2 else f"{site.url}/sglang/{url_name(model)}"


def classes_of(plan: Plan, group: ReplicaGroup) -> list[LatencyForecast]:
    """The request classes that visit it."""
    visitors = {
        (route.app, route.request)
        for route in plan.routes
        if any(group.name in stage.groups for stage in route.stages)
    }
    return [one for one in plan.latency_forecasts if (one.app, one.request) in visitors]


def encoders_of(plan: Plan, group: ReplicaGroup) -> list[str]:
    """Names of the groups that encode for it, on some route."""
    found: dict[str, None] = {}
    for route in plan.routes:
        before: list[str] = []
        for stage in route.stages:
            if group.name in stage.groups and role_of(group) != "D":
                found |= dict.fromkeys(before)
            if stage.tasks == "E":
                before += stage.groups
    return list(found)


def pairs_of(plan: Plan, group: ReplicaGroup) -> set[str]:
    """Names of the groups on the other side of a transfer."""
    return {
        name
        for route in plan.routes
        if any(group.name in stage.groups for stage in route.stages)
        for stage in route.stages
        if group.name not in stage.groups and set(stage.tasks) & set("PD")
        for name in stage.groups
    }


def caches_for(plan: Plan, kind: str, components: set[str]) -> list[CacheSize]:
    return [c for c in plan.caches if c.kind == kind and c.gib > 0 and c.component in components]


def store_gib(plan: Plan) -> float:
    """GiB of each host's store; 0 where nothing is planned to be cached."""
    return sum(cache.gib for cache in plan.caches)


def context_for(
    plan: Plan, site: ReplicaAddress, placed: list[ReplicaAddress] | None = None, *, transfer: Transfer
) -> GroupContext:
    """Surroundings of one engine's process."""
    placed = sites(plan) if placed is None else placed
    group = site.group
    groups = {one.name: one for one in plan.groups}
    encoders = [s for s in placed if s.group.name in encoders_of(plan, group) and s.rank == 0]
    visiting = classes_of(plan, group)
    bounds = [one.ttft_bound_s for one in visiting if one.ttft_bound_s is not None]
    role = role_of(group)
    return GroupContext(
        bind_address=bind_address(plan, site.host),
        role=role,
        transfer=transfer,
        sharing=_sharing(plan, site, encoders),
        encoder_urls=tuple(dict.fromkeys(encoder_url(e, group.model) for e in one_per_host(encoders))),
        by_value=_by_value(plan, group, placed),
        pair_gpus=frozenset({group.gpu, *(groups[name].gpu for name in pairs_of(plan, group))}),
        unequal_pair=role != "PD" and any(groups[name].tp != group.tp for name in pairs_of(plan, group)),
        ttft_s=min(bounds, default=None),
        drain_s=_drain_s(visiting),
        ranks_requests=len({one.priority for one in visiting}) > 1,
        limits_queue=group.workload == "online" and len({one.priority for one in visiting}) == 1,
        admits=role != "D" and _admits(plan, group),
        agrees_on_dtype=role != "PD" or bool(encoders),
    )


def one_per_host(encoders: list[ReplicaAddress]) -> list[ReplicaAddress]:
    """A group's replicas on one host are one service."""
    first: dict[tuple[str, str], ReplicaAddress] = {}
    for site in encoders:
        first.setdefault((site.group.name, site.host), site)
    return list(first.values())


def _sharing(plan: Plan, site: ReplicaAddress, encoders: list[ReplicaAddress]) -> StoreSharing:
    group = site.group
    beside = [e for e in one_per_host(encoders) if e.host == site.host]
    fitting = [e for e in beside if group.model in e.group.encoder_models] or beside
    role = role_of(group)
    encoded = {name for e in encoders for name in e.group.components}
    return StoreSharing(
        app=_app(plan, group),
        kv=role != "D" and _shares_kv(group) and bool(caches_for(plan, "prefix", set(group.components))),
        embeddings=role != "D"
        and (bool(fitting) or bool(caches_for(plan, "embedding", set(group.components) | encoded))),
        encoder_socket=encoder_socket(fitting[0]) if fitting else None,
    )


def _app(plan: Plan, group: ReplicaGroup) -> str:
    """The application that an engine of several names: that of the most urgent class of service."""
    urgent_first = sorted(plan.reservations, key=lambda one: (-one.priority, one.qos))
    reserved = [app for one in urgent_first for app in one.apps if app in group.apps]
    return [*reserved, *group.apps, group.components[0]][0]


def _by_value(plan: Plan, group: ReplicaGroup, placed: list[ReplicaAddress]) -> bool:
    """A router does not tell replicas apart, so it is one answer for all of a route."""
    for route in plan.routes:
        if not any(group.name in stage.groups for stage in route.stages):
            continue
        encoders = {name for stage in route.stages if stage.tasks == "E" for name in stage.groups}
        readers = {name for stage in route.stages if "P" in stage.tasks for name in stage.groups}
        near = {site.host for site in placed if site.group.name in encoders}
        if near and any(site.host not in near for site in placed if site.group.name in readers):
            return True
    return False


def _admits(plan: Plan, group: ReplicaGroup) -> bool:
    """Whether a class of service of its applications has a deadline."""
    return any(r.deadline_s is not None and set(r.apps) & set(group.apps) for r in plan.reservations)


def _shares_kv(group: ReplicaGroup) -> bool:
    """Whether the group's engine can share KV: see README, Limits."""
    if group.kv is not None and group.kv.element_bytes < 2:
        return False
    if group.engine == "vllm":
        return group.kv is None or not group.kv.mla
    speculates = group.settings is not None and group.settings.speculative != "none"
    return group.pp == 1 and not speculates and role_of(group) == "PD"


def _drain_s(visiting: list[LatencyForecast]) -> int:
    longest = [
        t
        for one in visiting
        for t in (one.e2e.p99, one.e2e.p95, *(table.e2e_s for table in one.slo))
        if t is not None
    ]
    least, most = _DRAIN_S
    return min(max(math.ceil(max(longest, default=60.0)), least), most)
