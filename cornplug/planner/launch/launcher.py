"""Launcher, which starts a deployment's processes on this host, waits until they are ready, and stops them.

From Python:

    deployment = Deployment.load(Path("plan.json"))
    run_dir = Path("/tmp/x")
    with running(deployment, local_commands(deployment, run_dir=run_dir), run_dir=run_dir) as processes:
        ...
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cornplug.config import load
from cornplug.errors import ConfigError
from cornplug.planner.launch.addresses import accepts_remote_hosts, check_address
from cornplug.planner.launch.addresses import hosts as addresses_of
from cornplug.planner.launch.command_lines import LaunchCommand, commands, files, name_of
from cornplug.planner.launch.command_list import unresolved_hosts
from cornplug.planner.launch.command_process import READY_S, CommandProcess, EventHandler, check_programs
from cornplug.planner.launch.encoder_links import check_secret_readable, check_secret_set
from cornplug.planner.launch.kv_transfer import Transfer
from cornplug.planner.plan import Deployment
from cornplug.processes import GRACE_S

_STOP_ORDER: Final = ("router", "external", "engine", "encoder", "store")
"""Order in which processes are stopped: clients before their servers."""
_POLL_S: Final = 0.2


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
