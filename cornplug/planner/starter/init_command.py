"""Command `cornplug plan init`, which writes a first plan input for a model and a list of GPUs."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from cornplug.errors import ConfigError
from cornplug.planner.inputs import toml_reader
from cornplug.planner.starter.first_input import first_input
from cornplug.planner.starter.known_models import starting_model


def main(argv: list[str]) -> int:
    """Run the command: write a first plan input, and return the exit status. Raises ConfigError with the
    wrong argument and the remedy."""
    args = _parser().parse_args(argv)
    out: Path = args.output
    if out.exists() and not args.force:
        raise ConfigError(f"-o {out}", "already exists", "Choose another file, or add --force.")
    gpus = [gpu.strip() for gpu in args.gpus.split(",") if gpu.strip()]
    if not gpus:
        raise ConfigError("--gpus", "contains no GPU", "Write, for example, --gpus H100,L40S.")
    model = starting_model(args.model)
    folder = _from(out.parent, Path(args.model)) if Path(args.model).is_dir() else None
    command = shlex.join(["cornplug", "plan", "init", args.model, "--gpus", ",".join(gpus)])
    text = first_input(model, gpus, folder=folder, file=out.name, command=command)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(
            f"-o {out}", f"cannot be written: {e.strerror}", "Choose a file in a folder that you can write."
        ) from e
    toml_reader.read(out)
    print(f"Written: {out}. Fill in the values marked placeholder, then run: cornplug plan {out}")
    return 0


def _from(start: Path, folder: Path) -> str:
    """Return the path by which a file in `start` refers to the folder. An absolute path stays absolute."""
    return str(folder) if folder.is_absolute() else os.path.relpath(folder, start)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cornplug plan init",
        description="Write a first plan input with comments: the model, its tower, a placeholder workload "
        "with latency targets, and machines with their prices.",
        epilog="docs/plan-input.md lists hub ids and keys. Exit status: 0 written, 2 wrong argument.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="checkpoint folder, or a hub id that cornplug knows or that is in the local cache",
    )
    parser.add_argument(
        "--gpus", required=True, metavar="GPU[,GPU]", help="GPU types of the price table, such as H100,L40S"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("plan.toml"),
        metavar="FILE",
        help="file to write (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    return parser
