"""The `cornplug` command. Each subcommand is a function `main(argv) -> exit status`.

The module of a subcommand is imported only when the subcommand runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from cornplug import __version__
from cornplug.errors import CornplugError


class CliCommand(NamedTuple):
    target: str
    """`module:function`, imported lazily so that `cornplug --help` does not load torch."""
    help: str


COMMANDS: Mapping[str, CliCommand] = {
    "serve-store": CliCommand("cornplug.store.daemon.main:main", "run the store of this host (a daemon)"),
    "store": CliCommand("cornplug.commands.store_command:main", "delete entries of the running store"),
    "top": CliCommand("cornplug.commands.top:main", "monitor the running store: usage, hits, evictions"),
    "warm": CliCommand("cornplug.commands.warm:main", "load an app's prompts and images into the store"),
    "encoder": CliCommand(
        "cornplug.encoder_service.server:main", "run the shared encoder service (vision and audio towers)"
    ),
    "plan": CliCommand("cornplug.planner.plan_command:main", "compute a deployment from SLOs and prices"),
    "launch": CliCommand("cornplug.commands.launch_command:main", "run an apps file or a plan on this host"),
    "replan": CliCommand("cornplug.planner.replan_command:main", "compare the observed load with a plan"),
    "replay": CliCommand(
        "cornplug.replay:main", "simulate stores of other sizes or rules with a recorded trace"
    ),
    "profile": CliCommand("cornplug.planner.profile_command:main", "measure a component on this host"),
    "fingerprint": CliCommand(
        "cornplug.commands.fingerprint:main", "print fingerprints of checkpoints and the parts they share"
    ),
    "doctor": CliCommand("cornplug.commands.doctor:main", "check the setup of this host and suggest fixes"),
}

# Top-level module -> cornplug extra that installs it.
EXTRA_OF_MODULE: Mapping[str, str] = {
    "torch": "encoder",
    "transformers": "encoder",
    "safetensors": "encoder",
    "fastapi": "encoder",
    "uvicorn": "encoder",
    "av": "encoder",
    "zmq": "encoder",
    "multipart": "encoder",
    "python_multipart": "encoder",
    "pulp": "planner",
    "highspy": "planner",
    "jinja2": "planner",
    "matplotlib": "replay",
    "vllm": "vllm",
    "sglang": "sglang",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    If it raises a CornplugError, print the error on stderr and return 2.
    """
    args = _build_parser().parse_args(argv)
    try:
        return _import_command(COMMANDS[args.command].target)(args.args)
    except CornplugError as e:
        print(f"cornplug {args.command}: {e}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as e:
        extra = EXTRA_OF_MODULE.get((e.name or "").partition(".")[0])
        if extra is None:
            raise
        print(
            f"cornplug {args.command}: needs {e.name}, which is not installed. "
            f"Run: pip install 'cornplug[{extra}]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130


def _import_command(target: str) -> Callable[[list[str]], int]:
    module, _, function = target.partition(":")
    command: Callable[[list[str]], int] = getattr(import_module(module), function)
    return command


def _build_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="cornplug",
        description="Share image embeddings and prefix KV cache between vLLM and SGLang servers on a host.",
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())
        + "\n\nRun 'cornplug COMMAND --help' for the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cornplug {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    parser.add_argument("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
