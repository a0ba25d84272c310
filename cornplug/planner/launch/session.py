"""Supervision of a running launch's processes, and the socket that receives the next deployment.

`cornplug launch --apply` sends the next deployment through the socket. The socket also prevents a second
launcher from running in the same run folder.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from cornplug.errors import ConfigError, CornplugError, ProcessFailed
from cornplug.local_socket import SocketClaim, encode_frame, foreign_peer_uid, receive_frame
from cornplug.planner.launch.command_lines import LaunchCommand, files, name_of
from cornplug.planner.launch.connections import Transfer
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
from cornplug.planner.launch.transition import RenderCommands, Transition, compute_transition
from cornplug.planner.plan import Deployment
from cornplug.private_paths import write_text_atomically

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
        steps = compute_transition(self.deployment, new, self._render, running=running)
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
