"""Commands of the routers for a deployment's engines, and the addresses for each request class.

The commands are for vllm-router 0.1.17 and sglang-router 0.3.2. Neither router supports weights, and both
count requests instead of work. Therefore each group, and each pair of prefill and decode groups, has its own
router. Clients divide a class's requests among the routers by the weights in routes.json, as the simulation
assumes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cornplug.planner.launch.addresses import ROUTER_METRICS_PORT, ROUTER_PORT, ReplicaAddress
from cornplug.planner.launch.group_context import (
    QUEUE_MARGIN,
    bind_address,
    caches_for,
    classes_of,
    context_for,
)
from cornplug.planner.launch.kv_transfer import Transfer
from cornplug.planner.plan import Deployment, PlanRoute, RouteStage

_ROUTER_POLICY: Final = {
    "power_of_two": "power_of_two",
    "random": "random",
    # Plans of earlier versions have these policies.
    "least_work": "power_of_two",
    "join_shortest_queue": "power_of_two",
}


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
    priority = {f"{one.app}/{one.request}": -one.priority for one in deployment.latency_forecasts}
    address = {router.pool: router.url for router in front}
    rates: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for route in deployment.routes:
        for pool, share in pools_of(deployment, route):
            rates[f"{route.app}/{route.request}"][address[pool]] += route.rate * share
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
