"""Restarts launched processes that end unexpectedly, with exponential backoff and a limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cornplug.errors import ProcessFailed
from cornplug.planner.launch.command_process import CommandProcess

Event = Callable[[CommandProcess, str], None]
"""Function that is called with a process and "starting", "ready", or a description of the process's end."""


@dataclass(frozen=True)
class RestartPolicy:
    """When and how often processes are restarted."""

    limit: int = 5
    """Maximum number of consecutive restarts. 0 means that processes are not restarted."""
    first_s: float = 1.0
    """Wait in seconds before the first restart. The wait doubles with each further restart."""
    longest_s: float = 60.0
    """Maximum wait in seconds before a restart."""
    stable_s: float = 600.0
    """Time in seconds after which the number of a running process's restarts is reset."""


@dataclass
class _Watched:
    process: CommandProcess
    restarts: int = 0
    due_s: float | None = None
    """Time of the next start, or None while the process runs."""
    starting: bool = False
    given_up: bool = False


class Supervisor:
    """Supervises the processes of a running launch.

    The main thread has to call `tick` several times per second.
    """

    def __init__(
        self, event: Event, policy: RestartPolicy, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._event = event
        self._policy = policy
        self._clock = clock
        self._watched: list[_Watched] = []

    @property
    def processes(self) -> list[CommandProcess]:
        """All processes, in the order in which they were added."""
        return [one.process for one in self._watched]

    @property
    def given_up(self) -> list[CommandProcess]:
        """Processes that exceeded the restart limit and will not be restarted."""
        return [one.process for one in self._watched if one.given_up]

    def starting(self, process: CommandProcess) -> bool:
        """Return whether a process is still starting or will be restarted."""
        return any(
            (one.starting or one.due_s is not None) and not one.given_up
            for one in self._watched
            if one.process is process
        )

    def add(self, process: CommandProcess, *, starting: bool = False) -> None:
        """Supervise a process that was spawned. `starting` is True if it is not ready yet."""
        self._watched.append(_Watched(process, starting=starting))

    def remove(self, process: CommandProcess) -> None:
        """Stop supervising a process that the caller is about to stop."""
        self._watched = [one for one in self._watched if one.process is not process]

    def tick(self) -> None:
        """Detect processes that ended, and restart processes whose wait is over."""
        for one in list(self._watched):
            if one.given_up:
                continue
            if one.due_s is not None:
                self._restart(one)
            else:
                self._look_at(one)

    def _look_at(self, one: _Watched) -> None:
        try:
            one.process.check()
            if one.starting and one.process.serves():
                one.starting = False
                self._event(one.process, "ready")
        except ProcessFailed as e:
            self._ended(one, e)
            return
        if one.restarts and self._clock() - one.process.began_s > self._policy.stable_s:
            one.restarts = 0

    def _ended(self, one: _Watched, error: ProcessFailed) -> None:
        """Schedule the restart of a process that ended, or give up.

        The process's descendants are killed, because they may still use its port and its GPUs.
        """
        one.process.kill()
        one.starting = False
        what = str(error).removeprefix(f"{one.process.name} ").partition(";")[0]
        if one.restarts >= self._policy.limit:
            one.given_up = True
            self._event(one.process, f"{what}, and will not be restarted; {one.process.log_end()}")
            return
        wait_s = min(self._policy.first_s * 2**one.restarts, self._policy.longest_s)
        one.due_s = self._clock() + wait_s
        self._event(one.process, f"{what}; restarting in {wait_s:g} s")

    def _restart(self, one: _Watched) -> None:
        assert one.due_s is not None
        if self._clock() < one.due_s:
            return
        one.due_s = None
        one.restarts += 1
        one.starting = True
        one.process.spawn()
        self._event(one.process, "starting")
