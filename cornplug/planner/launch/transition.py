"""Steps of a change from one deployment to the next.

The steps determine which processes continue, start, and stop. A process continues if its new command differs
only in `LOAD_DEPENDENT_FLAGS`. A replica on the devices of an old replica gets the old replica's port, so
that the commands can be equal. A new process starts at another port before old processes stop, unless it
needs their GPUs or has to use their address.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cornplug.planner.launch.command_lines import LaunchCommand
from cornplug.planner.launch.connections import (
    ENCODER_PORT,
    ENGINE_PORT,
    MAX_SERVERS,
    ReplicaAddress,
    replica_addresses,
)
from cornplug.planner.plan import Deployment

RenderCommands = Callable[[Deployment], list[LaunchCommand]]
"""Function that returns the commands of one host of a deployment."""
LOAD_DEPENDENT_FLAGS: Final = (
    "--shutdown-timeout",
    "--max-num-queued-tokens",
    "--max-queued-requests",
    "--size",
)
"""Flags that depend on the simulated load and differ slightly in every plan. A process that continues keeps
its old values."""
_ROUTER_PORT_STEP: Final = 100
"""Offset between the two sets of router ports, which alternate between deployments."""


@dataclass(frozen=True)
class Transition:
    """Steps of a transition. Start `start_before`, then stop `to_stop`, then start `start_after`."""

    deployment: Deployment
    """New deployment, with the ports of its processes."""
    kept: tuple[tuple[LaunchCommand, LaunchCommand], ...]
    """Old and new command of each process that continues to run."""
    start_before: tuple[LaunchCommand, ...]
    """New processes that can start while the old processes run."""
    to_stop: tuple[LaunchCommand, ...]
    start_after: tuple[LaunchCommand, ...]
    """New processes that need the GPUs or the address of old processes."""

    @property
    def outdated_flags(self) -> dict[str, list[str]]:
        """Flags ("flag value") of kept processes whose value has changed, by group and replica."""
        found = {}
        for old, new in self.kept:
            differing = [
                f"{flag} {value}"
                for flag, value in _load_dependent_flags(new).items()
                if _load_dependent_flags(old).get(flag) != value
            ]
            if differing:
                found[f"{old.group}-{old.replica}"] = differing
        return found


def compute_transition(
    old: Deployment,
    new: Deployment,
    render: RenderCommands,
    *,
    running: Sequence[LaunchCommand] | None = None,
) -> Transition:
    """Return the steps from the running deployment `old` to the deployment `new`.

    `running` contains the commands of the running processes. By default, they are the commands of `old`.
    """
    running = [command for command in render(old) if command.argv] if running is None else running
    new = _with_ports_of(old, new)
    for _ in range(len(new.groups) + 2):
        wanted = [command for command in render(new) if command.argv]
        kept = _match_commands(running, wanted)
        moved = _avoid_old_ports(new, kept, running, wanted, old_ports=_ports(old))
        if moved == new:
            break
        new = moved
    staying = {id(o) for o, _ in kept}
    known = {id(n) for _, n in kept}
    stopped = [c for c in running if id(c) not in staying]
    started = [c for c in wanted if id(c) not in known]
    waiting = {id(c) for c in started if _must_wait(c, stopped)}
    return Transition(
        deployment=new,
        kept=tuple(kept),
        start_before=tuple(c for c in started if id(c) not in waiting),
        to_stop=tuple(stopped),
        start_after=tuple(c for c in started if id(c) in waiting),
    )


def _match_commands(
    running: Sequence[LaunchCommand], new_commands: Sequence[LaunchCommand]
) -> list[tuple[LaunchCommand, LaunchCommand]]:
    left = list(running)
    found = []
    for new in new_commands:
        old = next((one for one in left if _identity(one) == _identity(new)), None)
        if old is not None:
            left.remove(old)
            found.append((old, new))
    return found


def _identity(command: LaunchCommand) -> tuple[object, ...]:
    words = list(command.argv)
    for flag in LOAD_DEPENDENT_FLAGS:
        if flag in words:
            at = words.index(flag)
            del words[at : at + 2]
    env = tuple(sorted(command.env.items()))
    return command.kind, command.host, tuple(words), env, command.cores, command.settings


def _load_dependent_flags(command: LaunchCommand) -> dict[str, str]:
    words = command.argv
    return {flag: words[words.index(flag) + 1] for flag in LOAD_DEPENDENT_FLAGS if flag in words}


def _must_wait(command: LaunchCommand, stopped: Sequence[LaunchCommand]) -> bool:
    """Return whether a process can start only after some of these processes have ended."""
    for old in stopped:
        if old.host != command.host:
            continue
        if command.port is not None and command.port == old.port:
            return True
        if command.socket is not None and command.socket == old.socket:
            return True
        if set(command.gpus) & set(old.gpus) and command.share + old.share > 1:
            return True
    return False


def _ports(deployment: Deployment) -> set[int]:
    return {site.port for site in replica_addresses(deployment)}


def _with_ports_of(old: Deployment, new: Deployment) -> Deployment:
    """Return the new deployment with ports for its replicas.

    Replicas on the devices of an old replica get its port, and other replicas get unused ports.
    """
    before: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for site in replica_addresses(old):
        if site.rank == 0:
            before[_device_key(site)].append(site.port)
    taken: set[int] = set()
    ports: dict[tuple[str, int], int] = {}
    seats = [site for site in replica_addresses(new) if site.rank == 0]
    for site in seats:
        left = [port for port in before[_device_key(site)] if port not in taken]
        if site.group.fixed_ports:
            ports[site.group.name, site.replica] = site.port
        elif left:
            ports[site.group.name, site.replica] = left[0]
        else:
            continue
        taken.add(ports[site.group.name, site.replica])
    for site in seats:
        if (site.group.name, site.replica) not in ports:
            port = _free_port(site, {*taken, *_ports(old)})
            ports[site.group.name, site.replica] = port
            taken.add(port)
    return _set_ports(new.model_copy(update={"router_ports": old.router_ports}), ports)


def _avoid_old_ports(
    new: Deployment,
    kept: Sequence[tuple[LaunchCommand, LaunchCommand]],
    running: Sequence[LaunchCommand],
    new_commands: Sequence[LaunchCommand],
    *,
    old_ports: Collection[int],
) -> Deployment:
    """Return the deployment with other ports for replicas that can start before old processes stop.

    These replicas would otherwise have the port of an old process.
    """
    staying = {id(old) for old, _ in kept}
    known = {id(one) for _, one in kept}
    stopped = [command for command in running if id(command) not in staying]
    ports = {(site.group.name, site.replica): site.port for site in replica_addresses(new) if site.rank == 0}
    placed = {(site.group.name, site.port): site for site in replica_addresses(new) if site.rank == 0}
    taken = {*old_ports, *ports.values()}
    for command in new_commands:
        site = placed.get((command.group, command.port or 0))
        if id(command) in known or site is None or site.group.fixed_ports or command.port not in old_ports:
            continue
        if command.kind == "encoder" and not _has_towerless_engine(new_commands):
            continue  # The port stays, so engines need no restart. They encode images in the meantime.
        if any(set(command.gpus) & set(o.gpus) and command.share + o.share > 1 for o in stopped):
            continue
        port = _free_port(site, taken)
        ports[site.group.name, site.replica] = port
        taken.add(port)
    moved = _set_ports(new, ports)
    routers = [c for c in new_commands if c.kind == "router" and id(c) not in known]
    if any(c.port in {o.port for o in stopped} for c in routers):
        base = 0 if new.router_ports else _ROUTER_PORT_STEP
        moved = moved.model_copy(update={"router_ports": base})
    return moved


def _has_towerless_engine(commands: Sequence[LaunchCommand]) -> bool:
    """Return whether any engine has no tower, so that its encoder service must always be available."""
    return any({"--language-only", "--cornplug-tower"} & {*command.argv} for command in commands)


def _device_key(site: ReplicaAddress) -> tuple[object, ...]:
    group = site.group
    return group.engine, group.model, site.host, group.gpu, site.devices


def _free_port(site: ReplicaAddress, used_ports: Collection[int]) -> int:
    """Return the replica's own port if it is not used, or else the next unused port for its kind."""
    if site.port not in used_ports:
        return site.port
    base = ENCODER_PORT if site.group.engine == "cornplug" else ENGINE_PORT
    start = base if base <= site.port < base + MAX_SERVERS else site.port
    return next(port for port in range(start, 65536) if port not in used_ports)


def _set_ports(deployment: Deployment, ports: Mapping[tuple[str, int], int]) -> Deployment:
    groups = [
        group.model_copy(update={"ports": [ports[group.name, r] for r in range(group.replicas)]})
        for group in deployment.groups
    ]
    return deployment.model_copy(update={"groups": groups})
