"""Processes of a deployment's commands on this host, which are restarted if they end unexpectedly.

A process runs the program that is installed in this environment. Restarts have exponential backoff and a
limit.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cornplug.errors import ConfigError, ProcessFailed
from cornplug.planner.launch.command_lines import LaunchCommand, name_of
from cornplug.processes import ManagedProcess, answers

_HOST_OF_URL: Final = re.compile(r"https?://([\w.-]+)")
READY_S: Final = 1800.0
"""Maximum time in seconds until a server is ready. A server may load hundreds of gigabytes from a slow
disk."""
_LOOK_S: Final = 60.0


class CommandProcess(ManagedProcess):
    """Process of one command. Raises ConfigError if the command's program is not installed."""

    def __init__(self, command: LaunchCommand, log: Path, *, ready_s: float = READY_S) -> None:
        self.command = command
        words = [*program(command.argv), *command.argv[1:]]
        environment = _environment(words, command.env)
        super().__init__(
            words, log=log, env=environment, name=name_of(command), ready_s=ready_s, ends_with_parent=True
        )

    def ready(self) -> bool:
        """Return whether the process is ready. A process without a URL and a socket is always ready."""
        self.check("before it was ready")
        if self.command.health is not None:
            return answers(self.command.health)
        return self.command.socket is None or Path(self.command.socket).is_socket()

    def spawn(self) -> None:
        """Start the process on its cores. Raises ConfigError if the cores are not available."""
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".log.1"))
        super().spawn()
        if self.command.cores:
            self._pin(self.command.cores)

    def _pin(self, cores: Sequence[int]) -> None:
        try:
            os.sched_setaffinity(self.pid, cores)
        except OSError as e:
            self.kill()
            allowed = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
            raise ConfigError(
                f"groups[{self.command.group!r}].placement",
                f"cores {list(cores)} are not available to this process ({e.strerror}). It can use {allowed}",
                "Plan for these cores.",
            ) from e


def check_programs(commands: Iterable[LaunchCommand]) -> None:
    """Raise ConfigError if the program of a command is not installed.

    Call this before any process is started.
    """
    for command in commands:
        if command.argv:
            program(command.argv)


def program(argv: Sequence[str]) -> list[str]:
    """Return the program and arguments that replace a command's first word.

    Raises ConfigError if the program is not installed.
    """
    word = argv[0]
    if word == "cornplug":
        return [sys.executable, "-P", "-m", "cornplug.cli"]
    if word == "python" and "-m" in argv[1:2]:
        # With -P, Python does not import modules from the current folder.
        return [_python_with(argv[2].partition(".")[0]), "-P"]
    variable = f"CORNPLUG_{word.upper().replace('-', '_')}"
    beside = Path(sys.executable).with_name(word)
    named = os.environ.get(variable)
    if named:
        if shutil.which(named) is None:
            raise ConfigError(
                variable, f"{named} is not an executable for {word}", "Set the path of an executable."
            )
        return [named]
    found = shutil.which(word) or (str(beside) if beside.exists() else None)
    if found is None:
        raise ConfigError(word, "not installed", f"Run: pip install {word}, or set its path in {variable}.")
    return [found]


def _python_with(module: str) -> str:
    """Return the Python interpreter that runs a module of SGLang or its router.

    This is CORNPLUG_SGLANG_PYTHON, or this process's interpreter. Raises ConfigError if the interpreter does
    not have the module.
    """
    named = os.environ.get("CORNPLUG_SGLANG_PYTHON") or sys.executable
    if not _has_module(named, module):
        raise ConfigError(
            module,
            f"not installed in the environment of {named}",
            "Set CORNPLUG_SGLANG_PYTHON to the interpreter of its environment.",
        )
    return named


@functools.cache
def _has_module(interpreter: str, module: str) -> bool:
    """Return whether an interpreter can import a module. False if the interpreter cannot be run."""
    if interpreter == sys.executable:
        return importlib.util.find_spec(module) is not None
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        done = subprocess.run([interpreter, "-P", "-c", look], timeout=_LOOK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _environment(words: Sequence[str], added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command's process.

    PATH begins with the program's folder, which contains build tools. A proxy is used for downloads and
    users' media, but not for the hosts in the command's URLs.
    """
    path = f"{Path(words[0]).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    direct = {"localhost", "127.0.0.1", *_HOST_OF_URL.findall(" ".join(words))}
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    no_proxy = ",".join([*([given] if given else []), *sorted(direct)])
    proxies = {"no_proxy": no_proxy, "NO_PROXY": no_proxy}
    return {**os.environ, **proxies, "PATH": path, "PYTHONUNBUFFERED": "1", **added}


Event = Callable[[CommandProcess, str], None]
"""Function that is called with a process and "starting", "ready", or a description of the process's end."""


@dataclass(frozen=True)
class RestartPolicy:
    """Waiting times and limit for restarts of processes that ended."""

    limit: int = 5
    """Maximum number of consecutive restarts. 0 means that processes are not restarted."""
    first_s: float = 1.0
    """Wait in seconds before the first restart. The wait doubles with each further restart."""
    longest_s: float = 60.0
    """Maximum wait in seconds before a restart."""
    stable_s: float = 600.0
    """Time in seconds after which the restart count of a running process is reset."""


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
