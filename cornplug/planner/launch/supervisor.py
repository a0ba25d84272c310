"""Restarts of launched processes that end unexpectedly, with exponential backoff and a limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cornplug.errors import ProcessFailed
from cornplug.planner.launch.command_process import CommandProcess

Event = Callable[[CommandProcess, str], None]
"""Called for each process with "starting", "ready", or a description of its end."""


@dataclass(frozen=True)
class RestartPolicy:
    """Restart policy. The count of restarts is reset after a process has run for `stable_s`."""

    limit: int = 5
    """Maximum consecutive restarts, 0 for none."""
    first_s: float = 1.0
    """Wait before the first restart. It doubles with each further restart."""
    longest_s: float = 60.0
    stable_s: float = 600.0


@dataclass
class _Watched:
    process: CommandProcess
    restarts: int = 0
    due_s: float | None = None
    """Time of the next start, None while the process runs."""
    starting: bool = False
    given_up: bool = False


class Supervisor:
    """The processes of a launch while it runs. `tick` has to be called every fraction of a second, in the
    main thread."""

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
        """Processes that exceeded the restart limit."""
        return [one.process for one in self._watched if one.given_up]

    def starting(self, process: CommandProcess) -> bool:
        """Return whether the process is still starting, and has not been given up."""
        return any(
            (one.starting or one.due_s is not None) and not one.given_up
            for one in self._watched
            if one.process is process
        )

    def add(self, process: CommandProcess, *, starting: bool = False) -> None:
        """Watch a process that was spawned. With `starting`, it is not ready yet."""
        self._watched.append(_Watched(process, starting=starting))

    def remove(self, process: CommandProcess) -> None:
        """Stop watching a process, which is about to be ended."""
        self._watched = [one for one in self._watched if one.process is not process]

    def tick(self) -> None:
        """Detect processes that ended, and restart those that are due."""
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
        """End the descendants too, because they hold its port and its GPUs."""
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
