"""Context of an engine in a deployment, on which the engine's command line depends.

The context includes the engine's encoder services, what the engine shares through its host's store, the
groups with which it exchanges KV, and the latency bounds of its requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from cornplug.planner.latency_forecast import LatencyTargets
from cornplug.planner.launch.addresses import ReplicaAddress, replica_addresses
from cornplug.planner.launch.encoder_links import (
    EncoderLink,
    ReplicaHost,
    encoder_links,
    encoder_url,
    encoders_of,
    is_towerless,
    replica_host,
    services_of,
)
from cornplug.planner.launch.kv_transfer import Transfer
from cornplug.planner.plan import CacheSize, Deployment, ReplicaGroup

STORE_SOCKET: Final = "${RUN_DIR}/store.sock"
QUEUE_MARGIN: Final = 2
"""Factor by which the longest queue of the simulation, which covers an hour or less, is multiplied."""
MIN_STORE_GIB: Final = 1.0
"""Minimum store size in GiB. A plan may have no cache, but engines also receive embeddings from a service on
their host through the store."""
_DRAIN_LIMITS_S: Final = (30, 600)

Role = Literal["P", "D", "PD"]


@dataclass(frozen=True)
class StoreSharing:
    """KV and embeddings that an engine shares through the store of its host."""

    app: str
    kv: bool
    embeddings: bool
    encoder: EncoderLink

    @property
    def is_enabled(self) -> bool:
        return self.kv or self.embeddings

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that turn off sharing that is not planned, because such sharing would only
        cost copies.

        The variables also prevent the engine from starting a store. Such a store would occupy the socket
        while the launcher restarts its own store.
        """
        on = {
            "CORNPLUG_ENGINE_SHARE_KV": self.kv,
            "CORNPLUG_ENGINE_SHARE_EMBEDDINGS": self.embeddings,
            "CORNPLUG_STORE_AUTOSTART": False,
        }
        return {name: "false" for name, value in on.items() if not value} if self.is_enabled else {}


@dataclass(frozen=True)
class GroupContext:
    bind_address: str
    """Address on which the engine listens."""
    role: Role
    transfer: Transfer
    sharing: StoreSharing
    encoder_urls: tuple[str, ...]
    """URLs of the encoder services for this engine, on any host, if it has no tower. Empty if it has a
    tower."""
    pair_tp_differs: bool
    """Whether the engine exchanges KV with a group that has another tensor-parallel degree."""
    pair_gpus: frozenset[str]
    """Device types of the engine and of the engines with which it exchanges KV."""
    ttft_s: float | None
    """Tightest TTFT bound in seconds of the request classes that use this engine, or None."""
    drain_s: int
    """Maximum time in seconds that a stopping engine waits for running requests."""
    uses_priorities: bool
    """Whether requests have different priorities."""
    limits_queue: bool
    """Whether the queue is limited, because all requests are online. Semi-online and offline requests are
    queued and never rejected."""
    needs_admission: bool
    """Whether classes of service with deadlines use the engine, so that it needs admission control."""
    needs_common_dtype: bool
    """Whether the engine exchanges embeddings or KV with other processes, which must all use bfloat16."""


def role_of(group: ReplicaGroup) -> Role:
    has = {task for task in group.tasks if task in "PD"}
    return "PD" if has == {"P", "D"} or not has else ("P" if "P" in has else "D")


def is_cpu(group: ReplicaGroup) -> bool:
    """Return whether a group's devices are CPU cores. Their device types begin with "cpu"."""
    return group.gpu.startswith("cpu")


def bind_address(deployment: Deployment, host: str) -> str:
    """Return the address on which a server on `host` listens.

    If the deployment has only one host, this is the address of the host, otherwise all addresses.
    """
    if deployment.listen is not None:
        return deployment.listen
    return host if sum(nodes.count for nodes in deployment.nodes) == 1 else "0.0.0.0"  # noqa: S104


def classes_of(deployment: Deployment, group: ReplicaGroup) -> list[LatencyTargets]:
    """Return the request classes that use the group."""
    visitors = {
        (route.app, route.request)
        for route in deployment.routes
        if any(group.name in stage.groups for stage in route.stages)
    }
    return [one for one in deployment.latency_forecasts if (one.app, one.request) in visitors]


def pairs_of(deployment: Deployment, group: ReplicaGroup) -> list[ReplicaGroup]:
    """Return the groups with which a group exchanges KV."""
    names = {
        name
        for route in deployment.routes
        if any(group.name in stage.groups for stage in route.stages)
        for stage in route.stages
        if group.name not in stage.groups and set(stage.tasks) & set("PD")
        for name in stage.groups
    }
    return [one for one in deployment.groups if one.name in names]


def caches_for(deployment: Deployment, kind: str, components: set[str]) -> list[CacheSize]:
    return [c for c in deployment.caches if c.kind == kind and c.gib != 0 and c.component in components]


def store_size_flags(deployment: Deployment) -> list[str]:
    """Return the `--size` flag for each host's store, or [] if the store's default size is used."""
    planned = [cache.gib for cache in deployment.caches]
    if None in planned:
        return []
    return ["--size", f"{max(sum(gib or 0.0 for gib in planned), MIN_STORE_GIB):g}GiB"]


def context_for(
    deployment: Deployment,
    site: ReplicaAddress,
    placed: list[ReplicaAddress] | None = None,
    *,
    transfer: Transfer,
    links: Mapping[ReplicaHost, EncoderLink] | None = None,
) -> GroupContext:
    """Return the context of one engine process.

    `placed` and `links` are the results of `replica_addresses` and `encoder_links`, which are computed if
    they are None.
    """
    placed = replica_addresses(deployment) if placed is None else placed
    links = encoder_links(deployment, placed) if links is None else links
    group = site.group
    pairs = pairs_of(deployment, group)
    encoders = services_of(deployment, group, placed)
    visiting = classes_of(deployment, group)
    bounds = [one.ttft_bound_s for one in visiting if one.ttft_bound_s is not None]
    role = role_of(group)
    return GroupContext(
        bind_address=bind_address(deployment, site.host),
        role=role,
        transfer=transfer,
        sharing=_sharing(deployment, group, links.get(replica_host(site), EncoderLink())),
        encoder_urls=tuple(
            encoder_url(one, group.model) for one in encoders if is_towerless(deployment, group)
        ),
        pair_gpus=frozenset({group.gpu, *(one.gpu for one in pairs)}),
        pair_tp_differs=role != "PD" and any(one.tp != group.tp for one in pairs),
        ttft_s=min(bounds, default=None),
        drain_s=_drain_s(visiting),
        uses_priorities=len({one.priority for one in visiting}) > 1,
        limits_queue=group.workload == "online" and len({one.priority for one in visiting}) == 1,
        needs_admission=role != "D" and _admits(deployment, group),
        needs_common_dtype=role != "PD" or bool(encoders),
    )


def _sharing(deployment: Deployment, group: ReplicaGroup, link: EncoderLink) -> StoreSharing:
    role = role_of(group)
    named = encoders_of(deployment, group)
    encoded = {name for one in deployment.groups if one.name in named for name in one.components}
    return StoreSharing(
        app=_app(deployment, group),
        # The engine decides at startup whether it can share KV.
        kv=role != "D" and bool(caches_for(deployment, "prefix", set(group.components))),
        embeddings=role != "D"
        and (bool(link.flags) or bool(caches_for(deployment, "embedding", set(group.components) | encoded))),
        encoder=link,
    )


def _app(deployment: Deployment, group: ReplicaGroup) -> str:
    """Return the application under which a group's engines share entries.

    If several applications use the group, this is the first in the most urgent class of service. A class that
    is not defined has priority 0, as in the encoder service.
    """
    priority = {app: one.priority for one in deployment.reservations for app in one.apps}
    return max(group.apps, key=lambda app: priority.get(app, 0), default=group.components[0])


def _admits(deployment: Deployment, group: ReplicaGroup) -> bool:
    """Return whether a class of service of the group's applications has a deadline."""
    return any(r.deadline_s is not None and set(r.apps) & set(group.apps) for r in deployment.reservations)


def _drain_s(targets: list[LatencyTargets]) -> int:
    longest = [
        t
        for one in targets
        for t in (one.e2e.p99, one.e2e.p95, *(table.e2e_s for table in one.percentile_slos))
        if t is not None
    ]
    least, most = _DRAIN_LIMITS_S
    return min(max(math.ceil(max(longest, default=60.0)), least), most)
