"""Engine groups of a deployment: the context of each engine, and the groups' routers.

An engine's command line depends on its context: the engine's encoder services, what the engine shares through
its host's store, the groups with which it exchanges KV, and the latency bounds of its requests.

The routers' commands are for vllm-router 0.1.17 and sglang-router 0.3.2. Neither router supports weights, and
both count requests instead of work. Therefore each group, and each pair of prefill and decode groups, has its
own router. Clients divide a class's requests among the routers by the weights in routes.json, as the
simulation assumes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from cornplug.planner.launch.connections import (
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    EncoderLink,
    ReplicaAddress,
    ReplicaHost,
    Transfer,
    encoder_links,
    encoder_url,
    encoders_of,
    is_towerless,
    replica_addresses,
    replica_host,
    services_of,
)
from cornplug.planner.plan import CacheSize, Deployment, LatencyTargets, PlanRoute, ReplicaGroup, RouteStage

STORE_SOCKET: Final = "${RUN_DIR}/store.sock"
QUEUE_MARGIN: Final = 2
"""Factor by which the longest queue of the simulation, which covers an hour or less, is multiplied."""
MIN_STORE_GIB: Final = 1.0
"""Minimum store size in GiB. A plan may have no cache, but engines also receive embeddings from a service on
their host through the store."""
_DRAIN_LIMITS_S: Final = (30, 600)

Role = Literal["P", "D", "PD"]
_ROUTER_POLICY: Final = {
    "power_of_two": "power_of_two",
    "random": "random",
    # Plans of earlier versions have these policies.
    "least_work": "power_of_two",
    "join_shortest_queue": "power_of_two",
}


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


@dataclass(frozen=True)
class RouterPool:
    """Identical engines behind one router: a group, or a pair of prefill and decode groups."""

    engine: str
    combined: tuple[str, ...]
    """Name of the group that does both prefill and decode. Empty for a pair of groups."""
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        return (*self.combined, *self.prefill, *self.decode)


@dataclass(frozen=True)
class RouterCommand:
    """Router of a pool. A pool with one server has no router process, and an empty `argv`."""

    name: str
    pool: RouterPool
    host: str
    bind_address: str
    """Address on which the router listens."""
    port: int
    argv: tuple[str, ...]
    weights_text: str
    """Text with the planned rate of requests for each of the pool's groups."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def pools_of(deployment: Deployment, route: PlanRoute) -> list[tuple[RouterPool, float]]:
    """Return the pools that serve a route's requests, with the share of each pool.

    The result is empty if the route has no language model.
    """
    engine = {group.name: group.engine for group in deployment.groups}
    serving, prefill, decode = (_stage(route, tasks) for tasks in ("PD", "P", "D"))
    if serving:
        # Both routers support any OpenAI server. For servers other than SGLang, use vLLM's router.
        return [
            (RouterPool("sglang" if engine[name] == "sglang" else "vllm", (name,)), share)
            for name, share in serving.groups.items()
        ]
    if not prefill or not decode:
        return []
    return [
        (RouterPool(engine[first], (), (first,), (second,)), share * part)
        for first, share in prefill.groups.items()
        for second, part in _partners(decode, engine, engine[first]).items()
    ]


def routers(
    deployment: Deployment, placed: Sequence[ReplicaAddress], *, transfer: Transfer
) -> list[RouterCommand]:
    """Return one router for each pool. Router processes run on the first host."""
    pools: dict[RouterPool, list[tuple[PlanRoute, float]]] = defaultdict(list)
    for route in deployment.routes:
        for pool, share in pools_of(deployment, route):
            pools[pool].append((route, share))
    found: list[RouterCommand] = []
    for pool, routes in pools.items():
        servers = [s for s in placed if s.group.name in pool.groups and s.rank == 0]
        host, number = placed[0].host, sum(bool(r.argv) for r in found)
        weights = _weights(pool, routes)
        if len(servers) == 1:
            name, (server,) = f"direct-{len(found) + 1}", servers
            found.append(RouterCommand(name, pool, server.host, "", server.port, (), weights))
            continue
        port = ROUTER_PORT + deployment.router_ports + number
        metrics_port = ROUTER_METRICS_PORT + deployment.router_ports + number
        bound = bind_address(deployment, host)
        listens = ["--host", bound, "--port", str(port)]
        listens += ["--prometheus-host", bound, "--prometheus-port", str(metrics_port)]
        argv = _argv(deployment, pool, servers, listens, transfer)
        found.append(RouterCommand(f"router-{number + 1}", pool, host, bound, port, tuple(argv), weights))
    return found


def route_entries(
    deployment: Deployment, front: Sequence[RouterCommand], *, unready_urls: Collection[str | None] = ()
) -> dict[str, dict[str, Any]]:
    """Return the entries of routes.json, by request class.

    "priority" is the priority of the class's requests (both engines serve the lowest first). "to" is a list
    of {"weight": share of the class, "url": ...}, with the largest weight first. If the application has a
    tenant, "cache_salt" is its name. Addresses in `unready_urls` are omitted if the class has other
    addresses.
    """
    priority = {one.class_name: -one.priority for one in deployment.latency_forecasts}
    address = {router.pool: router.url for router in front}
    rates: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for route in deployment.routes:
        for pool, share in pools_of(deployment, route):
            rates[route.class_name][address[pool]] += route.rate * share
    salts = {app.name: {"cache_salt": app.tenant} for app in deployment.applications if app.tenant}
    return {
        name: {
            "priority": priority[name],
            **salts.get(name.partition("/")[0], {}),
            "to": _weighted_entries(_ready_urls(urls, unready_urls)),
        }
        for name, urls in rates.items()
    }


def _ready_urls(urls: Mapping[str, float], unready_urls: Collection[str | None]) -> Mapping[str, float]:
    return {url: rate for url, rate in urls.items() if url not in unready_urls} or urls


def _weighted_entries(urls: Mapping[str, float]) -> list[dict[str, Any]]:
    total = sum(urls.values())
    return [
        {"weight": round(rate / total, 4) if total else 1.0, "url": url}
        for url, rate in sorted(urls.items(), key=lambda item: (-item[1], item[0]))
    ]


def _argv(
    deployment: Deployment,
    pool: RouterPool,
    servers: Sequence[ReplicaAddress],
    listen_flags: Sequence[str],
    transfer: Transfer,
) -> list[str]:
    first = servers[0].group
    policy = "cache_aware" if _counts_on_prefixes(deployment, servers) else _ROUTER_POLICY[first.router]
    command = ["vllm-router"] if pool.engine == "vllm" else ["python", "-m", "sglang_router.launch_router"]
    command += listen_flags
    if pool.combined:
        return [*command, "--worker-urls", *(s.url for s in servers), "--policy", policy]
    kind = ["--vllm-pd-disaggregation"] if pool.engine == "vllm" else ["--pd-disaggregation"]
    if pool.engine == "vllm":
        kind += ["--kv-connector", "mooncake" if transfer == "mooncake" else "nixl"]
    for site in servers:
        if site.group.name in pool.prefill:
            bootstrap = pool.engine == "sglang" or transfer == "mooncake"
            kind += ["--prefill", site.url, *([str(site.bootstrap_port)] if bootstrap else [])]
        else:
            kind += ["--decode", site.url]
    decode = next(s.group for s in servers if s.group.name in pool.decode)
    kind += ["--prefill-policy", policy, "--decode-policy", _ROUTER_POLICY[decode.router]]
    return [*command, *kind, *_queue(deployment, servers, pool)]


def _queue(deployment: Deployment, servers: Sequence[ReplicaAddress], pool: RouterPool) -> list[str]:
    """Return the router's flags that limit the queue of a prefill-decode pair.

    The router has to limit the queue, because SGLang's servers cannot limit their queues in a pair.
    """
    contexts = [context_for(deployment, s, [*servers], transfer="nixl", links={}) for s in servers]
    ttft = min((c.ttft_s for c in contexts if c.limits_queue and c.ttft_s is not None), default=None)
    if ttft is None or not all(c.limits_queue for c in contexts):
        return []
    running = sum(
        s.group.settings.max_batch for s in servers if s.group.name in pool.decode and s.group.settings
    )
    rates = [
        max(s.group.capacity.values()) for s in servers if s.group.name in pool.prefill and s.group.capacity
    ]
    simulated = sum(s.group.queue.requests for s in servers if s.group.name in pool.prefill and s.group.queue)
    waiting = max(math.ceil(sum(rates) * ttft), QUEUE_MARGIN * simulated)
    return [
        "--max-concurrent-requests", str(max(running, 1)), "--queue-size", str(max(waiting, 1)),
        "--queue-timeout-secs", str(max(math.ceil(ttft), 1)),
    ]  # fmt: skip


def _stage(route: PlanRoute, tasks: str) -> RouteStage | None:
    """Return the stage whose tasks, apart from E (encode) and G (generate), are exactly `tasks`, or None if
    there is no such stage."""
    for stage in route.stages:
        if {task for task in stage.tasks if task in "PD"} == set(tasks):
            return stage
    return None


def _partners(decode: RouteStage, engine: Mapping[str, str], kind: str) -> dict[str, float]:
    """Return the share of each decode group whose engine is `kind`.

    Groups with another engine are omitted, because vLLM and SGLang cannot exchange KV directly.
    """
    same = {name: weight for name, weight in decode.groups.items() if engine[name] == kind}
    return {name: weight / sum(same.values()) for name, weight in same.items()}


def _counts_on_prefixes(deployment: Deployment, servers: Sequence[ReplicaAddress]) -> bool:
    """Return whether cached prefixes are expected for these servers, in a store or in the engines' own
    caches."""
    if caches_for(deployment, "prefix", {c for s in servers for c in s.group.components}):
        return True
    visitors = [one for s in servers if "P" in s.group.tasks for one in classes_of(deployment, s.group)]
    return any(one.prefix_hit_rate for one in visitors)


def _weights(pool: RouterPool, routes: Sequence[tuple[PlanRoute, float]]) -> str:
    rate = sum(route.rate * share for route, share in routes)
    return ", ".join(f"{name} {rate:.4g}/s" for name in sorted(pool.groups))
