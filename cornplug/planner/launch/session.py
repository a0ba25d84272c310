"""Supervision of a running launch's processes, and changes from one deployment to the next.

`cornplug launch --apply` sends the next deployment through a socket. The socket also prevents a second
launcher from running in the same run folder.

The steps of a change determine which processes continue, start, and stop. A process continues if its new
command differs only in `LOAD_DEPENDENT_FLAGS`. A replica on the devices of an old replica gets the old
replica's port, so that the commands can be equal. A new process starts at another port before old processes
stop, unless it needs their GPUs or has to use their address.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from cornplug.errors import ConfigError, CornplugError, ProcessFailed
from cornplug.local_socket import SocketClaim, encode_frame, foreign_peer_uid, receive_frame
from cornplug.planner.launch.command_lines import LaunchCommand, files, name_of
from cornplug.planner.launch.connections import (
    ENCODER_PORT,
    ENGINE_PORT,
    MAX_SERVERS,
    ReplicaAddress,
    Transfer,
    replica_addresses,
)
from cornplug.planner.launch.launcher import (
    CommandProcess,
    EventHandler,
    RestartPolicy,
    Supervisor,
    check_programs,
    spawn_process,
    start_batches,
    start_in_batches,
    stop_processes,
)
from cornplug.planner.plan import Deployment
from cornplug.private_paths import write_text_atomically

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


def transition(
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


CURRENT_PLAN_FILE: Final = "current-plan.json"
"""File in the run folder with the running deployment and the ports of its processes."""
_POLL_S: Final = 0.1
_ROUTES_FILE: Final = "routes.json"
_SOCKET_NAME: Final = "launch.sock"
_MAX_FRAME_BYTES: Final = 256 << 20
_READ_TIMEOUT_S: Final = 10.0
ApplyDeployment = Callable[[Deployment], None]
ReportLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Folder with the sockets, the logs and other files of a launch."""

    path: Path
    transfer: Transfer = "nixl"
    """Kind of KV transfer for which the files are written."""


@dataclass(frozen=True, slots=True)
class LaunchWaits:
    """Waiting times in seconds while a launch changes to another deployment."""

    ready_s: float
    """Maximum time until a new process serves requests."""
    settle_s: float = 10.0
    """Time for clients to reload a changed routes.json. Processes that are no longer in routes.json are
    stopped after this time."""


class LaunchSession:
    """Processes of a deployment that serve requests, until the caller stops them.

    Args:
        processes: list of the running processes. Each change updates it, so that the caller can stop them.
        render: function that returns this host's commands for a deployment.
    """

    def __init__(
        self,
        deployment: Deployment,
        processes: list[CommandProcess],
        *,
        render: RenderCommands,
        folder: RunFolder,
        on_event: EventHandler,
        policy: RestartPolicy,
        waits: LaunchWaits,
    ) -> None:
        self.deployment = deployment
        self.supervisor = Supervisor(on_event, policy)
        self._render = render
        self._folder = folder
        self._on_event = on_event
        self._waits = waits
        self._processes = processes
        for process in processes:
            self.supervisor.add(process)
        self._save(deployment)

    def watch(self, stop: threading.Event, on_tick: Callable[[], None] = lambda: None) -> bool:
        """Restart processes that end, until `stop` is set or all processes have exceeded the restart limit.

        `on_tick` is called between the checks. Returns False if a process exceeded the restart limit.
        """
        while not stop.wait(_POLL_S):
            self.supervisor.tick()
            if self.supervisor.failed_processes == self.supervisor.processes != []:
                return False
            on_tick()
        return not self.supervisor.failed_processes

    def apply(self, new: Deployment, stop: threading.Event) -> Transition:
        """Change to a new deployment, and return the steps.

        Raises ProcessFailed if a new process does not serve requests. If this happens before old processes
        are stopped, the old processes continue to run with the old routes. A process that replaces a stopped
        process is restarted like any other process.
        """
        for dead in self.supervisor.failed_processes:
            self.supervisor.remove(dead)
            self._processes.remove(dead)
        running = [process.command for process in self.supervisor.processes]
        steps = transition(self.deployment, new, self._render, running=running)
        check_programs([*steps.start_before, *steps.start_after])
        self._write_settings(steps.deployment)
        fresh = self._start_new(steps.start_before, stop)
        waiting = {c.url for c in steps.start_after}
        self._write_routes(steps.deployment, unready_urls=waiting)
        if steps.to_stop:
            self._wait(self._waits.settle_s, stop)
        ending = {id(command) for command in steps.to_stop}
        old = [p for p in self.supervisor.processes if id(p.command) in ending]
        for process in old:
            self.supervisor.remove(process)
        self._supervise(fresh)
        stop_processes(old)
        for process in old:
            self._processes.remove(process)
        self.deployment = steps.deployment
        self._save(steps.deployment)
        self._start_replacements(steps.start_after, stop)
        self._write_routes(steps.deployment, unready_urls=set())
        return steps

    def _start_replacements(self, commands: Sequence[LaunchCommand], stop: threading.Event) -> None:
        """Start the replacements of stopped processes, routers last, and wait until they serve requests.

        A process that fails is restarted like any other process. Raises ProcessFailed if a process exceeds
        the restart limit.
        """
        for batch in start_batches(commands):
            late = []
            for command in batch:
                process = spawn_process(command, self._log(command), self._waits.ready_s)
                self.supervisor.add(process, starting=True)
                self._processes.append(process)
                self._on_event(process, "starting")
                late.append(process)
            while any(map(self.supervisor.is_starting, late)):
                self._wait(_POLL_S, stop)
            if lost := [process.name for process in late if process in self.supervisor.failed_processes]:
                raise ProcessFailed(f"{', '.join(lost)} did not start; see the log")

    def _supervise(self, processes: Sequence[CommandProcess]) -> None:
        for process in processes:
            self.supervisor.add(process)
            self._processes.append(process)

    def _start_new(self, commands: Sequence[LaunchCommand], stop: threading.Event) -> list[CommandProcess]:
        """Start new processes, and return them when they serve requests.

        If a process fails, all new processes are stopped and ProcessFailed is raised.
        """
        started: list[CommandProcess] = []
        try:
            start_in_batches(
                commands,
                started,
                self._log,
                self._waits.ready_s,
                self._on_event,
                lambda s: self._wait(s, stop),
            )
        except BaseException:
            stop_processes(started)
            raise
        return started

    def _log(self, command: LaunchCommand) -> Path:
        """Return the log file for a command. While an old process uses the usual log file, the name of the
        new file contains the port."""
        used = {process.log for process in self.supervisor.processes}
        plain = self._folder.path / f"{name_of(command)}.log"
        return plain if plain not in used else self._folder.path / f"{name_of(command)}-{command.port}.log"

    def _wait(self, seconds: float, stop: threading.Event) -> bool:
        """Wait for this time, and supervise the running processes meanwhile. Always returns True, for use in
        a loop's condition.

        Raises ProcessFailed if `stop` is set, because the launch was stopped.
        """
        for _ in range(max(round(seconds / _POLL_S), 1)):
            if stop.wait(min(seconds, _POLL_S)):
                raise ProcessFailed("the launch was stopped before the new plan was ready")
            self.supervisor.tick()
        return True

    def _write_settings(self, deployment: Deployment) -> None:
        for name, text in files(deployment, transfer=self._folder.transfer).items():
            if name != _ROUTES_FILE:
                write_text_atomically(self._folder.path / name, text)

    def _write_routes(self, deployment: Deployment, *, unready_urls: set[str | None]) -> None:
        text = files(deployment, transfer=self._folder.transfer, unready_urls=unready_urls)[_ROUTES_FILE]
        write_text_atomically(self._folder.path / _ROUTES_FILE, text)

    def _save(self, deployment: Deployment) -> None:
        write_text_atomically(
            self._folder.path / CURRENT_PLAN_FILE, deployment.model_dump_json(indent=1) + "\n"
        )


class ControlSocket:
    """Socket on which a launcher accepts new deployments, one at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._claim = SocketClaim(run_dir / _SOCKET_NAME, setting="--run-dir")
        self._claim.listener.setblocking(False)
        self._peer: socket.socket | None = None

    def poll(self, apply: ApplyDeployment) -> None:
        """Apply the deployment of a client that has connected, if any, and send the result to it."""
        try:
            peer, _ = self._claim.listener.accept()
        except BlockingIOError:
            return
        with peer:
            peer.settimeout(_READ_TIMEOUT_S)
            try:
                if foreign_peer_uid(peer) is not None:
                    return
                deployment = Deployment.model_validate_json(receive_frame(peer, limit=_MAX_FRAME_BYTES))
            except (OSError, CornplugError, ValidationError):
                return  # The caller detects that the connection was closed.
            self._peer = peer
            try:
                apply(deployment)
                self._send({"status": 0})
            except CornplugError as e:
                self._send({"status": 1, "error": str(e)})
            finally:
                self._peer = None

    def send_progress(self, text: str) -> None:
        """Send a line about the progress to the caller whose deployment is being applied, if there is one."""
        self._send({"text": text})

    def close(self) -> None:
        """Close the socket, so that another launcher can run in the folder."""
        self._claim.close()

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message. Errors are ignored, because the deployment is applied even if the caller has
        disconnected."""
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.sendall(encode_frame(json.dumps(message).encode(), limit=_MAX_FRAME_BYTES))


@contextmanager
def control_socket(run_dir: Path) -> Iterator[ControlSocket]:
    """Open the socket of a launcher. Raises SocketInUse if another launcher runs in the folder."""
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = ControlSocket(run_dir)
    try:
        yield made
    finally:
        made.close()


def send_deployment(run_dir: Path, deployment: Deployment, report: ReportLine) -> str | None:
    """Send a deployment to the launcher that runs in a folder, and return the launcher's error, or None.

    `report` is called with each line about the progress. Raises ConfigError if no launcher runs in the
    folder.
    """
    path = run_dir / _SOCKET_NAME
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
        except OSError as e:
            raise ConfigError(
                "--apply",
                f"no launcher responds at {path} ({e.strerror})",
                "Start the first plan with `cornplug launch`, or set its folder with --run-dir.",
            ) from e
        if foreign_peer_uid(sock) is not None:
            raise ConfigError("--run-dir", f"{path} belongs to another user", "Use a folder of your own.")
        sock.sendall(encode_frame(deployment.model_dump_json().encode(), limit=_MAX_FRAME_BYTES))
        while True:
            try:
                message = json.loads(receive_frame(sock, limit=_MAX_FRAME_BYTES))
            except OSError:
                return "the launcher stopped, or rejected the plan; see its output"
            if "status" in message:
                return message.get("error") if message["status"] else None
            report(message["text"])
