"""Addresses of a deployment's processes, and how its engines reach each other and the encoder services.

The same deployment always has the same hosts, GPUs and ports. Hosts without a name are the variables
`${HOST_1}`, `${HOST_2}`, ... (see `command_lines.py`).

KV transfers from prefill to decode engines use buffers of the size that NIXL and LMCache need: the KV of the
longest prompt, 2·L·N·H·D·bytes, rounded up to 256 MiB. Pages have at least 128 tokens, because a transfer
needs one descriptor per page and layer. Latent attention (MLA) stores one vector per token and layer instead
of K and V of every head, and every rank holds all vectors.

An engine reaches the encoder services through one socket on its host, or by a list of URLs with weights
(rendezvous hashing). The weights are the planned flows from the services to the engine's group. A socket does
not need the network, so sockets are used if the services' loads stay close to the plan.

Messages between hosts are encrypted with a common secret, a file of 32 bytes of which each host has a copy.
Processes on the same host use the secret for authentication.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from cornplug.config import load
from cornplug.encoder_service.client.endpoints import is_loopback, url_name
from cornplug.errors import ConfigError
from cornplug.planner.inputs.field_types import is_single_host
from cornplug.planner.plan import Deployment, KVGeometry, ReplicaGroup
from cornplug.private_paths import is_default_secret, read_secret

ENGINE_PORT: Final = 8000
ENCODER_PORT: Final = 8750
BOOTSTRAP_PORT: Final = 8998
SIDE_PORT: Final = 5600
"""First port for NIXL's handshake."""
MASTER_PORT: Final = 29500
ROUTER_PORT: Final = 30000
ROUTER_METRICS_PORT: Final = 29000
MAX_SERVERS: Final = 750
"""Maximum number of servers per kind and host."""
Transfer = Literal["nixl", "mooncake", "lmcache"]
BUFFER_STEP: Final = 256 << 20
MIN_PAGE_TOKENS: Final = 128
LMCACHE_PORT: Final = 5655
LMCACHE_HTTP_PORT: Final = 8855
_VLLM_CONNECTOR: Final = {"nixl": "NixlConnector", "mooncake": "MooncakeConnector"}
_VLLM_ROLE: Final = {"P": "kv_producer", "D": "kv_consumer"}
_LLM_ENGINES: Final = ("vllm", "sglang")
_OVERLOAD_TOLERANCE: Final = 1.1
"""Factor by which the largest overload of a service may exceed the smallest possible overload if sockets are
used."""
ReplicaHost = tuple[str, str]
"""(name of a group, host of the rank that serves requests)."""
_SECRET_VARIABLE: Final = "CORNPLUG_STORE_SECRET_FILE"  # noqa: S105
_SECRET_PLACEHOLDER: Final = "${SECRET_FILE}"  # noqa: S105
SECRET_ENV: Final[Mapping[str, str]] = {_SECRET_VARIABLE: _SECRET_PLACEHOLDER}


@dataclass(frozen=True)
class ReplicaAddress:
    """Host, GPUs and ports of one process of a replica.

    A replica that spans several nodes has several processes, and rank 0 serves its requests.
    """

    group: ReplicaGroup
    replica: int
    rank: int
    ranks: int
    host: str
    devices: tuple[int, ...]
    """Numbers of the GPUs (or cores) on the host that the process uses."""
    port: int
    side_port: int
    bootstrap_port: int
    master: str
    """Address "host:port" at which the replica's ranks meet."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def hosts(deployment: Deployment) -> dict[tuple[str, int], str]:
    """Return the name of each host, by (node class, node number)."""
    names: dict[tuple[str, int], str] = {}
    for nodes in deployment.nodes:
        for number in range(nodes.count):
            named = nodes.hosts[number] if number < len(nodes.hosts) else ""
            if named:
                check_address(f"nodes[{nodes.name!r}].hosts", named)
            names[nodes.name, number] = named or f"${{HOST_{len(names) + 1}}}"
    return names


def check_address(field: str, host: str) -> None:
    """Raise ConfigError for `field` if `host` is not the address of one host."""
    if not is_single_host(host):
        raise ConfigError(
            field,
            f"{host!r} is not the address of one host",
            "Set the host name or IPv4 address that other hosts use to reach it.",
        )


def accepts_remote_hosts(bind_address: str) -> bool:
    """Return whether other hosts may reach a server that listens on this address."""
    return not is_loopback(bind_address)


def replica_addresses(deployment: Deployment) -> list[ReplicaAddress]:
    """Return the addresses of all processes of all groups, in the deployment's order.

    Raises ConfigError if replicas are not placed, or are placed on a node that does not exist.
    """
    where = hosts(deployment)
    sizes = {nodes.name: nodes.gpus for nodes in deployment.nodes}
    taken: Counter[tuple[str, int]] = Counter()
    found: list[ReplicaAddress] = []
    for group in deployment.groups:
        _check_placed(group, sizes)
        base = ENCODER_PORT if group.engine == "cornplug" else ENGINE_PORT
        for replica, (node, first) in enumerate(group.placement):
            spans = list(_process_gpus(group, node, first, sizes[group.nodes]))
            names = [_host(where, group, number) for number, _ in spans]
            port = group.ports[replica] if group.ports else base + taken[names[0], base]
            # The other ports are derived from this port, so that all ports are the same in each run.
            number = port - base if 0 <= port - base < MAX_SERVERS else taken[names[0], base]
            for rank, (_, devices) in enumerate(spans):
                taken[names[rank], base] += 1
                found.append(
                    ReplicaAddress(
                        group=group,
                        replica=replica,
                        rank=rank,
                        ranks=len(spans),
                        host=names[rank],
                        devices=tuple(devices),
                        port=port,
                        side_port=SIDE_PORT + 8 * number,
                        bootstrap_port=BOOTSTRAP_PORT + number,
                        master=f"{names[0]}:{MASTER_PORT + number}",
                    )
                )
    return found


def _check_placed(group: ReplicaGroup, sizes: dict[str, int]) -> None:
    if group.ports and len(group.ports) != group.replicas:
        raise ConfigError(
            f"groups[{group.name!r}].ports",
            f"{group.replicas} replicas, but {len(group.ports)} ports",
            "Write one port for each replica, or omit the ports.",
        )
    if len(group.placement) != group.replicas or any(len(place) != 2 for place in group.placement):
        raise ConfigError(
            f"groups[{group.name!r}].placement",
            f"{group.replicas} replicas, but {len(group.placement)} entries of the form [node, first GPU]",
            "Run `cornplug plan` again, or write one entry for each replica.",
        )
    if group.nodes not in sizes:
        raise ConfigError(
            f"groups[{group.name!r}].nodes",
            f"{group.nodes!r} is not one of the plan's nodes: {', '.join(sizes)}",
            "Use one of these names.",
        )


def _process_gpus(
    group: ReplicaGroup, node: int, first: int, gpus: int
) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield (node number, GPUs) for each process of a replica.

    A replica that needs more than one node uses all GPUs of its nodes.
    """
    needed = group.ranks
    if needed <= gpus:
        yield node, range(first, first + needed)
        return
    for number in range(-(-needed // gpus)):
        yield node + number, range(gpus)


def _host(names: dict[tuple[str, int], str], group: ReplicaGroup, number: int) -> str:
    if (group.nodes, number) not in names:
        raise ConfigError(
            f"groups[{group.name!r}].placement",
            f"node {number} of {group.nodes!r} is not in the plan",
            "Run `cornplug plan` again.",
        )
    return names[group.nodes, number]


def page_tokens(kv: KVGeometry) -> int:
    """Return the number of tokens in a KV page of an engine that transfers KV.

    MLA kernels support only pages of 64 tokens. These pages are large enough, because one vector is for all
    heads.
    """
    return 64 if kv.mla else MIN_PAGE_TOKENS


def prompt_bytes(kv: KVGeometry, *, tp: int = 1, pp: int = 1) -> int:
    """Return the size in bytes of the longest prompt's KV on one rank, rounded up to 128 tokens."""
    tokens = _round_up(kv.max_prompt_tokens, MIN_PAGE_TOKENS)
    layers = -(-kv.layers // pp)
    if kv.mla:
        return layers * tokens * kv.head_dim * kv.element_bytes
    heads = max(-(-kv.kv_heads // tp), 1)
    return 2 * layers * tokens * heads * kv.head_dim * kv.element_bytes


def buffer_bytes(kv: KVGeometry, *, tp: int = 1, pp: int = 1) -> int:
    """Return the size in bytes of a rank's transfer buffer: `prompt_bytes`, rounded up to 256 MiB."""
    return _round_up(prompt_bytes(kv, tp=tp, pp=pp), BUFFER_STEP)


def vllm_config(role: Literal["P", "D"], transfer: Transfer) -> dict[str, Any]:
    """Return vLLM's `--kv-transfer-config` for one side of a prefill-decode pair.

    With this configuration, KV is computed again if its transfer fails. With vLLM's default, the request
    would fail.
    """
    if transfer == "lmcache":
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": LMCACHE_PORT,
            },
        }
    return {
        "kv_connector": _VLLM_CONNECTOR[transfer],
        "kv_role": _VLLM_ROLE[role],
        "kv_load_failure_policy": "recompute",
    }


def combine_vllm_connectors(*connectors: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration that combines several connectors.

    vLLM loads a prefix from the first connector that has it, and saves to all connectors.
    """
    if len(connectors) == 1:
        return connectors[0]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def lmcache_server(gib: float) -> list[str]:
    """Return the command of LMCache's server, through which a host's engines transfer KV. `gib` is the size
    of the server's buffer in GiB."""
    return [
        "lmcache", "server", "--host", "127.0.0.1", "--port", str(LMCACHE_PORT),
        "--http-port", str(LMCACHE_HTTP_PORT), "--l1-size-gb", f"{gib:g}",
        "--chunk-size", "256", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
    ]  # fmt: skip


def sglang_staging(kv: KVGeometry, *, tp: int, pp: int) -> dict[str, str]:
    """Return SGLang's environment for a prefill-decode pair with different tensor-parallel degrees.

    SGLang gathers slices of heads in a buffer, because single heads are too small for efficient transfers.
    The result is empty for MLA, which has no heads to gather.
    """
    if kv.mla:
        return {}
    mib = buffer_bytes(kv, tp=tp, pp=pp) >> 20
    return {"SGLANG_DISAGG_STAGING_BUFFER": "true", "SGLANG_DISAGG_STAGING_POOL_SIZE_MB": str(mib)}


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


Flow = Sequence[tuple[ReplicaAddress, float]]
"""(service, planned rate of requests to it) for several services."""


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
