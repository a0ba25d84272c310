"""`cornplug launch plan.json`: starts a one-host plan, waits until it serves, ends it in order.

Who wants it from Python:

    with running(Plan.load(Path("plan.json")), run_dir=Path("/tmp/x")) as processes:
        ...
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from cornplug.errors import ConfigError
from cornplug.planner.launch.command_lines import LaunchCommand, commands, files
from cornplug.planner.launch.kv_transfer import Transfer
from cornplug.planner.launch.process_runner import GRACE_S, ProcessEnded, RunningCommand
from cornplug.planner.launch.scripts import READY_S
from cornplug.planner.plan import Plan
from cornplug.private_paths import runtime_dir

Event = Callable[[RunningCommand, str], None]
"""Told of each process: "starting", "ready"."""

_ORDER: Final = ("router", "external", "engine", "encoder", "store")
"""In which they are ended: who asks before who is asked."""
_POLL_S: Final = 0.2


@contextmanager
def running(
    plan: Plan,
    *,
    run_dir: Path,
    only: Sequence[str] = (),
    transfer: Transfer = "nixl",
    ready_s: float = READY_S,
    event: Event = lambda process, what: None,
    stopping: threading.Event | None = None,
) -> Iterator[list[RunningCommand]]:
    """All processes of a one-host plan, serving; ended in order on leaving, whatever happens.

    Args:
        run_dir: For sockets and logs; made, and closed to others.
        only: Groups to start, with the store; none: all.
        ready_s: Longest wait for one process.
        stopping: Set by whoever wants the start to be given up.

    Raises ConfigError for a plan of several hosts, ProcessEnded with a log's end for what fails.
    """
    to_start = here(plan, run_dir=run_dir, only=only, transfer=transfer)
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, text in files(plan, transfer=transfer).items():
        (run_dir / name).write_text(text)
    started: list[RunningCommand] = []
    try:
        _start(to_start, started, run_dir, ready_s, event, stopping or threading.Event())
        yield started
    finally:
        end(started)


def here(
    plan: Plan, *, run_dir: Path, only: Sequence[str] = (), transfer: Transfer = "nixl"
) -> list[LaunchCommand]:
    """The commands of a one-host plan, with nothing left open. Raises ConfigError as `running`."""
    found = commands(plan, transfer=transfer)
    hosts = list(dict.fromkeys(command.host for command in found))
    if len(hosts) > 1:
        raise ConfigError(
            "nodes",
            f"the plan {plan.name!r} needs {len(hosts)} hosts, and this starts what runs on one",
            "Run its scripts, which `cornplug plan INPUT -o DIR` writes: DIR/launch-HOST.sh on each host, "
            "then DIR/routers.sh.",
        )
    names = {command.group for command in found}
    if unknown := set(only) - names:
        raise ConfigError(
            "--only", f"no group {', '.join(sorted(unknown))}", f"There are: {', '.join(sorted(names))}."
        )
    chosen = [c for c in found if not only or c.group in only or c.kind == "store"]
    values = {"RUN_DIR": str(run_dir.absolute()), "PLAN_DIR": str(run_dir.absolute()), "HOST_1": "127.0.0.1"}
    return [command.resolved(values) for command in chosen]


def end(processes: Sequence[RunningCommand]) -> None:
    """End them, those of one kind together, routers first and stores last."""
    for kind in _ORDER:
        these = [p for p in processes if p.command.kind == kind]
        for process in these:
            process.terminate()
        for process in these:
            process.end(time.monotonic() + _drain_s(process.command) + GRACE_S)


def main(argv: list[str]) -> int:
    """Exit status: 0 when it was ended from outside, 1 when a process failed, 2 for a wrong plan."""
    args = _parser().parse_args(argv)
    plan = Plan.load(args.plan)
    run_dir = args.run_dir or runtime_dir() / f"plan-{re.sub(r'[^A-Za-z0-9.-]+', '-', plan.name)[:24]}"
    console = Console()
    if args.dry_run:
        for command in here(plan, run_dir=run_dir, only=args.only, transfer=args.transfer):
            print(_dry(command))
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
                run_dir=run_dir,
                only=args.only,
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
        except ProcessEnded as e:
            print(f"cornplug launch: {e}", file=sys.stderr)
            return 1
    return 0


def _start(
    to_start: Sequence[LaunchCommand],
    started: list[RunningCommand],
    run_dir: Path,
    ready_s: float,
    event: Event,
    stopping: threading.Event,
) -> None:
    """Stores, encoders, and what shares a GPU one after the other, engines together, routers last."""
    loading: list[RunningCommand] = []
    for command in to_start:
        if not command.argv or stopping.is_set():
            continue
        if command.kind == "router":
            _await(loading, ready_s, event, stopping)
        process = RunningCommand(command, run_dir / "starting.log")
        process.log = run_dir / f"{process.name}.log"
        started.append(process)
        process.start()
        event(process, "starting")
        loading.append(process)
        if command.beside_others or command.kind in ("store", "encoder"):
            _await(loading, ready_s, event, stopping)
    _await(loading, ready_s, event, stopping)


def _await(loading: list[RunningCommand], ready_s: float, event: Event, stopping: threading.Event) -> None:
    """Until each of them serves; takes them out of the list."""
    while loading and not stopping.is_set():
        for process in [p for p in loading if p.ready()]:
            loading.remove(process)
            event(process, "ready")
        for process in loading:
            if time.monotonic() - process.began_s > ready_s:
                raise ProcessEnded(f"{process.name} is not ready after {ready_s:g} s; {process.tail()}")
        stopping.wait(_POLL_S if loading else 0)


def _watch(processes: Sequence[RunningCommand], stop: threading.Event) -> None:
    while not stop.wait(_POLL_S):
        for process in processes:
            process.check()


def _drain_s(command: LaunchCommand) -> float:
    flag = "--shutdown-timeout"
    return float(command.argv[command.argv.index(flag) + 1]) if flag in command.argv else 0.0


def _shown(progress: Progress) -> Event:
    tasks = {}

    def event(process: RunningCommand, what: str) -> None:
        if process.name not in tasks:
            tasks[process.name] = progress.add_task("", total=1)
        progress.update(
            tasks[process.name],
            description=f"{process.name}: {what}",
            completed=1 if what == "ready" else 0,
        )

    return event


def _addresses(processes: Sequence[RunningCommand]) -> Table:
    table = Table("what", "address", "process", box=None)
    for process in processes:
        command = process.command
        table.add_row(process.name, command.url or command.socket or "", str(process.pid))
    return table


def _dry(command: LaunchCommand) -> str:
    lines = [f"# {command.kind} {command.group}", *(f"# {remark}" for remark in command.remarks)]
    words = [f"{name}={value}" for name, value in sorted(command.env.items())]
    words = ["env", *words] if words else []
    if command.cores:
        words += ["taskset", "--cpu-list", ",".join(map(str, command.cores))]
    return "\n".join([*lines, *([shlex.join([*words, *command.argv])] if command.argv else []), ""])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cornplug launch", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("plan", type=Path, help="plan.json of `cornplug plan`, of one host")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, start nothing")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="GROUP",
        help="start this group, with the store; repeat",
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
