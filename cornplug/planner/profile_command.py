"""`cornplug profile`: measure a component on this machine, and write a table for `cornplug plan`.

    cornplug profile llm --model DIR --gpu H100 --out llm.csv            starts the engine
    cornplug profile llm --url http://HOST:PORT --gpu H100 --out llm.csv measures a running engine
    cornplug profile encoder --model DIR --gpu L4 --out tower.csv

Add this to the plan's input:  profiles = [{ kind = "table", gpu = "H100", file = "llm.csv" }]
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Shown

from cornplug.errors import ConfigError
from cornplug.host import has_gpu
from cornplug.planner import encoder_passes, engine_steps
from cornplug.planner.engine_steps import SampleGrid
from cornplug.planner.inputs import component_shapes, profile_tables
from cornplug.planner.inputs.schema import Component, TowerShape
from cornplug.planner.launch.command_lines import LaunchCommand
from cornplug.planner.report import formatting

READY_S = 900.0
PhaseCallback = Callable[[str, float], None]
_PACKAGES: Final = ("cornplug", "torch")


def main(argv: Sequence[str]) -> int:
    """Run `cornplug profile`: measure a component, write its profile table, and return exit status 0.

    Raises CornplugError if the measurement fails.
    """
    argv = list(argv)
    args = _parser().parse_args(argv)
    _check(args)
    command = shlex.join(["cornplug", "profile", *argv])
    console = Console(stderr=True)
    with _progress_bar(console, args.out.name) as report:
        rows, facts = (_measure_llm if args.kind == "llm" else _measure_encoder)(args, report)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    about = {**_machine(), "measured": facts, "command": command}
    profile_tables.write(args.out, profile_tables.ProfileTable(tuple(rows), about))
    _show(Console(), rows, args.out)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for arguments that contradict each other."""
    if args.model is None and (args.url is None or args.kind == "encoder"):
        raise ConfigError("--model", "is missing", "Set the checkpoint's folder or hub id")
    if args.url is not None and args.flags:
        raise ConfigError("-- FLAGS", "the server is already running", "Remove the flags, or remove --url")
    if args.repeats < 2:
        raise ConfigError("--repeats", f"{args.repeats} is too few for a median", "Set 3 or more")


def _measure_llm(
    args: argparse.Namespace, report: PhaseCallback
) -> tuple[list[profile_tables.ProfileRow], str]:
    grid = SampleGrid(
        prompts=args.prompts, batches=args.batches, output_tokens=args.output_tokens, repeats=args.repeats
    )
    with ExitStack() as stack:
        url = args.url or stack.enter_context(_engine(args, grid, report))
        target = engine_steps.fetch_model(url, args.tokenizer or args.model)
        cell = {**_cell(args), "engine": args.engine}
        rows = engine_steps.measure_rows(target, grid, report, **cell)
        return rows, f"{args.engine} {engine_steps.version(url)}, median of {grid.repeats}"


def _measure_encoder(
    args: argparse.Namespace, report: PhaseCallback
) -> tuple[list[profile_tables.ProfileRow], str]:
    with ExitStack() as stack:
        url = args.url or stack.enter_context(_service(args, report))
        rows = encoder_passes.measure_rows(
            url,
            args.model,
            edges=args.edges,
            batches=args.batches,
            repeats=args.repeats,
            patches_per_token=args.patches_per_token or _patches_per_token(args.model),
            progress=report,
            **_cell(args),
        )
        return rows, f"latency of the encoder service for HTTP clients, median of {args.repeats}"


def _patches_per_token(model: str) -> int:
    """Return the number of patches that the tower merges into one token of the LLM. Raises ConfigError if the
    size of the tower is unknown."""
    tower = Component(name="tower", kind="encoder", model=model)
    shape = component_shapes.shape_of(tower, {tower.name: tower})
    assert isinstance(shape, TowerShape)
    return shape.patches_per_token


def _cell(args: argparse.Namespace) -> dict[str, str | int | None]:
    return {"gpu": args.gpu, "tp": args.tp, "pp": args.pp, "quantisation": args.quantisation}


@contextmanager
def _engine(args: argparse.Namespace, grid: SampleGrid, report: PhaseCallback) -> Iterator[str]:
    """Run an engine for the block, and yield its URL."""
    report("starting the engine", 0.0)
    command = engine_steps.engine(args.engine, args.model, grid, tp=args.tp, pp=args.pp, cores=_cores(args))
    with (
        _log(args) as log,
        engine_steps.run_server(_add_flags(command, args), log=log, ready_s=READY_S) as url,
    ):
        yield url


@contextmanager
def _service(args: argparse.Namespace, report: PhaseCallback) -> Iterator[str]:
    """Run an encoder service for the block, and yield its URL."""
    report("starting the encoder service", 0.0)
    with tempfile.TemporaryDirectory(prefix="cp-profile-") as folder, _log(args) as log:
        command = engine_steps.encoder(args.model, folder=Path(folder), cores=_cores(args))
        with engine_steps.run_server(_add_flags(command, args), log=log, ready_s=READY_S) as url:
            yield url


def _add_flags(command: LaunchCommand, args: argparse.Namespace) -> LaunchCommand:
    """Return the command with the flags that the user wrote after `--`."""
    return replace(command, argv=(*command.argv, *args.flags))


def _cores(args: argparse.Namespace) -> Sequence[int]:
    """Return the CPU cores on which the server runs, or [] if the machine has a GPU. Without a GPU, each rank
    of a component runs on one core."""
    mine = sorted(os.sched_getaffinity(0))
    return [] if has_gpu() else mine[: args.tp * args.pp]


@contextmanager
def _log(args: argparse.Namespace) -> Iterator[Path]:
    """Yield the path for the server's log. With --keep-log, the log is next to the table. Otherwise it is in
    a temporary folder that is removed after the block."""
    if args.keep_log:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        yield args.out.with_suffix(".log")
        return
    with tempfile.TemporaryDirectory(prefix="cp-profile-") as folder:
        yield Path(folder) / "server.log"


@contextmanager
def _progress_bar(console: Console, name: str) -> Iterator[PhaseCallback]:
    """Show a progress bar for the block, and yield a function that sets the current step and the finished
    share."""
    columns = (
        TextColumn(name),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)

        def report(what: str, share: float) -> None:
            progress.update(task, description=what, completed=share)

        yield report


def _show(console: Console, rows: Sequence[profile_tables.ProfileRow], path: Path) -> None:
    shown = Shown("kind", "of", "x", "time", title=str(path))
    for row in rows:
        shown.add_row(
            row.kind,
            profile_tables.QUANTITIES[row.kind],
            f"{row.x:,g}",
            formatting.format_seconds(row.seconds),
        )
    console.print(shown)


def _counts(text: str) -> tuple[int, ...]:
    """Parse a list of numbers, such as "64,256", into a sorted tuple."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as e:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers such as 64,256,1024"
        ) from e


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cornplug profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags after -- are passed to the server: ... -- --dtype float16",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    llm = kinds.add_parser("llm", help="measure a language model with an engine and `vllm bench serve`")
    llm.add_argument(
        "--engine",
        choices=("vllm", "sglang"),
        default="vllm",
        help="engine to measure (default: %(default)s)",
    )
    llm.add_argument("--tokenizer", help="folder or hub id of the tokenizer (default: the model's tokenizer)")
    llm.add_argument(
        "--prompts",
        type=_counts,
        default=(64, 256, 1024, 4096),
        help="prompt lengths in tokens, such as 64,256,1024",
    )
    llm.add_argument(
        "--batches",
        type=_counts,
        default=(1, 2, 4, 8, 16, 32),
        help="numbers of requests in a decode batch, such as 1,8,32",
    )
    llm.add_argument(
        "--output-tokens",
        type=int,
        default=32,
        help="output tokens of the requests that measure decoding (default: %(default)s)",
    )
    encoder = kinds.add_parser("encoder", help="measure a tower with cornplug's encoder service")
    encoder.add_argument(
        "--edges", type=_counts, default=(336,), help="side lengths of the images in pixels, such as 336,672"
    )
    encoder.add_argument(
        "--batches", type=_counts, default=(1, 2, 4, 8), help="numbers of images sent together, such as 1,4,8"
    )
    encoder.add_argument(
        "--patches-per-token",
        type=int,
        help="number of patches that the tower merges into one token (default: from config.json)",
    )
    for kind in (llm, encoder):
        kind.add_argument("--model", help="checkpoint folder or hub id")
        kind.add_argument("--url", help="URL of a running server (default: start a server)")
        kind.add_argument(
            "--gpu", required=True, help="name of the GPU type in plan inputs, such as H100 or cpu-core"
        )
        kind.add_argument("--tp", type=int, default=1, help="tensor-parallel degree (default: 1)")
        kind.add_argument("--pp", type=int, default=1, help="pipeline-parallel degree (default: 1)")
        kind.add_argument("--quantisation", choices=("none", "fp8", "awq", "gptq"), default="none")
        kind.add_argument("--repeats", type=int, default=5, help="measurements of each point (default: 5)")
        kind.add_argument("--out", type=Path, required=True, help="CSV file to write")
        kind.add_argument(
            "--keep-log", action="store_true", help="keep the server's log next to the CSV file"
        )
        kind.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags for the server")
    return parser


def _machine() -> dict[str, str]:
    """Describe this machine, its GPUs, the date and the package versions, for the provenance of a table."""
    found = {
        "machine": f"{len(os.sched_getaffinity(0))} cores of {_cpu()}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
    }
    gpus = _gpus()
    return {**found, "gpus": gpus} if gpus else found


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> str:
    """Describe the machine's GPUs, as in "2 x NVIDIA H100 80GB HBM3". Returns "" if the machine has no
    GPU."""
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    names = listed.stdout.strip().splitlines() if listed.returncode == 0 else []
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
