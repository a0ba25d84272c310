"""Host, GPUs and ports of each process of a deployment. The same deployment always has the same addresses.

Hosts without a name are the variables `${HOST_1}`, `${HOST_2}`, ... (see `command_lines.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cornplug.encoder_service.client.endpoints import is_loopback
from cornplug.errors import ConfigError
from cornplug.planner.inputs.field_types import is_single_host
from cornplug.planner.plan import Deployment, ReplicaGroup

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
