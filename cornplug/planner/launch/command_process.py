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
from cornplug.processes import ManagedProcess, responds_ok

_HOST_OF_URL: Final = re.compile(r"https?://([\w.-]+)")
READY_S: Final = 1800.0
"""Maximum time in seconds until a server is ready. A server may load hundreds of gigabytes from a slow
disk."""
_PROBE_TIMEOUT_S: Final = 60.0


class CommandProcess(ManagedProcess):
    """Process of one command. Raises ConfigError if the command's program is not installed."""

    def __init__(self, command: LaunchCommand, log: Path, *, ready_s: float = READY_S) -> None:
        self.command = command
        words = [*resolve_program(command.argv), *command.argv[1:]]
        environment = _environment(words, command.env)
        super().__init__(
            words,
            log=log,
            env=environment,
            name=name_of(command),
            ready_timeout_s=ready_s,
            ends_with_parent=True,
        )

    def is_ready(self) -> bool:
        """Return whether the process is ready. A process without a URL and a socket is always ready."""
        self.check_alive("before it was ready")
        if self.command.health is not None:
            return responds_ok(self.command.health)
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
            resolve_program(command.argv)


def resolve_program(argv: Sequence[str]) -> list[str]:
    """Return the program and arguments that replace a command's first word.

    Raises ConfigError if the program is not installed.
    """
    word = argv[0]
    if word == "cornplug":
        return [sys.executable, "-P", "-m", "cornplug.cli"]
    if word == "python" and "-m" in argv[1:2]:
        # With -P, Python does not import modules from the current folder.
        return [_find_python(argv[2].partition(".")[0]), "-P"]
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


def _find_python(module: str) -> str:
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
        done = subprocess.run([interpreter, "-P", "-c", look], timeout=_PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _environment(words: Sequence[str], extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command's process.

    PATH begins with the program's folder, which contains build tools. A proxy is used for downloads and
    users' media, but not for the hosts in the command's URLs.
    """
    path = f"{Path(words[0]).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    direct = {"localhost", "127.0.0.1", *_HOST_OF_URL.findall(" ".join(words))}
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    no_proxy = ",".join([*([given] if given else []), *sorted(direct)])
    proxies = {"no_proxy": no_proxy, "NO_PROXY": no_proxy}
    return {**os.environ, **proxies, "PATH": path, "PYTHONUNBUFFERED": "1", **extra}


EventHandler = Callable[[CommandProcess, str], None]
"""Function that is called with a process and "starting", "ready", or a description of the process's end."""


@dataclass(frozen=True)
class RestartPolicy:
    """Waiting times and limit for restarts of processes that ended."""

    max_restarts: int = 5
    """Maximum number of consecutive restarts. 0 means that processes are not restarted."""
    first_wait_s: float = 1.0
    """Wait in seconds before the first restart. The wait doubles with each further restart."""
    max_wait_s: float = 60.0
    """Maximum wait in seconds before a restart."""
    stable_s: float = 600.0
    """Time in seconds after which the restart count of a running process is reset."""


@dataclass
class _SupervisedProcess:
    process: CommandProcess
    restarts: int = 0
    restart_at_s: float | None = None
    """Time of the next start, or None while the process runs."""
    starting: bool = False
    has_failed: bool = False


class Supervisor:
    """Supervises the processes of a running launch.

    The main thread has to call `tick` several times per second.
    """

    def __init__(
        self, on_event: EventHandler, policy: RestartPolicy, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_event = on_event
        self._policy = policy
        self._clock = clock
        self._supervised: list[_SupervisedProcess] = []

    @property
    def processes(self) -> list[CommandProcess]:
        """All processes, in the order in which they were added."""
        return [one.process for one in self._supervised]

    @property
    def failed_processes(self) -> list[CommandProcess]:
        """Processes that exceeded the restart limit and will not be restarted."""
        return [one.process for one in self._supervised if one.has_failed]

    def is_starting(self, process: CommandProcess) -> bool:
        """Return whether a process is still starting or will be restarted."""
        return any(
            (one.starting or one.restart_at_s is not None) and not one.has_failed
            for one in self._supervised
            if one.process is process
        )

    def add(self, process: CommandProcess, *, starting: bool = False) -> None:
        """Supervise a process that was spawned. `starting` is True if it is not ready yet."""
        self._supervised.append(_SupervisedProcess(process, starting=starting))

    def remove(self, process: CommandProcess) -> None:
        """Stop supervising a process that the caller is about to stop."""
        self._supervised = [one for one in self._supervised if one.process is not process]

    def tick(self) -> None:
        """Detect processes that ended, and restart processes whose wait is over."""
        for one in list(self._supervised):
            if one.has_failed:
                continue
            if one.restart_at_s is not None:
                self._restart(one)
            else:
                self._check_process(one)

    def _check_process(self, supervised: _SupervisedProcess) -> None:
        try:
            supervised.process.check_alive()
            if supervised.starting and supervised.process.check_ready():
                supervised.starting = False
                self._on_event(supervised.process, "ready")
        except ProcessFailed as e:
            self._on_process_ended(supervised, e)
            return
        if supervised.restarts and self._clock() - supervised.process.started_s > self._policy.stable_s:
            supervised.restarts = 0

    def _on_process_ended(self, supervised: _SupervisedProcess, error: ProcessFailed) -> None:
        """Schedule the restart of a process that ended, or give up.

        The process's descendants are killed, because they may still use its port and its GPUs.
        """
        supervised.process.kill()
        supervised.starting = False
        what = str(error).removeprefix(f"{supervised.process.name} ").partition(";")[0]
        if supervised.restarts >= self._policy.max_restarts:
            supervised.has_failed = True
            self._on_event(
                supervised.process, f"{what}, and will not be restarted; {supervised.process.log_excerpt()}"
            )
            return
        wait_s = min(self._policy.first_wait_s * 2**supervised.restarts, self._policy.max_wait_s)
        supervised.restart_at_s = self._clock() + wait_s
        self._on_event(supervised.process, f"{what}; restarting in {wait_s:g} s")

    def _restart(self, supervised: _SupervisedProcess) -> None:
        assert supervised.restart_at_s is not None
        if self._clock() < supervised.restart_at_s:
            return
        supervised.restart_at_s = None
        supervised.restarts += 1
        supervised.starting = True
        supervised.process.spawn()
        self._on_event(supervised.process, "starting")
