"""`cornplug launch plan.json`: starts a plan's part on this host, waits until it serves, ends it in order.

From Python:

    plan = Plan.load(Path("plan.json"))
    run_dir = Path("/tmp/x")
    with running(plan, local_commands(plan, run_dir=run_dir), run_dir=run_dir) as processes:
        ...
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from cornplug.errors import ConfigError, ProcessFailed
from cornplug.planner.launch.addresses import hosts as addresses_of
from cornplug.planner.launch.command_lines import LaunchCommand, commands, files, name_of
from cornplug.planner.launch.command_list import hosts_in, line
from cornplug.planner.launch.command_process import READY_S, CommandProcess
from cornplug.planner.launch.common_secret import check_named, check_readable, common_secret
from cornplug.planner.launch.kv_transfer import Transfer
from cornplug.planner.plan import Plan
from cornplug.private_paths import runtime_dir
from cornplug.processes import GRACE_S

Event = Callable[[CommandProcess, str], None]
"""Told of each process: "starting", "ready"."""

_ORDER: Final = ("router", "external", "engine", "encoder", "store")
"""Order in which processes are ended: clients before their servers."""
_POLL_S: Final = 0.2


@contextmanager
def running(
    plan: Plan,
    to_start: Sequence[LaunchCommand],
    *,
    run_dir: Path,
    transfer: Transfer = "nixl",
    ready_s: float = READY_S,
    event: Event = lambda process, what: None,
    stopping: threading.Event | None = None,
) -> Iterator[list[CommandProcess]]:
    """The processes of some commands of a plan, serving; ended in order on leaving, after an error too.

    Args:
        to_start: Of `local_commands`.
        run_dir: For sockets, logs and the plan's files; made, and closed to other users.
        ready_s: Longest wait for one process.
        stopping: Set by a caller that wants the start to be given up.

    Raises ProcessFailed with the end of the log of a process that fails, ConfigError for a program that is
    not installed, and for a common secret that is not there.
    """
    check_readable(command.env for command in to_start)
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, text in files(plan, transfer=transfer).items():
        (run_dir / name).write_text(text)
    started: list[CommandProcess] = []
    try:
        _start(to_start, started, run_dir, ready_s, event, stopping or threading.Event())
        yield started
    finally:
        end(started)


def local_commands(
    plan: Plan,
    *,
    run_dir: Path,
    host: str | None = None,
    routers: bool = False,
    only: Sequence[str] = (),
    addresses: Mapping[str, str] | None = None,
    secret_file: Path | None = None,
    transfer: Transfer = "nixl",
) -> list[LaunchCommand]:
    """The commands of one host of a plan, with every variable filled in.

    Args:
        host: One of the plan's, or HOST_n where the plan names none; None: the plan has only one.
        routers: The plan's routers in place of a host's servers.
        only: Groups to start, with the store; none: all.
        addresses: HOST_n -> its address.
        secret_file: The secret that all hosts have in common.

    Raises ConfigError for a host, group, address or secret that is missing or unknown.
    """
    chosen = _chosen(plan, commands(plan, transfer=transfer), host, routers=routers)
    names = {command.group for command in chosen}
    if unknown := set(only) - names:
        raise ConfigError(
            "--only", f"no group {', '.join(sorted(unknown))}", f"There are: {', '.join(sorted(names))}."
        )
    values = {"RUN_DIR": str(run_dir.absolute()), "PLAN_DIR": str(run_dir.absolute())}
    values |= {"HOST_1": "127.0.0.1"} if _one_host(plan) else {}
    values |= addresses or {}
    values |= {"SECRET_FILE": str(secret_file.absolute())} if secret_file else {}
    found = [c.resolved(values) for c in chosen if not only or c.group in only or c.kind == "store"]
    if missing := sorted({name for command in found for name in hosts_in(command)}):
        remedy = " ".join(f"--address {name}=ADDRESS" for name in missing)
        raise ConfigError("--address", f"{', '.join(missing)} of the plan has no address", f"Add {remedy}.")
    check_named(command.env for command in found)
    return found


def _one_host(plan: Plan) -> bool:
    return sum(nodes.count for nodes in plan.nodes) == 1


def _chosen(
    plan: Plan, found: Sequence[LaunchCommand], host: str | None, *, routers: bool
) -> list[LaunchCommand]:
    used = {command.host for command in found}
    hosts = [name.strip("${}") for name in dict.fromkeys(addresses_of(plan).values()) if name in used]
    if routers:
        return [c for c in found if c.kind == "router"]
    if host is None and len(hosts) <= 1:
        return list(found)
    if host not in hosts:
        problem = f"{host!r} is none of them" if host else f"the plan {plan.name!r} needs {len(hosts)} hosts"
        raise ConfigError(
            "--host",
            problem,
            f"Run `cornplug launch plan.json --host HOST` on each of {', '.join(hosts)}; once all serve, "
            "`cornplug launch plan.json --routers`.",
        )
    several = len(hosts) > 1
    return [c for c in found if c.host.strip("${}") == host and not (several and c.kind == "router")]


def end(processes: Sequence[CommandProcess]) -> None:
    """End them, those of one kind together, routers first and stores last."""
    for kind in _ORDER:
        these = [p for p in processes if p.command.kind == kind]
        began_s = time.monotonic()
        for process in these:
            process.terminate()
        for process in these:
            process.wait_end(began_s + _drain_s(process.command) + GRACE_S - time.monotonic())


def main(argv: list[str]) -> int:
    """Exit status: 0 when it was ended from outside, 1 when a process failed, 2 for a wrong plan."""
    args = _parser().parse_args(argv)
    plan = Plan.load(args.plan)
    run_dir = args.run_dir or runtime_dir() / f"plan-{re.sub(r'[^A-Za-z0-9.-]+', '-', plan.name)[:24]}"
    console = Console()
    to_start = local_commands(
        plan,
        run_dir=run_dir,
        host=args.host,
        routers=args.routers,
        only=args.only,
        addresses=dict(args.address),
        secret_file=common_secret(args.secret_file),
        transfer=args.transfer,
    )
    if args.dry_run:
        print("\n\n".join(_dry(command) for command in to_start))
        return 0
    for remark in [remark for command in to_start if not command.argv for remark in command.remarks]:
        console.print(remark, markup=False)
    if not any(command.argv for command in to_start):
        return 0
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    ) as progress:
        try:
            with running(
                plan,
                to_start,
                run_dir=run_dir,
                transfer=args.transfer,
                ready_s=args.ready_s,
                event=_shown(progress),
                stopping=stop,
            ) as processes:
                progress.stop()
                if not stop.is_set():
                    console.print(_addresses(processes))
                    print(
                        f"Logs, and the classes' addresses in routes.json: {run_dir}\nCtrl-C ends it.",
                        flush=True,
                    )
                    _watch(processes, stop)
                console.print("ending: requests under way are finished")
        except ProcessFailed as e:
            print(f"cornplug launch: {e}", file=sys.stderr)
            return 1
    return 0


def _start(
    to_start: Sequence[LaunchCommand],
    started: list[CommandProcess],
    run_dir: Path,
    ready_s: float,
    event: Event,
    stopping: threading.Event,
) -> None:
    """Start stores, encoders and processes that share a GPU one by one, engines together, routers last."""
    loading: list[CommandProcess] = []
    for command in to_start:
        if not command.argv or stopping.is_set():
            continue
        if command.kind == "router":
            _await(loading, event, stopping)
        process = CommandProcess(command, run_dir / f"{name_of(command)}.log", ready_s=ready_s)
        started.append(process)
        process.spawn()
        event(process, "starting")
        loading.append(process)
        if command.beside_others or command.kind in ("store", "encoder"):
            _await(loading, event, stopping)
    _await(loading, event, stopping)


def _await(loading: list[CommandProcess], event: Event, stopping: threading.Event) -> None:
    """Until each of them serves; takes them out of the list."""
    while loading and not stopping.is_set():
        for process in [p for p in loading if p.serves()]:
            loading.remove(process)
            event(process, "ready")
        stopping.wait(_POLL_S if loading else 0)


def _watch(processes: Sequence[CommandProcess], stop: threading.Event) -> None:
    while not stop.wait(_POLL_S):
        for process in processes:
            process.check()


def _drain_s(command: LaunchCommand) -> float:
    flag = "--shutdown-timeout"
    return float(command.argv[command.argv.index(flag) + 1]) if flag in command.argv else 0.0


def _shown(progress: Progress) -> Event:
    tasks = {}

    def event(process: CommandProcess, what: str) -> None:
        if process.name not in tasks:
            tasks[process.name] = progress.add_task("", total=1)
        progress.update(
            tasks[process.name],
            description=f"{process.name}: {what}",
            completed=1 if what == "ready" else 0,
        )

    return event


def _addresses(processes: Sequence[CommandProcess]) -> Table:
    table = Table("what", "address", "process", box=None)
    for process in processes:
        command = process.command
        table.add_row(process.name, command.url or command.socket or "", str(process.pid))
    return table


def _dry(command: LaunchCommand) -> str:
    lines = [f"# {command.kind} {command.group}", *(f"# {remark}" for remark in command.remarks)]
    return "\n".join([*lines, *([line(command)] if command.argv else [])])


def _address(text: str) -> tuple[str, str]:
    """ "HOST_2=10.0.0.2", for argparse."""
    name, equals, address = text.partition("=")
    if not (name and equals and address):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=ADDRESS")
    return name, address


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cornplug launch", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("plan", type=Path, help="plan.json of `cornplug plan`")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--host", help="host of the plan to start, by its name or as HOST_1, HOST_2, ...")
    part.add_argument("--routers", action="store_true", help="start the plan's routers, once all hosts serve")
    parser.add_argument(
        "--address",
        action="append",
        default=[],
        type=_address,
        metavar="HOST_n=ADDRESS",
        help="address of a host that the plan does not name; repeat",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, start nothing")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="GROUP",
        help="start this group, with the store; repeat",
    )
    parser.add_argument(
        "--secret-file",
        type=Path,
        help="file of 32 bytes that all hosts have, where engines ask encoder services of other hosts "
        "(default: the setting store.secret_file)",
    )
    parser.add_argument(
        "--run-dir", type=Path, help="sockets and logs (default: cornplug's own folder of this user)"
    )
    parser.add_argument(
        "--ready-s",
        type=float,
        default=READY_S,
        help="longest wait for one process, in s (default: %(default)s)",
    )
    parser.add_argument(
        "--transfer",
        choices=("nixl", "mooncake", "lmcache"),
        default="nixl",
        help="how KV goes from prefill to decode (default: nixl)",
    )
    return parser
