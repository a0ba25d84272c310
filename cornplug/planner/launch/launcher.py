"""Launcher, which starts a deployment's processes on this host, waits until they are ready, and stops them.

A process runs the program that is installed in this environment. A process that ends unexpectedly is
restarted, with exponential backoff and a limit. From Python:

    deployment = Deployment.load(Path("plan.json"))
    run_dir = Path("/tmp/x")
    commands = local_commands(deployment, run_dir=run_dir)
    with run_commands(deployment, commands, run_dir=run_dir) as processes:
        ...
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cornplug.config import load
from cornplug.errors import ConfigError, ProcessFailed
from cornplug.planner.launch.command_lines import LaunchCommand, commands, files, name_of, unresolved_hosts
from cornplug.planner.launch.connections import (
    Transfer,
    accepts_remote_hosts,
    check_address,
    check_secret_readable,
    check_secret_set,
)
from cornplug.planner.launch.connections import hosts as addresses_of
from cornplug.planner.plan import Deployment
from cornplug.processes import GRACE_S, ManagedProcess, responds_ok

_HOST_OF_URL: Final = re.compile(r"https?://([\w.-]+)")
READY_S: Final = 1800.0
"""Maximum time in seconds until a server is ready. A server may load hundreds of gigabytes from a slow
disk."""
_PROBE_TIMEOUT_S: Final = 60.0
_STOP_ORDER: Final = ("router", "external", "engine", "encoder", "store")
"""Order in which processes are stopped: clients before their servers."""
_POLL_S: Final = 0.2


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


@contextmanager
def run_commands(
    deployment: Deployment,
    to_start: Sequence[LaunchCommand],
    *,
    run_dir: Path,
    transfer: Transfer = "nixl",
    ready_s: float = READY_S,
    on_event: EventHandler = lambda process, what: None,
    stopping: threading.Event | None = None,
) -> Iterator[list[CommandProcess]]:
    """Run commands of a deployment, and yield the processes when all of them serve requests.

    On exit, also after an error, clients are stopped before their servers.

    Args:
        to_start: commands from `local_commands`.
        run_dir: folder for sockets, logs and the deployment's files. It is not accessible to other users.
        ready_s: maximum time in seconds until one process is ready.
        on_event: called for each process with "starting" and "ready".
        stopping: event that the caller sets to abort the start.

    Raises ProcessFailed with the end of a failed process's log, and ConfigError if a program or the common
    secret is missing.
    """
    check_secret_readable(command.env for command in to_start)
    check_programs(to_start)
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, text in files(deployment, transfer=transfer).items():
        (run_dir / name).write_text(text)
    started: list[CommandProcess] = []
    stop = stopping or threading.Event()
    try:
        start_in_batches(
            to_start,
            started,
            lambda command: run_dir / f"{name_of(command)}.log",
            ready_s,
            on_event,
            lambda seconds: not stop.wait(seconds),
        )
        yield started
    finally:
        stop_processes(started)


@dataclass(frozen=True, slots=True)
class CommandSelection:
    """Selection of a deployment's commands."""

    host: str | None = None
    """Name of the host whose commands are selected (HOST_n for a host without a name), or None if there is
    only one host."""
    routers: bool = False
    """Whether the routers are selected instead of a host's commands."""
    groups: Sequence[str] = ()
    """Groups whose commands are selected, in addition to the store. Empty for all groups."""


ALL_COMMANDS: Final = CommandSelection()


def local_commands(
    deployment: Deployment,
    selection: CommandSelection = ALL_COMMANDS,
    *,
    run_dir: Path,
    addresses: Mapping[str, str] | None = None,
    secret_file: Path | None = None,
    transfer: Transfer = "nixl",
) -> list[LaunchCommand]:
    """Return the commands of one host of a deployment, with every variable substituted.

    `addresses` maps HOST_n to addresses. Raises ConfigError if a host, group, address or secret is missing or
    does not exist.
    """
    only = selection.groups
    chosen = _select_commands(
        deployment, commands(deployment, transfer=transfer), selection.host, routers=selection.routers
    )
    names = {command.group for command in chosen}
    if unknown := set(only) - names:
        raise ConfigError(
            "--only", f"unknown groups: {', '.join(sorted(unknown))}", f"Known: {', '.join(sorted(names))}."
        )
    values = {"RUN_DIR": str(run_dir.absolute()), "PLAN_DIR": str(run_dir.absolute())}
    values |= {"HOST_1": "127.0.0.1"} if _has_one_host(deployment) else {}
    for name, address in (addresses or {}).items():
        check_address(f"--address: {name}={address}", address)
    values |= addresses or {}
    values |= {"SECRET_FILE": str(secret_file.absolute())} if secret_file else {}
    found = [c.substitute(values) for c in chosen if not only or c.group in only or c.kind == "store"]
    if missing := sorted({name for command in found for name in unresolved_hosts(command)}):
        remedy = " ".join(f"--address {name}=ADDRESS" for name in missing)
        raise ConfigError("--address", f"missing for {', '.join(missing)} of the plan", f"Add {remedy}.")
    check_secret_set(command.env for command in found)
    _check_callers(found)
    return found


def _check_callers(found: Sequence[LaunchCommand]) -> None:
    """Raise ConfigError if other hosts could reach an encoder service, although the settings neither require
    keys nor allow requests without keys."""
    for command in found:
        if command.kind != "encoder" or {"--allow-anonymous", "--require-key"} & {*command.argv}:
            continue
        bound = command.argv[command.argv.index("--host") + 1]
        # Ignore the command's own CORNPLUG_CONFIG, because it is qos.toml, which is not written yet.
        own_file = {"CORNPLUG_CONFIG": ""} if "CORNPLUG_CONFIG" in command.env else {}
        settings = load(environ={**os.environ, **command.env, **own_file}).encoder
        if accepts_remote_hosts(bound) and not (settings.require_key or settings.allow_anonymous):
            raise ConfigError(
                "launch.allow_anonymous",
                f"other hosts can reach {name_of(command)} ({bound} of {command.host}) without a key",
                "On a private network, set it to true in the input, or set "
                "CORNPLUG_ENCODER_ALLOW_ANONYMOUS=true here. Otherwise require keys with "
                "CORNPLUG_ENCODER_REQUIRE_KEY.",
            )


def _has_one_host(deployment: Deployment) -> bool:
    return sum(nodes.count for nodes in deployment.nodes) == 1


def _select_commands(
    deployment: Deployment, all_commands: Sequence[LaunchCommand], host: str | None, *, routers: bool
) -> list[LaunchCommand]:
    used = {command.host for command in all_commands}
    hosts = [name.strip("${}") for name in dict.fromkeys(addresses_of(deployment).values()) if name in used]
    if routers:
        return [c for c in all_commands if c.kind == "router"]
    if host is None and len(hosts) <= 1:
        return list(all_commands)
    if host not in hosts:
        problem = (
            f"{host!r} is not a host of the plan"
            if host
            else f"the plan {deployment.name!r} needs {len(hosts)} hosts"
        )
        raise ConfigError(
            "--host",
            problem,
            f"Run `cornplug launch plan.json --host HOST` on each of {', '.join(hosts)}. When all are ready, "
            "run `cornplug launch plan.json --routers`.",
        )
    several = len(hosts) > 1
    return [c for c in all_commands if c.host.strip("${}") == host and not (several and c.kind == "router")]


def stop_processes(processes: Sequence[CommandProcess]) -> None:
    """Stop the processes. All processes of one kind stop together, first the routers and last the stores."""
    for kind in _STOP_ORDER:
        these = [p for p in processes if p.command.kind == kind]
        began_s = time.monotonic()
        for process in these:
            process.terminate()
        for process in these:
            process.wait_until_ended(began_s + _drain_s(process.command) + GRACE_S - time.monotonic())


def start_in_batches(
    commands: Sequence[LaunchCommand],
    started: list[CommandProcess],
    log_path: Callable[[LaunchCommand], Path],
    ready_s: float,
    on_event: EventHandler,
    pause: Callable[[float], bool],
) -> None:
    """Start commands in batches, and add their processes to `started`.

    A batch is started when the previous batch serves requests.

    Args:
        log_path: function that returns the log file for a command.
        ready_s: maximum time in seconds until one process is ready.
        on_event: called for each process with "starting" and "ready".
        pause: function that waits for a number of seconds, and returns False to abort the start.
    """
    for batch in start_batches(commands):
        loading = []
        for command in batch:
            if not pause(0):
                return
            process = spawn_process(command, log_path(command), ready_s)
            started.append(process)
            loading.append(process)
            on_event(process, "starting")
        while True:
            for process in [p for p in loading if p.check_ready()]:
                loading.remove(process)
                on_event(process, "ready")
            if not loading:
                break
            if not pause(_POLL_S):
                return


def spawn_process(command: LaunchCommand, log: Path, ready_s: float) -> CommandProcess:
    """Start the process of a command, and return it without waiting until it serves requests."""
    process = CommandProcess(command, log, ready_s=ready_s)
    process.spawn()
    return process


def start_batches(commands: Sequence[LaunchCommand]) -> Iterator[list[LaunchCommand]]:
    """Yield commands in batches. Start each batch when the previous batch serves requests.

    Stores, encoders and processes that share a GPU are started one by one, other engines together, and
    routers last.
    """
    batch: list[LaunchCommand] = []
    runnable = [command for command in commands if command.argv]
    for command in sorted(runnable, key=lambda c: c.kind == "router"):
        if batch and command.kind == "router" and batch[-1].kind != "router":
            yield batch
            batch = []
        batch.append(command)
        if command.shares_gpu or command.kind in ("store", "encoder"):
            yield batch
            batch = []
    if batch:
        yield batch


def _drain_s(command: LaunchCommand) -> float:
    flag = "--shutdown-timeout"
    return float(command.argv[command.argv.index(flag) + 1]) if flag in command.argv else 0.0
