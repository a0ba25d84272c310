"""`cornplug launch FILE`: run an apps file, or the part of a plan for this host.

Processes start in the order store, encoders, engines, routers. Each process starts when the processes before
it are ready. A process that ends by itself is restarted. On SIGINT and SIGTERM, running requests finish
before processes are stopped.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from cornplug.apps import AppsFile, deployment_of
from cornplug.errors import ProcessFailed
from cornplug.planner.launch.command_lines import LaunchCommand, name_of, shell_line
from cornplug.planner.launch.connections import common_secret
from cornplug.planner.launch.launcher import (
    READY_S,
    CommandProcess,
    CommandSelection,
    RestartPolicy,
    local_commands,
    run_commands,
)
from cornplug.planner.launch.session import (
    CURRENT_PLAN_FILE,
    ControlSocket,
    LaunchSession,
    LaunchWaits,
    RunFolder,
    control_socket,
    send_deployment,
)
from cornplug.planner.launch.transition import RenderCommands, Transition, compute_transition
from cornplug.planner.plan import Deployment, PlannedApplication
from cornplug.private_paths import runtime_dir
from cornplug.processes import ManagedProcess

_FAILED: Final = 1


def main(argv: list[str]) -> int:
    """Run until a signal, and return the exit status.

    The exit status is 0 if a signal ended the launcher while all processes were running, and 1 if a process
    failed. Raises ConfigError (exit status 2) if the file is invalid.
    """
    if argv[:1] == ["schema"]:
        print(json.dumps(AppsFile.schema_of_file(), indent=1))
        return 0
    args = _parser().parse_args(argv)
    deployment = load_deployment(args.file)
    run_dir = args.run_dir or runtime_dir() / f"plan-{re.sub(r'[^A-Za-z0-9.-]+', '-', deployment.name)[:24]}"
    render = partial(
        local_commands,
        selection=CommandSelection(args.host, args.routers, args.only),
        run_dir=run_dir,
        addresses=dict(args.address),
        secret_file=common_secret(args.secret_file),
        transfer=args.transfer,
    )
    if args.apply is not None:
        return _send_new_deployment(
            deployment, load_deployment(args.apply), render, run_dir, dry=args.dry_run
        )
    to_start = render(deployment)
    if args.dry_run:
        print("\n\n".join(_format_command(command) for command in to_start))
        return 0
    for remark in [remark for command in to_start if not command.argv for remark in command.remarks]:
        print(remark)
    if not any(command.argv for command in to_start):
        return 0
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        with control_socket(run_dir) as control:
            return _launch(deployment, to_start, render, run_dir, control, args, stop)
    except ProcessFailed as e:
        print(f"cornplug launch: {e}", file=sys.stderr)
        return _FAILED


def load_deployment(path: Path) -> Deployment:
    """Load a plan.json or an apps file (`.toml`). Raises ConfigError if the file is invalid."""
    return deployment_of(AppsFile.read(path)) if path.suffix == ".toml" else Deployment.load(path)


def _launch(
    deployment: Deployment,
    to_start: list[LaunchCommand],
    render: RenderCommands,
    run_dir: Path,
    control: ControlSocket,
    args: argparse.Namespace,
    stop: threading.Event,
) -> int:
    console = Console()
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    ) as progress:
        events = _EventPrinter(control, progress)
        with run_commands(
            deployment,
            to_start,
            run_dir=run_dir,
            transfer=args.transfer,
            ready_s=args.ready_s,
            on_event=events,
            stopping=stop,
        ) as processes:
            progress.stop()
            events.progress = None
            well = stop.is_set()
            if not well:
                session = LaunchSession(
                    deployment,
                    processes,
                    render=render,
                    folder=RunFolder(run_dir, args.transfer),
                    on_event=events,
                    policy=RestartPolicy(max_restarts=args.restarts),
                    waits=LaunchWaits(args.ready_s, args.settle_s),
                )
                console.print(_address_table(processes))
                print(
                    f"Logs, and the classes' addresses in routes.json: {run_dir}\nCtrl-C ends it.",
                    flush=True,
                )
                warming = _CacheWarming(run_dir)
                warming.begin(deployment)
                try:
                    well = session.watch(
                        stop, lambda: control.poll(partial(_apply_and_report, session, stop, control))
                    )
                finally:
                    warming.end()
            console.print("waiting until running requests are finished, then stopping")
    return 0 if well else _FAILED


def _apply_and_report(
    session: LaunchSession, stop: threading.Event, control: ControlSocket, deployment: Deployment
) -> None:
    for text in _describe_steps(session.apply(deployment, stop)):
        control.send_progress(text)


def _send_new_deployment(
    old: Deployment, new: Deployment, render: RenderCommands, run_dir: Path, *, dry: bool
) -> int:
    if dry:
        if (current := run_dir / CURRENT_PLAN_FILE).exists():
            old = Deployment.load(current)
        for text in _describe_steps(compute_transition(old, new, render)):
            print(text)
        return 0
    render(new)  # This raises an exception if the new plan has an error.
    error = send_deployment(run_dir, new, print)
    if error is not None:
        print(f"cornplug launch: {error}", file=sys.stderr)
    return 0 if error is None else _FAILED


def _describe_steps(steps: Transition) -> list[str]:
    """Return the steps of a transition as text, one line for each old or new process."""
    told = [f"keep {name_of(old)}" for old, _ in steps.kept]
    told += [
        f"keep the current flags of {name}: the plan has {', '.join(flags)}"
        for name, flags in steps.outdated_flags.items()
    ]
    told += [f"start {name_of(command)} at {command.url or command.socket}" for command in steps.start_before]
    told += [f"end {name_of(command)}, once clients have the new routes" for command in steps.to_stop]
    told += [
        f"then start {name_of(command)} at {command.url or command.socket}" for command in steps.start_after
    ]
    return told


class _EventPrinter:
    """Reports events of processes to the terminal and to `--apply`.

    During startup, the terminal shows progress. Later, it shows a line for each event.
    """

    def __init__(self, control: ControlSocket, progress: Progress | None) -> None:
        self.progress = progress
        self._control = control
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, process: CommandProcess, what: str) -> None:
        text = f"{process.name}: {what}"
        self._control.send_progress(text)
        if self.progress is None:
            print(text, flush=True)
            return
        if process.name not in self._tasks:
            self._tasks[process.name] = self.progress.add_task("", total=1)
        done = 1 if what == "ready" else 0
        self.progress.update(self._tasks[process.name], description=text, completed=done)


class _CacheWarming:
    """Runs `cornplug warm` with the applications' prompts while the engines serve other requests."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._processes: list[ManagedProcess] = []

    def begin(self, deployment: Deployment) -> None:
        """Start one process for each application with prompts, in the order of the deployment."""
        routes: dict[str, Any] = json.loads((self._run_dir / "routes.json").read_text())
        for app, (url, lines) in _warm_requests(deployment, routes).items():
            file = self._run_dir / f"warm-{app}.jsonl"
            file.write_text(lines)
            process = ManagedProcess(
                [sys.executable, "-P", "-m", "cornplug.cli", "warm", str(file), "--engine", url],
                log=self._run_dir / f"warm-{app}.log",
                name=f"warm {app}",
                ends_with_parent=True,
            )
            process.spawn()
            self._processes.append(process)

    def end(self) -> None:
        """Stop the `cornplug warm` processes that are still running."""
        for process in self._processes:
            process.stop(grace_s=1)


def _address_table(processes: list[CommandProcess]) -> Table:
    table = Table("what", "address", "process", box=None)
    for process in processes:
        command = process.command
        table.add_row(process.name, command.url or command.socket or "", str(process.pid))
    return table


def _format_command(command: LaunchCommand) -> str:
    lines = [f"# {command.kind} {command.group}", *(f"# {remark}" for remark in command.remarks)]
    return "\n".join([*lines, *([shell_line(command)] if command.argv else [])])


def _parse_address(text: str) -> tuple[str, str]:
    """Parse "HOST_2=10.0.0.2" into (name, address), for argparse."""
    name, equals, address = text.partition("=")
    if not (name and equals and address):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=ADDRESS")
    return name, address


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cornplug launch",
        description="Run an apps file, or the part of a plan for this host. `cornplug launch schema` prints "
        "the JSON schema of an apps file.",
        epilog="Exit status: 0 if ended by SIGINT or SIGTERM, 1 if a process did not start or ended too "
        "often, 2 if the file is invalid.",
    )
    parser.add_argument("file", type=Path, help="apps file (.toml), or plan.json from `cornplug plan`")
    parser.add_argument(
        "--apply",
        type=Path,
        metavar="NEW",
        help="change the running launcher of FILE to this file or plan, with as few restarts as possible",
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--host", help="host of the plan to run here: its name, or HOST_1, HOST_2, ...")
    part.add_argument(
        "--routers", action="store_true", help="start the plan's routers, after all hosts are running"
    )
    parser.add_argument(
        "--address",
        action="append",
        default=[],
        type=_parse_address,
        metavar="HOST_n=ADDRESS",
        help="address of a host that has no name in the plan; can be repeated",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the commands, or the steps of --apply, without running them",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="GROUP",
        help="start only this group and the store; can be repeated",
    )
    parser.add_argument(
        "--secret-file",
        type=Path,
        help="secret of all hosts, if engines use encoder services of other hosts (default: the setting "
        "store.secret_file)",
    )
    parser.add_argument(
        "--run-dir", type=Path, help="folder for sockets and logs (default: cornplug's folder of this user)"
    )
    parser.add_argument(
        "--ready-s",
        type=float,
        default=READY_S,
        help="maximum seconds to wait until a process is ready (default: %(default)s)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=RestartPolicy().max_restarts,
        metavar="N",
        help="maximum consecutive restarts of a process that ends by itself, after 1, 2, 4, ... s (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--settle-s",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds that --apply waits for clients to read a changed routes.json (default: %(default)s)",
    )
    parser.add_argument(
        "--transfer",
        choices=("nixl", "mooncake", "lmcache"),
        default="nixl",
        help="how KV is transferred from prefill to decode engines (default: nixl)",
    )
    return parser


def _warm_requests(
    deployment: Deployment, routes: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[str, str]]:
    """Return (URL of the first engine, prompts as JSON lines) for each application with prompts."""
    found = {}
    for app in deployment.applications:
        urls = [way["to"][0]["url"] for name, way in routes.items() if name.partition("/")[0] == app.name]
        if lines := _lines(app):
            found[app.name] = (urls[0], "".join(f"{json.dumps(line)}\n" for line in lines))
    return found


def _lines(app: PlannedApplication) -> list[dict[str, Any]]:
    """Return the requests for one application.

    There is one request for each prefix, after the system prompt. Without prefixes, there is one request with
    only the system prompt.
    """
    system = [{"role": "system", "content": app.system_prompt}] if app.system_prompt else []
    salt = {"cache_salt": app.tenant} if app.tenant else {}
    texts = app.prefixes or ([""] if system else [])
    return [{"messages": [*system, {"role": "user", "content": text}], **salt} for text in texts]
