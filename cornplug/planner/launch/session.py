"""Supervises the processes of a running launch, and changes them from one plan to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cornplug.errors import ProcessFailed
from cornplug.planner.launch.command_lines import LaunchCommand, files, name_of
from cornplug.planner.launch.command_process import CommandProcess, check_programs
from cornplug.planner.launch.kv_transfer import Transfer
from cornplug.planner.launch.launcher import end, pending_with_routers_last, spawned, start_in_batches
from cornplug.planner.launch.supervisor import Event, RestartPolicy, Supervisor
from cornplug.planner.launch.transition import PlanTransition, Render, transition
from cornplug.planner.plan import Plan
from cornplug.private_paths import replace_text

CURRENT: Final = "current-plan.json"
"""File in the run folder with the running plan and the ports of its processes."""
_POLL_S: Final = 0.1
_ROUTES: Final = "routes.json"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Folder with the sockets, the logs and the plan's files of a launch."""

    path: Path
    transfer: Transfer = "nixl"
    """Kind of KV transfer for which the plan's files are written."""


@dataclass(frozen=True, slots=True)
class LaunchWaits:
    """Waiting times in seconds while a launch changes to another plan."""

    ready_s: float
    """Maximum time until a new process serves requests."""
    settle_s: float = 10.0
    """Time for clients to reload a changed routes.json. Processes that it no longer contains are stopped
    after this time."""


class LaunchSession:
    """Processes of a plan that serve requests, until the caller stops them with `end`.

    Args:
        processes: list of the running processes. Each change updates it, so that the caller can stop them.
        render: function that returns this host's commands for a plan.
    """

    def __init__(
        self,
        plan: Plan,
        processes: list[CommandProcess],
        *,
        render: Render,
        folder: RunFolder,
        event: Event,
        policy: RestartPolicy,
        waits: LaunchWaits,
    ) -> None:
        self.plan = plan
        self.supervisor = Supervisor(event, policy)
        self._render = render
        self._folder = folder
        self._event = event
        self._waits = waits
        self._processes = processes
        for process in processes:
            self.supervisor.add(process)
        self._save(plan)

    def watch(self, stop: threading.Event, each: Callable[[], None] = lambda: None) -> bool:
        """Restart processes that end, until `stop` is set or no process will be restarted anymore.

        `each` is called between the checks. Returns False if a process exceeded the restart limit.
        """
        while not stop.wait(_POLL_S):
            self.supervisor.tick()
            if self.supervisor.given_up == self.supervisor.processes != []:
                return False
            each()
        return not self.supervisor.given_up

    def apply(self, new: Plan, stop: threading.Event) -> PlanTransition:
        """Change to a new plan, and return the steps.

        Raises ProcessFailed if a new process does not serve requests. If this happens before old processes
        are stopped, the old processes continue to run with the old routes. A process that replaces a stopped
        process is restarted like any other process.
        """
        for dead in self.supervisor.given_up:
            self.supervisor.remove(dead)
            self._processes.remove(dead)
        running = [process.command for process in self.supervisor.processes]
        steps = transition(self.plan, new, self._render, running=running)
        check_programs([*steps.first, *steps.in_turn])
        self._write_settings(steps.plan)
        fresh = self._started(steps.first, stop)
        waiting = {c.url for c in steps.in_turn}
        self._write_routes(steps.plan, without=waiting)
        if steps.stopped:
            self._wait(self._waits.settle_s, stop)
        ending = {id(command) for command in steps.stopped}
        old = [p for p in self.supervisor.processes if id(p.command) in ending]
        for process in old:
            self.supervisor.remove(process)
        self._add(fresh)
        end(old)
        for process in old:
            self._processes.remove(process)
        self.plan = steps.plan
        self._save(steps.plan)
        self._start_in_turn(steps.in_turn, stop)
        self._write_routes(steps.plan, without=set())
        return steps

    def _start_in_turn(self, commands: Sequence[LaunchCommand], stop: threading.Event) -> None:
        """Start commands that replace stopped processes, and wait until their processes serve requests.

        A process that fails is restarted like any other process. Raises ProcessFailed if a process exceeds
        the restart limit.
        """
        for batch in pending_with_routers_last(commands):
            late = []
            for command in batch:
                process = spawned(command, self._log(command), self._waits.ready_s)
                self.supervisor.add(process, starting=True)
                self._processes.append(process)
                self._event(process, "starting")
                late.append(process)
            while any(map(self.supervisor.starting, late)):
                self._wait(_POLL_S, stop)
            if lost := [process.name for process in late if process in self.supervisor.given_up]:
                raise ProcessFailed(f"{', '.join(lost)} did not start; see the log")

    def _add(self, processes: Sequence[CommandProcess]) -> None:
        for process in processes:
            self.supervisor.add(process)
            self._processes.append(process)

    def _started(self, commands: Sequence[LaunchCommand], stop: threading.Event) -> list[CommandProcess]:
        """Start new processes, and return them when they serve requests.

        If a process fails, all new processes are stopped and ProcessFailed is raised.
        """
        started: list[CommandProcess] = []
        try:
            start_in_batches(
                commands, started, self._log, self._waits.ready_s, self._event, lambda s: self._wait(s, stop)
            )
        except BaseException:
            end(started)
            raise
        return started

    def _log(self, command: LaunchCommand) -> Path:
        """Return the log file for a command. It has another name while an old process uses the usual log
        file."""
        used = {process.log for process in self.supervisor.processes}
        plain = self._folder.path / f"{name_of(command)}.log"
        return plain if plain not in used else self._folder.path / f"{name_of(command)}-{command.port}.log"

    def _wait(self, seconds: float, stop: threading.Event) -> bool:
        """Wait, supervise the running processes in the meantime, and return True.

        Raises ProcessFailed if `stop` is set.
        """
        for _ in range(max(round(seconds / _POLL_S), 1)):
            if stop.wait(min(seconds, _POLL_S)):
                raise ProcessFailed("the launch was stopped before the new plan was ready")
            self.supervisor.tick()
        return True

    def _write_settings(self, plan: Plan) -> None:
        for name, text in files(plan, transfer=self._folder.transfer).items():
            if name != _ROUTES:
                replace_text(self._folder.path / name, text)

    def _write_routes(self, plan: Plan, *, without: set[str | None]) -> None:
        text = files(plan, transfer=self._folder.transfer, without=without)[_ROUTES]
        replace_text(self._folder.path / _ROUTES, text)

    def _save(self, plan: Plan) -> None:
        replace_text(self._folder.path / CURRENT, plan.model_dump_json(indent=1) + "\n")
